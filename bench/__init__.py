"""Measurements and long runs; each ends with one line of JSON."""
