"""SGLang's own host pool behind the two calls of a Transfer, so that benchmarks measure it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.kernels.ops.kvcache.hicache import TMA_BLOCK_QUOTA, use_hicache_tma_kernel
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.pool_host.common import (
    ALLOC_MEMORY_FUNCS,
    get_allocator_from_storage,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hiqcache.record import Order


def describe_rows(
    device_k: Sequence[torch.Tensor], device_v: Sequence[torch.Tensor], page_size: int
) -> MHABufferInfo:
    """Rows [slots, heads, head_dim], one tensor a layer, as SGLang describes its own."""
    rows = device_k[0]
    k_table, v_table = (
        torch.tensor([b.data_ptr() for b in side], dtype=torch.uint64).to(rows.device)
        for side in (device_k, device_v)
    )
    return MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(device_k),
            v=tuple(device_v),
            k_data_ptrs=k_table,
            v_data_ptrs=v_table,
            layout=KVBufferLayout.NHD,
        ),
        page_size=page_size,
        head_num=rows.shape[1],
        head_dim=rows.shape[2],
        v_head_dim=rows.shape[2],
        dtype=rows.dtype,
        device=rows.device,
    )


def stock_pool(*args: Any, **kwargs: Any) -> Any:
    """SGLang's own MHA host pool."""
    return MHATokenToKVPoolHost(*args, **kwargs)


class StockTransfer:
    """SGLang 0.5.23's MHA host pool of ``slots`` tokens, with the ``kernel`` I/O backend.

    Moves rows as they are, by what SGLang picks for the layout, the page size and the GPU.
    """

    name = "stock"

    def __init__(
        self,
        device_k: Sequence[torch.Tensor],
        device_v: Sequence[torch.Tensor],
        page_size: int,
        order: Order,
        slots: int,
    ) -> None:
        rows = device_k[0]
        info = describe_rows(device_k, device_v, page_size)
        self._pool = MHATokenToKVPoolHost(
            info,
            2.0,
            0,
            page_size,
            order,
            pin_memory=rows.is_cuda,
            device_capacity_tokens=rows.shape[0],
            start_layer=0,
            end_layer=len(device_k),
            host_token_capacity=slots,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of host memory that a token takes."""
        return int(self._pool.get_size_per_token())

    @property
    def staging_bytes(self) -> int:
        """Device memory that the pool holds for write-backs."""
        staging = (self._pool.staging_k_buffer, self._pool.staging_v_buffer)
        return sum(buffer.nbytes for buffer in staging if buffer is not None)

    @property
    def backup_wants_cpu_slots(self) -> bool:
        """Whether SGLang leaves a backup's host indices on the CPU (its staged write-back)."""
        return bool(self._pool.can_use_write_back_jit)

    def kernels(self) -> dict[str, str]:
        """What SGLang moves rows with, by direction, as MHATokenToKVPoolHost decides it.

        A page_first backup gathers pages into staging memory, which the copy engine empties. All
        else goes by the JIT mover, with TMA where the page size, the row and the GPU are fit for it
        (SGLANG_HICACHE_TMA_TRANSFER=0: never), or by sgl_kernel where that serves no such rows.
        """
        pool = self._pool
        jit = "sgl_kernel"
        if pool.can_use_jit:
            tma = use_hicache_tma_kernel(
                element_size=pool.token_stride_size,
                block_quota=TMA_BLOCK_QUOTA,
                page_size=pool.page_size,
            )
            jit = "TMA" if tma else "registers"
        backup = jit if pool.layout == "layer_first" else "sgl_kernel"
        return {"backup": "staging" if pool.can_use_write_back_jit else backup, "restore": jit}

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """As Transfer.backup; host indices on the CPU or the device, as above."""
        self._pool.backup_from_device_all_layer(None, host_indices, device_indices, "kernel")

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """As Transfer.restore; indices on the device."""
        self._pool.load_to_device_per_layer(None, host_indices, device_indices, layer, "kernel")

    def close(self) -> None:
        """Give the host memory back."""
        self._pool.destroy()


def host_memory(nbytes: int) -> torch.Tensor:
    """uint8 ``[nbytes]`` of registered host memory, from the allocator of SGLang's host pools."""
    buffer: torch.Tensor = ALLOC_MEMORY_FUNCS["cuda"](
        (nbytes,),
        dtype=torch.uint8,
        device="cpu",
        pin_memory=True,
        allocator=get_allocator_from_storage("default"),
    )
    return buffer
