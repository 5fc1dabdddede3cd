"""Deciding about steps: which rows of which request run next. No torch, no clock."""
