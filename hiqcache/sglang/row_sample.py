"""Samples rows of a host pool: does what lies there restore to what the GPU held?"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hiqcache.codecs.base import DTYPES
from hiqcache.metrics import PoolMetrics
from hiqcache.sglang.adapters import adapter
from hiqcache.sglang.host_pool import QuantisedPool
from hiqcache.sglang.rows import device_buffers, host_buffers, slots_of
from hiqcache.transfers.base import as_bytes

#: After a sample, at least as many tokens are backed up before the next. On the stream a sample
#: costs five launches of a row each, some 10 us beside the 6 ms that this many tokens of an 8B
#: model take.
SAMPLE_EVERY_TOKENS = 4096

#: SGLang's host layouts whose rows host_buffers finds.
_ROW_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class RowSampler:
    """Compares sampled rows of one pool, all parts of one layer at a time, layers in turn.

    ``take`` enqueues a copy of the device row and its slot into pinned memory, behind the backup of
    that row, which SGLang keeps as it is until the stream has passed; nothing waits. ``settle``,
    called once the backup has completed, decodes the record in the arena itself on the CPU, so it
    sees the codec's error and the transfer's faults. A slot may be freed and stored anew in
    between: ``drop`` gives the sample up.
    """

    def __init__(self, pool: Any, metrics: PoolMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._until_next = 0
        self._taken = 0
        self._layer: int | None = None
        self._quantised = isinstance(pool, QuantisedPool)
        self._buffers = pool.transfer.device if self._quantised else device_buffers(pool)
        #: Tokens of a sample: a codec that stores whole pages can only be judged by one.
        whole = self._quantised and pool.layout_of_records.whole_pages
        self._tokens = pool.page_size if whole else 1
        rows = [buffers[0][0] for buffers in self._buffers]
        pinned = rows[0].device.type == "cuda"
        self._rows = [
            torch.empty((self._tokens, *row.shape), dtype=row.dtype, pin_memory=pinned)
            for row in rows
        ]
        self._slot = torch.empty(1, dtype=torch.int64, pin_memory=pinned)

    @staticmethod
    def serves(pool: Any) -> bool:
        """Whether a row of ``pool`` can be found and decoded in host memory."""
        if not pool.target_layer_num:
            return False  # a pipeline stage without attention layers
        if pool.dcp_size > 1:
            return False  # the slots of a transfer are several ranks'
        if isinstance(pool, QuantisedPool):
            return True
        if isinstance(pool, MLATokenToKVPoolHost):
            plain = not pool._is_dummy and pool._native_buffers is None
        else:
            info = adapter().rows_of_host_pool(pool)
            plain = info.scales is None and info.buffers.layout.value == "nhd"
        return plain and pool.dtype in DTYPES and pool.layout in _ROW_LAYOUTS

    def take(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> int | None:
        """Enqueue a sample where one is due; its number, for ``settle``."""
        self._until_next -= host_indices.numel()
        if self._until_next > 0 or self._layer is not None or not host_indices.numel():
            return None
        self._until_next = SAMPLE_EVERY_TOKENS
        layer = self._taken % self._pool.target_layer_num
        place = self._taken % (host_indices.numel() // self._tokens) * self._tokens
        self._taken += 1
        picked = device_indices[place : place + self._tokens]
        for row, buffers in zip(self._rows, self._buffers, strict=True):
            buffer = buffers[layer]
            # An index on the GPU must not be read here: that would wait for the stream.
            rows = as_bytes(buffer)
            found = rows[picked] if picked.is_cpu else rows.index_select(0, picked)
            as_bytes(row).copy_(found, non_blocking=True)
        self._slot.copy_(host_indices[place : place + 1], non_blocking=True)
        self._layer = layer
        return self._taken

    def drop(self) -> None:
        """Give up a sample that was taken and not settled."""
        self._layer = None

    def settle(self, sample: int) -> None:
        """Judge ``sample``, if it was not dropped. Its copies and its backup must be done."""
        if self._layer is None or sample != self._taken:
            return
        layer, self._layer = self._layer, None
        restored = self._stored(layer, int(self._slot))
        for part, (row, back) in enumerate(zip(self._rows, restored, strict=True)):
            if not row.float().isfinite().all():
                continue
            error = torch.linalg.vector_norm(back.float() - row.float())
            norm = torch.linalg.vector_norm(row.float())
            self._metrics.relative_error.observe(float(error / norm) if norm else float(error))
            if self._exceeds(part, row, back):
                self._metrics.excess_rows.inc()

    def _stored(self, layer: int, slot: int) -> list[torch.Tensor]:
        pool = self._pool
        if not self._quantised:
            place = slots_of(pool, self._slot)
            return [rows[layer][place] for rows in host_buffers(pool)]
        page, within = divmod(slot, pool.page_size)
        whole = torch.tensor([page])
        at = (whole,) if self._tokens > 1 else (whole, torch.tensor([within]))
        return [
            rows.read(layer, at, row).view(row.shape)
            for row, rows in zip(self._rows, pool.transfer.stored_rows(), strict=True)
        ]

    def _exceeds(self, part: int, row: torch.Tensor, back: torch.Tensor) -> bool:
        if not self._quantised:
            return not torch.equal(row, back)
        codec = self._pool.transfer.stored_rows()[part].codec
        return bool((~(codec.excess(row, back) <= 0)).any())
