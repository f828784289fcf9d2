"""Restores checked one by one, by the million."""
