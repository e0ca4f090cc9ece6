"""Runs, from a single step to a whole sweep."""
