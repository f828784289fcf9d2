"""SGLang's own host pool behind the two calls of a Transfer, so that benchmarks measure it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.kernels.ops.kvcache.hicache import TMA_BLOCK_QUOTA, use_hicache_tma_kernel
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.pool_host.common import (
    ALLOC_MEMORY_FUNCS,
    get_allocator_from_storage,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hiqcache.record import Order


def describe_rows(
    device_k: Sequence[torch.Tensor], device_v: Sequence[torch.Tensor], page_size: int
) -> MHABufferInfo:
    """Rows [slots, heads, head_dim], one tensor a layer, as SGLang describes its own."""
    rows = device_k[0]
    return MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(device_k),
            v=tuple(device_v),
            k_data_ptrs=_addresses(device_k),
            v_data_ptrs=_addresses(device_v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page_size,
        head_num=rows.shape[1],
        head_dim=rows.shape[2],
        v_head_dim=rows.shape[2],
        dtype=rows.dtype,
        device=rows.device,
    )


def _addresses(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    table = torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64)
    return table.to(buffers[0].device)


def stock_pool(*args: Any, **kwargs: Any) -> Any:
    """SGLang's own MHA host pool."""
    return MHATokenToKVPoolHost(*args, **kwargs)


class _StockPool:
    """A host pool of SGLang's own behind the two calls of a Transfer.

    staging: device memory that it holds for write-backs, None where it holds none.
    """

    name = "stock"

    def __init__(self, pool: Any, staging: Sequence[torch.Tensor | None]) -> None:
        self._pool = pool
        self._staging = staging

    @property
    def bytes_per_token(self) -> int:
        """Bytes of host memory that a token takes."""
        return int(self._pool.get_size_per_token())

    @property
    def staging_bytes(self) -> int:
        """Device memory that the pool holds for write-backs."""
        return sum(buffer.nbytes for buffer in self._staging if buffer is not None)

    @property
    def backup_wants_cpu_slots(self) -> bool:
        """Whether SGLang leaves a backup's host indices on the CPU (its staged write-back)."""
        return bool(self._pool.can_use_write_back_jit)

    def kernels(self) -> dict[str, str]:
        """What SGLang moves rows with, by direction, as its host pools decide it.

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


class StockTransfer(_StockPool):
    """SGLang 0.5.23's MHA host pool of ``slots`` tokens, with the ``kernel`` I/O backend.

    Moves rows as they are, by what SGLang picks for the layout, the page size and the GPU.
    """

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
        pool = MHATokenToKVPoolHost(
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
        super().__init__(pool, [pool.staging_k_buffer, pool.staging_v_buffer])


class StockLatentTransfer(_StockPool):
    """SGLang 0.5.23's MLA host pool of ``slots`` tokens, with the ``kernel`` I/O backend.

    device: rows [slots, 1, latent + rope], one tensor a layer.
    """

    def __init__(
        self,
        device: Sequence[torch.Tensor],
        latent: int,
        page_size: int,
        order: Order,
        slots: int,
    ) -> None:
        rows, layers = device[0], len(device)
        info = MLABufferInfo(
            buffers=tuple(device),
            data_ptrs=_addresses(device),
            layer_indices=tuple(range(layers)),
            device_layer_num=layers,
            page_size=page_size,
            kv_lora_rank=latent,
            qk_rope_head_dim=rows.shape[-1] - latent,
            kv_cache_dim=rows.shape[-1],
            dtype=rows.dtype,
            device=rows.device,
        )
        pool = MLATokenToKVPoolHost(
            info,
            2.0,
            0,
            page_size,
            order,
            pin_memory=rows.is_cuda,
            device_capacity_tokens=rows.shape[0],
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
            host_token_capacity=slots,
        )
        super().__init__(pool, [pool.staging_buffer])


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
