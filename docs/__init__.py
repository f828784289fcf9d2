"""Documents, and what generates those that can be generated."""
