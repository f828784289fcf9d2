"""The contract of a transfer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec
from hiqcache.record import Plane, Planes, RecordLayout


@dataclass(frozen=True)
class Arena:
    """The host memory of a pool: ``buffer`` is uint8 ``[arena_bytes]`` on the CPU."""

    buffer: torch.Tensor
    layout: RecordLayout
    pages: int

    @property
    def planes(self) -> Planes:
        """Where codes and scales lie in ``buffer``."""
        return self.layout.planes(self.pages)

    def view(self, plane: Plane, dtype: torch.dtype, *row: int) -> torch.Tensor:
        """The rows of ``plane`` as ``dtype`` ``[pages, layers, page_size, *row]``; no copy."""
        size = dtype.itemsize
        inner = [1]
        for extent in reversed(row[1:]):
            inner.insert(0, inner[0] * extent)
        return self.buffer.view(dtype).as_strided(
            (self.pages, self.layout.layers, self.layout.page_size, *row),
            (
                plane.page_stride // size,
                plane.layer_stride // size,
                plane.slot_stride // size,
                *inner,
            ),
            plane.base // size,
        )


class Transfer(ABC):
    """Moves rows between one device pool and one arena.

    ``device_k`` and ``device_v`` are the pool's buffers, one a layer: ``[slots, heads, head_dim]``,
    rows contiguous, the slot axis of any stride that the transfer serves. Both methods enqueue all
    their work on the current stream before they return, and touch only the slots and rows that the
    indices name. Indices are int64 ``[tokens]``, on the CPU or on the device, each slot at most
    once.
    """

    name: ClassVar[str]

    def __init__(
        self,
        codec: Codec,
        arena: Arena,
        device_k: Sequence[torch.Tensor],
        device_v: Sequence[torch.Tensor],
    ) -> None:
        self.codec = codec
        self.arena = arena
        self.device_k = tuple(device_k)
        self.device_v = tuple(device_v)

    @abstractmethod
    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Store the device rows of all layers at ``device_indices`` into slots ``host_indices``."""

    @abstractmethod
    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        """Restore one layer's slots ``host_indices`` into device rows ``device_indices``.

        Whoever asks for the layers of a restore one after the other, with the same two tensors,
        leaves their contents, those slots and those rows alone until the last: a transfer may
        restore a layer before it is asked for.
        """

    @property
    def staging_bytes(self) -> int:
        """Device memory that the transfer holds for itself."""
        return 0
