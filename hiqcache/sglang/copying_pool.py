"""SGLang's own host pools, moved by plain indexing: for CPUs, which lack sgl_kernel's copies."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hiqcache.sglang.rows import device_buffers, host_buffers, slots_of


class CopyingPool(HostKVCache):
    """Methods laid over a host pool class of SGLang: same bytes, same layouts, same capacity."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        super().__init__(*args, **kwargs)

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy the rows ``device_indices`` of every layer into slots ``host_indices``."""
        slots = slots_of(self, host_indices)
        for host, device in zip(host_buffers(self), device_buffers(self), strict=True):
            for stored, rows in zip(host, device, strict=True):
                stored[slots] = rows[device_indices]

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Copy one layer's slots ``host_indices`` into rows ``device_indices``."""
        if is_draft or 0 <= layer_id < self.target_layer_num:
            slots = slots_of(self, host_indices)
            for host, device in zip(host_buffers(self), device_buffers(self), strict=True):
                device[layer_id][device_indices] = host[layer_id][slots]


class MHATokenToKVPoolHostCopy(CopyingPool, MHATokenToKVPoolHost):
    """K and V of plain attention."""


class MLATokenToKVPoolHostCopy(CopyingPool, MLATokenToKVPoolHost):
    """Latent rows of MLA."""


#: By SGLang's class.
COPYING = {
    MHATokenToKVPoolHost: MHATokenToKVPoolHostCopy,
    MLATokenToKVPoolHost: MLATokenToKVPoolHostCopy,
}
