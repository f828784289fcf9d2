"""Which family of models SGLang's device pools belong to."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from hiqcache.compatibility import FAMILIES, Family


def family_of(kvcache: Any, states: bool, stages: int) -> Family | None:
    """The family that ``kvcache``, a rank's device pool, is of; None for one of no family.

    states: whether recurrent states are kept beside it. stages: of the pipeline; one of several may
    have no attention where its model has some.
    """
    if isinstance(kvcache, DeepSeekV4TokenToKVPool):
        return FAMILIES["deepseek_v4"]
    if isinstance(kvcache, MiniMaxSparseKVPool):
        return FAMILIES["sparse"]
    full, windows = kvcache, False
    if isinstance(full, HybridLinearKVPool):
        full, states = full.full_kv_pool, True
    if isinstance(full, SWAKVPool):
        full, windows = full.full_kv_pool, True
    if isinstance(full, MLATokenToKVPool):
        if states or windows:
            return FAMILIES["linear_mla" if states else "mla_sliding"]
        return FAMILIES["dsa" if isinstance(full, DSATokenToKVPool) else "mla"]
    if not isinstance(full, MHATokenToKVPool):
        return None
    if windows:
        return FAMILIES["linear_sliding" if states else "sliding"]
    if states:
        return FAMILIES["linear" if full.layer_num or stages > 1 else "state"]
    return FAMILIES["plain" if full.head_dim == full.v_head_dim else "unequal"]
