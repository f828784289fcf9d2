"""What SGLang tells of device buffers and host pools, as parts of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hiqcache.codecs.base import Codec
from hiqcache.record import Part, kv_parts, latent_parts
from hiqcache.sglang.support import require_latent_rows, require_plain_rows


def is_latent(info: Any) -> bool:
    """Whether ``info``, SGLang's account of a device pool's buffers, is of latent rows."""
    return hasattr(info, "kv_lora_rank")


def row_dtype(info: Any, kv_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the rows' elements. FP8 rows lie in buffers of uint8.

    kv_dtype: what the device pool says that they are.
    """
    return kv_dtype if kv_dtype is not None and info.dtype == torch.uint8 else info.dtype


def parts_of(info: Any, dtype: torch.dtype, codec: Codec) -> tuple[Part, ...]:
    """The parts of a row: K and V; or the latent and the rope, side by side in one buffer.

    Raises UnsupportedError for rows that ``codec`` does not serve.
    """
    if not is_latent(info):
        require_plain_rows(info, dtype, codec)
        return kv_parts(info.head_num, info.head_dim, info.v_head_dim)
    require_latent_rows(info)
    return latent_parts(info.kv_lora_rank, info.qk_rope_head_dim)


def layers_of(info: Any) -> int:
    """Layers whose buffers there are; a stage of a pipeline may have none."""
    return len(info.buffers if is_latent(info) else info.buffers.k)


def stock_row_bytes(info: Any) -> int:
    """Bytes of one token and layer in SGLang's own host pool."""
    if not is_latent(info):
        elements = (info.head_dim + info.v_head_dim) * info.head_num
    else:
        elements = info.kv_cache_dim
    return int(elements * info.dtype.itemsize)


def device_buffers(pool: Any) -> Sequence[Sequence[torch.Tensor]]:
    """The device buffers of a host pool, by kind and layer: each ``[slots, heads, width]``."""
    if isinstance(pool, MLATokenToKVPoolHost):
        return (pool.device_kv_buffers,)
    return (pool.device_k_buffers, pool.device_v_buffers)


def by_part(pool: Any, parts: Sequence[Part]) -> list[Sequence[torch.Tensor]]:
    """device_buffers cut into ``parts``; no copy."""
    buffers = device_buffers(pool)
    if len(buffers) == len(parts):
        return list(buffers)
    (joined,) = buffers  # the parts lie side by side
    widths = [part.width for part in parts]
    return list(zip(*(torch.split(rows, widths, dim=-1) for rows in joined), strict=True))


def host_buffers(pool: Any) -> Sequence[Sequence[torch.Tensor]]:
    """The rows of SGLang's own host pool, as device_buffers has them.

    Each is ``[slots, heads, width]``, or ``[pages, page_size, heads, width]`` under
    page_first_direct.
    """
    if not isinstance(pool, MLATokenToKVPoolHost):
        if pool.layout == "page_first_direct":
            # Where SGLang keeps references to rows then, they may be of pages.
            return (pool.k_buffer.unbind(1), pool.v_buffer.unbind(1))
        return (pool.k_data_refs, pool.v_data_refs)
    if pool.layout == "page_first_direct":
        return (pool.kv_buffer.unbind(1),)
    return (pool.data_refs,)


def slots_of(pool: Any, host_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``host_indices`` as indices into host_buffers."""
    if pool.layout == "page_first_direct":
        return host_indices // pool.page_size, host_indices % pool.page_size
    return (host_indices,)
