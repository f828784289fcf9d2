"""Load, experiments and the servers they run on. Not part of the installed package."""
