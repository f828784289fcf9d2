"""Benchmarks with right answers, asked with a long few-shot prefix that comes from L2."""
