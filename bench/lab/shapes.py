"""Shapes of KV that measurements take where no model is at hand."""

from hiqcache.compatibility import FAMILIES

_PLAIN = FAMILIES["plain"].example
assert _PLAIN is not None

#: Qwen3-8B's, by which the factor of plain attention is stated.
(QWEN3_8B,) = _PLAIN.pools
