"""Deciding about memory: frames, checkpoints, boundaries. Plain integers, no torch, no clock."""
