"""Boundaries that outlive memory: what stores keep, where, and how it comes back."""
