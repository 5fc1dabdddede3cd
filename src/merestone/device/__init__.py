"""Doing: the arena, the slots, and the runner that obeys a plan."""
