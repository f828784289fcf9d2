"""Clients that no one here wrote, their figures beside ours of the same requests."""
