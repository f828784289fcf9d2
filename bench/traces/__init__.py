"""Recorded traffic through both tiers: simulated exactly, and replayed on real servers."""
