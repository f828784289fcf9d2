"""SGLang's JIT mover, as the mover transfer wants it. The only place that imports it."""

from __future__ import annotations

import torch
from sglang.kernels.ops.kvcache.hicache import (
    can_use_hicache_jit_kernel,
    transfer_hicache_all_layer,
    transfer_hicache_one_layer,
)


class JitMover:
    """A RecordMover on SGLang 0.5.23's HiCache kernels (CUDA); compiles one at its first use."""

    def can_move(self, record_bytes: int, page_size: int) -> bool:
        """Whether SGLang's kernels serve records of this size: a multiple of 128 B on CUDA."""
        return bool(can_use_hicache_jit_kernel(element_size=record_bytes, page_size=page_size))

    def move_layer(
        self,
        destination: tuple[torch.Tensor, torch.Tensor],
        destination_indices: torch.Tensor,
        source: tuple[torch.Tensor, torch.Tensor],
        source_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        """Copy one layer's K and V records (see RecordMover)."""
        transfer_hicache_one_layer(
            k_cache_dst=destination[0],
            v_cache_dst=destination[1],
            indices_dst=destination_indices,
            k_cache_src=source[0],
            v_cache_src=source[1],
            indices_src=source_indices,
            page_size=page_size,
        )

    def move_all_layers(
        self,
        destination: tuple[torch.Tensor, torch.Tensor],
        destination_indices: torch.Tensor,
        destination_stride: int,
        source: tuple[torch.Tensor, torch.Tensor],
        source_indices: torch.Tensor,
        source_stride: int,
        record_bytes: int,
        page_size: int,
    ) -> None:
        """Copy all layers' K and V records between tables of addresses (see RecordMover)."""
        transfer_hicache_all_layer(
            k_ptr_dst=destination[0],
            v_ptr_dst=destination[1],
            indices_dst=destination_indices,
            k_ptr_src=source[0],
            v_ptr_src=source[1],
            indices_src=source_indices,
            kv_cache_dst_stride_bytes=destination_stride,
            kv_cache_src_stride_bytes=source_stride,
            element_size=record_bytes,
            page_size=page_size,
        )
