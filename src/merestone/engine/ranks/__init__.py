"""Ranks as processes: one that decides, and one for every rank, which obeys its plans."""
