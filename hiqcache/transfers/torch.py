"""The torch transfer: plain indexing, on any device. The others are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec
from hiqcache.transfers.base import Arena, Transfer


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
        self._codes, self._scales = [], []
        for buffers, planes in zip(self.device, arena.planes, strict=True):
            heads, width = buffers[0].shape[1:]
            self._codes.append(arena.view(planes.codes, torch.int8, heads, width))
            self._scales.append(arena.view(planes.scales, torch.bfloat16, heads))

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        pages, slots = self._split(host_indices)
        for part, buffers in enumerate(self.device):
            for layer, buffer in enumerate(buffers):
                codes, scales = self.codec.encode(buffer[device_indices.to(buffer.device)])
                self._codes[part][:, layer][pages, slots] = codes.cpu()
                self._scales[part][:, layer][pages, slots] = scales.cpu()

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        pages, slots = self._split(host_indices)
        for part, buffers in enumerate(self.device):
            buffer = buffers[layer]
            codes = self._codes[part][:, layer][pages, slots].to(buffer.device)
            scales = self._scales[part][:, layer][pages, slots].to(buffer.device)
            rows = self.codec.decode(codes, scales, buffer.dtype)
            buffer[device_indices.to(buffer.device)] = rows

    def _split(self, host_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices, size = host_indices.cpu(), self.arena.layout.page_size
        return indices // size, indices % size
