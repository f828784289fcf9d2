"""The host pools: quantised rows, and plain copies for machines without SGLang's kernels."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hiqcache.codecs import get_codec
from hiqcache.compatibility import UnsupportedError
from hiqcache.record import RecordLayout, format_of, kv_parts
from hiqcache.settings import Settings
from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.storage import StoredPages, storage_of, trailer_of
from hiqcache.sglang.support import (
    order_of,
    require_codec,
    require_no_drafts,
    require_plain_rows,
    require_supported_sglang,
    require_transfer,
)
from hiqcache.sglang.transfer import build_transfer
from hiqcache.transfers.base import Arena, as_blocks

logger = logging.getLogger(__name__)


class MHATokenToKVPoolHostINT8(StoredPages, MHATokenToKVPoolHost):
    """A host pool whose rows are a codec's codes and scales.

    Slots, eviction and the radix cache above it are SGLang's. ``kv_buffer`` is one uint8 arena
    ``[page_num * page_bytes]`` from SGLang's own allocator, laid out by ``layout_of_records``.
    Raises UnsupportedError for what it does not serve.
    """

    def __init__(
        self,
        device_rows: Any,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        *,
        pool_label: str = "kv",
        **further: Any,
    ) -> None:
        """SGLang builds it. device_rows and further: as the release describes rows, and its own."""
        self.settings = Settings.from_env()
        require_supported_sglang(self.settings.allow_sglang)
        require_no_drafts(adapter().packed_drafts(further))
        info = adapter().rows(device_rows)
        self.codec = get_codec(self.settings.codec)
        self.transfer_name = require_transfer(self.settings.transfer, info.device)
        self.parts = kv_parts(info.head_num, info.head_dim, info.v_head_dim)
        self.layout_of_records = self.records(
            info,
            page_size,
            layout,
            self.settings,
            len(info.buffers.k),
            storage_of(allocator_type),
        )
        super().__init__(
            device_rows,
            host_to_device_ratio,
            host_size,
            page_size,
            layout,
            pin_memory and info.device.type != "cpu",
            device,
            allocator_type,
            pool_label=pool_label,
            **further,
        )
        logger.info(
            "HiQCache: host pool %s holds %d tokens as %s (%s transfer), %d B per token where "
            "SGLang's own rows take %d B: %.3f times the tokens in the same bytes.",
            pool_label,
            self.size,
            self.codec.name,
            self.transfer_name,
            self.layout_of_records.bytes_per_token,
            super().get_size_per_token(),
            super().get_size_per_token() / self.layout_of_records.bytes_per_token,
        )

    @classmethod
    def records(
        cls,
        info: Any,
        page_size: int,
        layout: str,
        settings: Settings,
        layers: int,
        storage: str | None,
    ) -> RecordLayout:
        """The records of ``layers`` layers of such rows under SGLang's host ``layout``.

        ``storage``: the backend that pages go to, if any. Raises UnsupportedError for rows, and for
        a backend, that are not served.
        """
        require_plain_rows(info)
        parts = kv_parts(info.head_num, info.head_dim, info.v_head_dim)
        require_codec(settings.codec, parts)
        order = order_of(layout)
        records = format_of(require_transfer(settings.transfer, info.device))
        return RecordLayout(
            layers,
            page_size,
            get_codec(settings.codec).row_formats(parts),
            order,
            records,
            trailer_of(storage, layout, records, settings.checksum),
        )

    def init_kv_buffer(self) -> torch.Tensor:
        """The arena: uint8 ``[page_num * page_bytes]``."""
        layout = self.layout_of_records
        arena: torch.Tensor = ALLOC_MEMORY_FUNCS[self._transfer_device.type](
            (layout.arena_bytes(self.page_num),),
            dtype=torch.uint8,
            device=self.device,
            pin_memory=self.pin_memory,
            allocator=self.allocator,
            registration_granularity_bytes=(
                layout.page_bytes if layout.order == "page_first" else None
            ),
        )
        return arena

    def _initialize_transfer_views(
        self,
        device_rows: Any = None,
        write_back_staging: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Build the transfer in place of the stock pool's views.

        Staging that SGLang has set aside stays unused, and is kept where the stock pool keeps it,
        so that the metrics see it (the plug-in has none set aside).
        """
        staging = write_back_staging or (None, None)
        self.staging_k_buffer: torch.Tensor | None = staging[0]
        self.staging_v_buffer: torch.Tensor | None = staging[1]
        self.transfer = build_transfer(
            self.transfer_name,
            self.codec,
            Arena(self.kv_buffer, self.layout_of_records, self.page_num),
            as_blocks((self.device_k_buffers, self.device_v_buffers)),
            checked=self.settings.checksum,
        )

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Store the rows ``device_indices`` of every layer into slots ``host_indices``."""
        self.transfer.backup(host_indices, device_indices)

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
        """Restore one layer's slots ``host_indices`` into rows ``device_indices``."""
        # SGLang asks for layers beyond the target's when a draft model shares the transfer.
        if is_draft or 0 <= layer_id < self.target_layer_num:
            self.transfer.restore(layer_id, host_indices, device_indices)

    @property
    def k_buffer(self) -> torch.Tensor:
        raise self._no_plain_rows()

    @property
    def v_buffer(self) -> torch.Tensor:
        raise self._no_plain_rows()

    @property
    def host_kv_data_refs(self) -> list[torch.Tensor]:
        raise self._no_plain_rows()

    def _no_plain_rows(self) -> UnsupportedError:
        return UnsupportedError(
            f"the host pool holds {self.codec.name} records, and what asked for its rows wants "
            "SGLang's own (KV received into host memory, say). Set HIQCACHE_CODEC=bf16 for that."
        )


class MHATokenToKVPoolHostCopy(MHATokenToKVPoolHost):
    """SGLang's own host pool, moved by plain indexing: for CPUs, which lack sgl_kernel's copies.

    Same bytes, same layouts, same capacity as the stock pool.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        super().__init__(*args, **kwargs)

    def _slots(self, host_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.layout == "page_first_direct":
            return (host_indices // self.page_size, host_indices % self.page_size)
        return (host_indices,)

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy the rows ``device_indices`` of every layer into slots ``host_indices``."""
        for layer in range(self.layer_num):
            slots = self._slots(host_indices)
            self.k_data_refs[layer][slots] = self.device_k_buffers[layer][device_indices]
            self.v_data_refs[layer][slots] = self.device_v_buffers[layer][device_indices]

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
            slots = self._slots(host_indices)
            self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][slots]
            self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][slots]
