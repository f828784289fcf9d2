"""A transfer that sums each record when it is stored and checks the sum when it is restored."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from hiqcache.record import Plane
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.indices import IndexSender

logger = logging.getLogger(__name__)

#: Weights of a record's bytes: odd multiples of this (2**32 over the golden ratio) are spread over
#: 32 bits. An odd weight lets no change of a single byte cancel out.
WEIGHT = 0x9E3779B1
MASK = 0xFFFFFFFF


class CheckedTransfer(Transfer):
    """Finds records that changed in host memory between their backup and a restore.

    Wraps a transfer. A record's sum is taken from the arena itself, on the stream, behind the
    backup, and compared on the stream before each layer of a restore: so it sees faults of memory,
    slots that something else wrote and transfers that overlapped; nothing waits for it. It costs
    one more reading of every record, ``4 * layers`` bytes of device memory per slot, and a few
    launches per transfer. For soaks and suspicions, not for service.

    A fault is logged and counted, and the record is restored all the same.
    """

    def __init__(self, inner: Transfer) -> None:
        super().__init__(inner.codec, inner.arena, inner.device)
        self.name = inner.name  # type: ignore[misc]  # of the class elsewhere: here it is another's
        self._inner = inner
        device = self.device[0][0].device
        self._slots = inner.arena.pages * inner.arena.layout.page_size
        self._sums = torch.zeros(self.layers, self._slots, dtype=torch.int32, device=device)
        # Records that were not as stored; slot and layer of the last, as one number.
        self._found = torch.zeros(2, dtype=torch.int64, device=device)
        self._seen = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._indices = IndexSender(device)
        self._logged = 0
        #: Records checked: one per token and layer restored.
        self.checked = 0
        logger.warning(
            "HiQCache: HIQCACHE_CHECKSUM=1: every record is summed at its backup and checked at "
            "its restore. Transfers take longer."
        )

    @property
    def mismatches(self) -> int:
        """Records that were not as stored, as far as the stream had come when last it said."""
        return int(self._seen[0])

    @property
    def staging_bytes(self) -> int:
        return self._inner.staging_bytes + self._sums.nbytes

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        self._inner.backup(host_indices, device_indices)
        host = self._indices.send("stored", host_indices)
        self._sums[:, host] = record_sums(self.arena, host, 0, self.layers)

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        host = self._indices.send("restored", host_indices)
        wrong = record_sums(self.arena, host, layer, 1)[0] != self._sums[layer, host]
        self.checked += len(host)
        if len(host):
            # As tensors of one element: to index by a scalar would wait for the stream.
            place = host.index_select(0, wrong.int().argmax().view(1)) * self.layers + layer
            last = self._found[1:]
            last.copy_(torch.where(wrong.any(), place, last))
            self._found[0] += wrong.sum()
        if layer == self.layers - 1:
            # Never torn: 8 bytes each, and the count only grows.
            self._seen.copy_(self._found, non_blocking=True)
        self.report()
        self._inner.restore(layer, host_indices, device_indices)

    def report(self) -> None:
        """Log what was found since the last report. Does not wait."""
        found = self.mismatches
        if found == self._logged:
            return
        slot, layer = divmod(int(self._seen[1]), self.layers)
        logger.error(
            "HiQCache: %d records restored from the host pool are not as they were stored (%d in "
            "all), the last of them layer %d of slot %d in page %d. Their answers are wrong. "
            "Either host memory or the link is faulty (check ECC and PCIe errors), or something "
            "wrote where it must not: report it with this line.",
            found - self._logged,
            found,
            layer,
            slot,
            slot // self.arena.layout.page_size,
        )
        self._logged = found


def record_sums(arena: Arena, slots: torch.Tensor, layer: int, layers: int) -> torch.Tensor:
    """Sums of the records at ``slots`` (int64 ``[tokens]``) in ``layers`` layers from ``layer`` on.

    int32 ``[layers, tokens]``: modulo 2**32, each byte of codes and scales times a weight of its
    place in the record. Computed where ``slots`` are: on a GPU by a kernel that reads host memory.
    """
    sums = torch.zeros(layers, len(slots), dtype=torch.int64, device=slots.device)
    for plane, place in _planes(arena):
        if slots.device.type == "cuda":
            from hiqcache.transfers.checksum_kernel import add_sums

            add_sums(sums, arena, plane, place, WEIGHT, MASK, slots, layer)
            continue
        pages, within = slots // arena.layout.page_size, slots % arena.layout.page_size
        rows = arena.view(plane, torch.uint8, plane.row_bytes)
        weights = (torch.arange(place, place + plane.row_bytes) * WEIGHT & MASK) | 1
        for index in range(layers):
            bytes_of = rows[pages, layer + index, within].to(torch.int64)
            sums[index] += (bytes_of * weights).sum(dim=1)
    return sums.to(torch.int32)


def _planes(arena: Arena) -> Iterator[tuple[Plane, int]]:
    """Each plane with bytes, and where its row begins in the record."""
    place = 0
    for planes in arena.planes:
        for plane in planes:
            if plane.row_bytes:
                yield plane, place
            place += plane.row_bytes
