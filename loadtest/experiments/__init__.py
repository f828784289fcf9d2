"""The experiments behind `make bench`: what they start, measure, check and report."""
