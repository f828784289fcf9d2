"""The quantised host pools: rows of any parts over SGLang's pool classes."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.dcp.layout import maybe_dcp_kernel_indices
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hiqcache.codecs import get_codec
from hiqcache.compatibility import UnsupportedError
from hiqcache.record import RecordLayout
from hiqcache.settings import Settings
from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.rows import by_part, layers_of, parts_of, row_dtype, stock_row_bytes
from hiqcache.sglang.storage import StoredPages, storage_of, trailer_of
from hiqcache.sglang.support import (
    order_of,
    require_no_drafts,
    require_no_shared_pages,
    require_records,
    require_supported_sglang,
    require_transfer,
)
from hiqcache.sglang.transfer import build_transfer
from hiqcache.transfers.base import Arena, as_blocks

logger = logging.getLogger(__name__)


class QuantisedPool(StoredPages, HostKVCache):
    """Methods laid over a host pool class of SGLang, so that its rows are codes and scales.

    Slots, eviction and the radix cache above it are SGLang's. ``kv_buffer`` is one uint8 arena
    ``[page_num * page_bytes]`` from SGLang's own allocator, laid out by ``layout_of_records``.
    What a row is made of is told by the device buffers (see rows). Raises UnsupportedError for
    what it does not serve.
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
        kv_dtype: torch.dtype | None = None,
        **further: Any,
    ) -> None:
        """SGLang builds it. device_rows and further: as the release describes rows, and its own.

        kv_dtype: the device pool's, which buffers of FP8 rows do not tell.
        """
        self.settings = Settings.from_env()
        require_supported_sglang(self.settings.allow_sglang)
        require_no_drafts(adapter().packed_drafts(further))
        info = adapter().rows(device_rows)
        self.codec = get_codec(self.settings.codec)
        self.row_dtype = row_dtype(info, kv_dtype)
        self.parts = parts_of(info, self.row_dtype, self.codec)
        self.transfer_name = require_transfer(
            self.settings.transfer, info.device, self.codec, page_size
        )
        # Ranks of a decode context parallel group share a page, each with a part of its slots.
        sharing, storage = further.get("dcp_size", 1), storage_of(allocator_type)
        require_no_shared_pages(sharing, storage, self.codec)
        self.layout_of_records = self.records(
            *(info, self.row_dtype, page_size // sharing, layout, self.settings),
            *(layers_of(info), storage),
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
        stock = stock_row_bytes(info) * self.layout_of_records.layers
        logger.info(
            "HiQCache: host pool %s holds %d tokens as %s (%s transfer), %d B per token where "
            "SGLang's own rows take %d B: %.3f times the tokens in the same bytes.",
            pool_label,
            self.size,
            self.codec.name,
            self.transfer_name,
            self.layout_of_records.bytes_per_token,
            stock,
            stock / self.layout_of_records.bytes_per_token,
        )

    @staticmethod
    def records(
        info: Any,
        dtype: torch.dtype,
        page_size: int,
        layout: str,
        settings: Settings,
        layers: int,
        storage: str | None,
    ) -> RecordLayout:
        """The records of ``layers`` layers of such rows under SGLang's host ``layout``.

        ``dtype``: of the rows' elements; ``storage``: the backend that pages go to, if any. Raises
        UnsupportedError for rows, and for a backend, that are not served.
        """
        codec = get_codec(settings.codec)
        transfer = require_transfer(settings.transfer, info.device, codec, page_size)
        rows, record_format = require_records(
            settings.codec, transfer, parts_of(info, dtype, codec)
        )
        return RecordLayout(
            layers,
            page_size,
            rows,
            order_of(layout),
            record_format,
            trailer_of(storage, layout, record_format, settings.checksum),
        )

    @property
    def takes_cpu_slots(self) -> bool:
        """Whether host slots are best left on the CPU: they are sent, or read, by the transfer."""
        return self.transfer_name in ("dma", "fused")

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

    def _build_transfer(self) -> None:
        arena = Arena(self.kv_buffer, self.layout_of_records, self.page_num)
        self.transfer = build_transfer(
            self.transfer_name,
            self.codec,
            arena,
            as_blocks(
                [[rows.view(self.row_dtype) for rows in part] for part in by_part(self, self.parts)]
            ),
            checked=self.settings.checksum,
        )

    def _own(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, begins: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's slots and rows of a transfer.

        ``begins``: whether this is the first call of the transfer, all calls of which get the same
        tensors.
        """
        return host_indices, device_indices

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Store the rows ``device_indices`` of every layer into slots ``host_indices``."""
        self.transfer.backup(*self._own(host_indices, device_indices, begins=True))

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
            own = self._own(host_indices, device_indices, begins=layer_id == 0)
            self.transfer.restore(layer_id, *own)

    @property
    def host_kv_data_refs(self) -> list[torch.Tensor]:
        raise self._no_plain_rows()

    def _no_plain_rows(self) -> UnsupportedError:
        return UnsupportedError(
            f"the host pool holds {self.codec.name} records, and what asked for its rows wants "
            "SGLang's own (KV received into host memory, say). Set HIQCACHE_CODEC=bf16 for that."
        )


class QuantisedMHATokenToKVPoolHost(QuantisedPool, MHATokenToKVPoolHost):
    """K and V of plain attention."""

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
        self._build_transfer()

    @property
    def k_buffer(self) -> torch.Tensor:
        raise self._no_plain_rows()

    @property
    def v_buffer(self) -> torch.Tensor:
        raise self._no_plain_rows()


class QuantisedMLATokenToKVPoolHost(QuantisedPool, MLATokenToKVPoolHost):
    """Latent rows of MLA: the latent and the rope, which lie side by side, quantised apart."""

    page_spans = 1

    def _initialize_transfer_views(self) -> None:
        """Build the transfer in place of the stock pool's views and staging."""
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        self._build_transfer()

    def _own(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, begins: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a page that a decode context parallel group shares, what this rank holds."""
        if self.dcp_size == 1:
            return host_indices, device_indices
        # A transfer knows a restore by its tensors: all its layers get the same.
        if begins or self._shared is None:
            self._shared = (
                maybe_dcp_kernel_indices(host_indices, self.dcp_size, self.dcp_rank),
                maybe_dcp_kernel_indices(device_indices, self.dcp_size, self.dcp_rank),
            )
        return self._shared

    def get_contiguous_buf_infos(self) -> Any:
        raise self._no_plain_rows()
