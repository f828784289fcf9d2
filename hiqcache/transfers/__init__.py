"""Transfers: how rows move between device buffers and the host arena. One transfer a file."""
