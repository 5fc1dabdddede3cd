"""Speculation: drafters, and which of their drafts are accepted."""
