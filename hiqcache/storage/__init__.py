"""Encoded pages beyond the host: how they lie in storage, what names them, what proves them."""
