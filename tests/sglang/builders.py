"""Device buffers and host pools of SGLang's real classes, without a server."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)

from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost

LAYERS, HEADS, DIM = 3, 3, 64
LATENT, ROPE = 512, 64


def buffer_info(
    tokens: int = 64,
    *,
    heads: int = HEADS,
    head_dim: int = DIM,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: KVBufferLayout = KVBufferLayout.NHD,
    page_size: int = 1,
    layers: int = LAYERS,
) -> MHABufferInfo:
    """Random K and V rows for ``tokens`` slots, as SGLang's device pool describes its own."""
    generator = torch.Generator().manual_seed(0)

    def side(width: int) -> tuple[torch.Tensor, ...]:
        shape = (tokens, heads, width)
        return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(layers))

    k, v = side(head_dim), side(v_head_dim or head_dim)
    pointers = [torch.tensor([t.data_ptr() for t in rows], dtype=torch.uint64) for rows in (k, v)]
    return MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=layout
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim or head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def latent_info(
    tokens: int = 64, *, dtype: torch.dtype = torch.bfloat16, page_size: int = 1
) -> MLABufferInfo:
    """Random latent rows for ``tokens`` slots: latent and rope side by side in each buffer."""
    generator = torch.Generator().manual_seed(0)
    shape = (tokens, 1, LATENT + ROPE)
    rows = tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS))
    return MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([t.data_ptr() for t in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page_size,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=LATENT + ROPE,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def host_pool(
    info: MHABufferInfo | MLABufferInfo,
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
    pool: QuantisedMHATokenToKVPoolHost = cls(
        info,
        ratio,
        size_gb,
        page_size,
        layout,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
        **kwargs,
    )
    return pool
