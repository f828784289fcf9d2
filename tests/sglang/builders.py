"""Device buffers and host pools of SGLang's real classes, without a server."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost

LAYERS, HEADS, DIM = 3, 3, 64
LATENT, ROPE = 512, 64

#: Whether the release's host pools are built of device pools, not of an account of their rows.
BUILT_OF_POOLS = "device_pool" in inspect.signature(MHATokenToKVPoolHost).parameters

needs_accounts = pytest.mark.skipif(
    BUILT_OF_POOLS, reason="this release builds host pools of device pools, and takes no more"
)
needs_latent_rows = pytest.mark.skipif(
    not adapter().LATENT, reason="this release describes no latent rows"
)


def buffer_info(
    tokens: int = 64,
    *,
    heads: int = HEADS,
    head_dim: int = DIM,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "nhd",
    page_size: int = 1,
    layers: int = LAYERS,
    scaled: bool = False,
) -> Any:
    """Random K and V rows for ``tokens`` slots, as the release's adapter tells of a device pool."""
    # The pool adds a page, to which padded tokens go.
    pool = MHATokenToKVPool(
        *(tokens - page_size, page_size, dtype, heads, head_dim, layers, "cpu", False),
        v_head_dim=v_head_dim,
        kv_cache_layout=layout,
    )
    pool.host_capacity_tokens = tokens
    if scaled:
        pool.k_scale_buffer = pool.v_scale_buffer = [torch.ones(tokens, heads)] * layers
    _fill([rows.view(pool.dtype) for rows in (*pool.k_buffer, *pool.v_buffer)])
    return adapter().rows_of_device_pool(pool)


def latent_info(
    tokens: int = 64, *, dtype: torch.dtype = torch.bfloat16, page_size: int = 1
) -> Any:
    """Random latent rows for ``tokens`` slots: latent and rope side by side in each buffer."""
    pool = MLATokenToKVPool(
        tokens - page_size, page_size, dtype, LATENT, ROPE, LAYERS, "cpu", False
    )
    _fill(pool.kv_buffer)
    return adapter().rows_of_device_pool(pool)


def _fill(buffers: Sequence[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=generator))


def given(info: Any) -> Any:
    """What the release's host pools are built of: the account of the rows, or their device pool."""
    return info.pool if BUILT_OF_POOLS else info


def packed_drafts(info: Any) -> dict[str, Any]:
    """The argument by which SGLang packs a draft's layers, of rows ``info``, into a host pool."""
    name = "mtp_draft_device_pools" if BUILT_OF_POOLS else "draft_buffer_infos"
    return {name: (given(info),)}


def host_pool(
    info: Any,
    *,
    ratio: float = 2.0,
    size_gb: float = 0,
    page_size: int = 1,
    layout: str = "page_first",
    tokens: int = 64,
    cls: type = QuantisedMHATokenToKVPoolHost,
    layers: int = LAYERS,
    **kwargs: object,
) -> QuantisedMHATokenToKVPoolHost:
    """A host pool for ``info``, built the way SGLang's assembler builds one."""
    told = {"device_capacity_tokens": tokens, "start_layer": 0, "end_layer": layers}
    pool: QuantisedMHATokenToKVPoolHost = cls(
        given(info),
        ratio,
        size_gb,
        page_size,
        layout,
        **({} if BUILT_OF_POOLS else told),
        **kwargs,
    )
    return pool
