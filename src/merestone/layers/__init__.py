"""Layers: each declares the state it keeps; one place (the arena) allocates it."""
