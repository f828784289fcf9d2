"""How many tokens the host pools of one server hold, so that they take the bytes SGLang's would.

SGLang gives each host pool so many slots, and some pools follow another's: a recurrent state is of
use only with the KV rows of its prefix. So all of them grow by one factor, the one at which they
take together what SGLang's own pools would have taken:

    growth = sum of SGLang's bytes / sum of the bytes kept here, both at SGLang's slots

Every rank must come to the same sizes, or their radix trees part. Nothing is asked of other ranks
here (stages of a pipeline build different pools, so a question for each pool could wait for ever):
tensor-parallel ranks hold the same shapes, and for pipeline stages the factor is one that holds for
any number of layers. (Under --hicache-size SGLang itself agrees on the smallest stage's tokens.)
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_memory, get_parallel

from hiqcache.settings import Settings
from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.host_pool import QuantisedPool
from hiqcache.sglang.rows import layers_of, row_dtype, stock_row_bytes


class Content(NamedTuple):
    """Host bytes of the same slots: in SGLang's own pool, and as kept here."""

    stock: Fraction
    kept: Fraction


def kv_pools(kvcache: Any) -> list[Any]:
    """The KV pools in SGLang's device pool of any kind that is served; none of other kinds."""
    if isinstance(kvcache, SWAKVPool):
        return [kvcache.full_kv_pool, kvcache.swa_kv_pool]
    if isinstance(kvcache, HybridLinearKVPool):
        return kv_pools(kvcache.full_kv_pool)
    return [kvcache] if isinstance(kvcache, MHATokenToKVPool | MLATokenToKVPool) else []


def row_bytes(
    kv_pool: Any, page_size: int, settings: Settings, layers: int | None = None
) -> Content:
    """Bytes per slot of ``layers`` layers (default: the pool's own) of a KV pool."""
    info = adapter().rows_of_device_pool(kv_pool)
    layers = layers_of(info) if layers is None else layers
    stock = Fraction(stock_row_bytes(info) * layers)
    if not stock:
        return Content(stock, stock)
    layout = QuantisedPool.records(
        info,
        row_dtype(info, kv_pool.dtype),
        # Ranks of a decode context parallel group share a page.
        page_size // get_parallel().attn_dcp_size,
        get_memory().hicache_mem_layout,
        settings,
        layers,
        get_memory().hicache_storage_backend,
    )
    return Content(stock, Fraction(layout.bytes_per_token))


def shrinkage(kv_pool: Any, page_size: int, settings: Settings) -> Fraction:
    """Bytes kept here for each byte of SGLang's own host pool for ``kv_pool``."""
    row = row_bytes(kv_pool, page_size, settings)
    return row.kept / row.stock


def growth(params: Any, settings: Settings) -> Fraction:
    """Slots here for each slot of SGLang's own, for the pools of ``params`` (CacheInitParams)."""
    pools = kv_pools(params.token_to_kv_pool_allocator.get_kvcache())
    states = getattr(params.req_to_token_pool, "mamba_pool", None)
    if get_parallel().pp_size > 1 and get_memory().hicache_size <= 0:
        if states is not None:
            # The share of states in a stage's bytes is known to that stage alone.
            return Fraction(1)
        factors = []
        for pool in pools:
            row = row_bytes(pool, params.page_size, settings, layers=1)
            # At most so much in each layer: a stage may have layers without.
            beside = _beside(pool, layers=1)
            factors.append((row.stock + beside) / (row.kept + beside))
        return min(factors, default=Fraction(1))
    contents = []
    for pool in pools:
        row = row_bytes(pool, params.page_size, settings)
        if row.stock:
            slots = _slots(pool, row.stock)
            contents.append(Content(slots * row.stock, slots * row.kept))
            contents.append(_native(slots * _beside(pool)))
    if states is not None:
        contents.append(_native(_state_bytes(states)))
    for draft in adapter().sidecar_drafts(params):
        contents.append(_native(_draft_bytes(draft, pools)))
    if not contents:
        return Fraction(1)
    stock, kept = (sum(sizes, Fraction(0)) for sizes in zip(*contents, strict=True))
    return stock / kept


def _beside(kv_pool: Any, layers: int | None = None) -> Fraction:
    """Bytes per slot that SGLang keeps beside the rows of a KV pool (an indexer's keys).

    layers: count so many of them (default: those that have any).
    """
    total = 0
    for decl in kv_pool.host_pool_decls():
        if not decl.is_layout_root:
            owned = decl.owned_device_layers
            owned_layers = kv_pool.layer_num if owned is None else len(owned)
            each = decl.storage_info.bytes_per_token_per_layer
            total += each * (owned_layers if layers is None else layers)
    return Fraction(total)


def _native(size: Fraction) -> Content:
    """Of a pool that stays SGLang's own."""
    return Content(size, size)


def _slots(kv_pool: Any, stock_row: Fraction) -> Fraction:
    """Slots in SGLang's own host pool, but for a factor that all pools share."""
    if get_memory().hicache_size > 0:
        return _device_bytes(kv_pool) / stock_row  # SGLang splits the size by these
    given = kv_pool.host_capacity_tokens
    return Fraction(kv_pool.size if given is None else given)


def _state_bytes(states: Any) -> Fraction:
    """Host bytes of recurrent states, as many as SGLang's own pool has, but for that factor."""
    if get_memory().hicache_size > 0:
        return _device_bytes(states)
    info = states.get_device_pool_infos()[0].buffer_info
    buffers = (info.temporal, *info.conv, *info.extra_checkpoint_buffers)
    return Fraction(sum(int(buffer.nbytes) for buffer in buffers))


def _draft_bytes(draft: Any, targets: list[Any]) -> Fraction:
    """Host bytes of a draft model's own pool: a slot for each of the pool that it follows."""
    # A draft with a sliding window follows the target's, and holds nothing else.
    follows = targets[-1] if isinstance(draft, BaseSWAKVPool) else targets[0]
    pool = draft.swa_kv_pool if isinstance(draft, BaseSWAKVPool) else kv_pools(draft)[0]
    target, info = map(adapter().rows_of_device_pool, (follows, pool))
    slots = _slots(follows, Fraction(stock_row_bytes(target) * layers_of(target)))
    return slots * stock_row_bytes(info) * layers_of(info)


def _device_bytes(pool: Any) -> Fraction:
    """What SGLang's _split_hicache_size weighs a pool by."""
    size = getattr(pool, "host_capacity_bytes", None)
    if size is None:
        size = pool.get_kv_size_bytes()
    return Fraction(int(sum(size) if isinstance(size, tuple) else size))
