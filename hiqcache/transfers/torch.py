"""The torch transfer: plain indexing, on any device. The others are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec
from hiqcache.transfers.base import Arena, Transfer, as_bytes


class TorchTransfer(Transfer):
    """Encodes where the rows are and copies codes and scales by index.

    On a GPU its copies from and to indexed host memory wait for the stream: it is the reference
    there, not a fast path.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self, codec: Codec, arena: Arena, device: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        super().__init__(codec, arena, device)
        self._rows = self.stored_rows()

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        at = self._at(host_indices)
        for part, buffers in zip(self._rows, self.device, strict=True):
            for layer, buffer in enumerate(buffers):
                rows = as_bytes(buffer)[device_indices.to(buffer.device)].view(buffer.dtype)
                part.write(layer, at, self._in_pages(rows))

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        at = self._at(host_indices)
        for part, buffers in zip(self._rows, self.device, strict=True):
            buffer = buffers[layer]
            rows = part.read(layer, at, buffer)
            moved = as_bytes(rows).view(-1, *buffer.shape[1:])
            as_bytes(buffer)[device_indices.to(buffer.device)] = moved

    def _in_pages(self, rows: torch.Tensor) -> torch.Tensor:
        layout = self.arena.layout
        return rows.view(-1, layout.page_size, *rows.shape[1:]) if layout.whole_pages else rows

    def _at(self, host_indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pages and slots within them; of records of whole pages, the pages."""
        indices, layout = host_indices.cpu(), self.arena.layout
        pages, slots = indices // layout.page_size, indices % layout.page_size
        if not layout.whole_pages:
            return pages, slots
        return (self.whole_pages(indices),)
