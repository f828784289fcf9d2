"""Shapes of KV that measurements take where no model is at hand."""

from hiqcache.geometry import KVGeometry

QWEN3_8B = KVGeometry.of_heads(layers=36, heads=8, head_dim=128)
