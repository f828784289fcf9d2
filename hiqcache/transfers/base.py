"""The contract of a transfer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec, RowCodec
from hiqcache.codecs.formats import blocks, require_pages
from hiqcache.record import Part, Plane, Planes, RecordLayout, RowFormat


@dataclass(frozen=True)
class Arena:
    """The host memory of a pool: ``buffer`` is uint8 ``[arena_bytes]`` on the CPU."""

    buffer: torch.Tensor
    layout: RecordLayout
    pages: int

    @property
    def planes(self) -> tuple[Planes, ...]:
        """Where each part's codes and scales lie in ``buffer``."""
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


def as_blocks(device: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Buffers ``[slots, heads, width]`` by part and layer, cut as the codecs see them; no copy."""
    return [[in_blocks(rows) for rows in buffers] for buffers in device]


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[..., heads, width]`` as the codecs see them; a view."""
    part = blocks(Part("rows", *rows.shape[-2:]))
    return rows.view(*rows.shape[:-2], part.heads, part.width)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """FP8 ``rows`` as uint8, which torch indexes; others as they are; a view."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


class StoredRows:
    """Records of one part in an arena, by plain indexing, and what stores them.

    ``at``: pages and slots within them, or pages alone where records are of whole pages.
    """

    def __init__(
        self, codec: RowCodec, arena: Arena, row: RowFormat, planes: Planes, heads: int, width: int
    ) -> None:
        self.codec = codec
        stored = codec.stored(heads, width)
        self._codes = arena.view(planes.codes, stored.codes_dtype, *stored.codes)
        self._scales = arena.view(planes.scales, stored.scales_dtype, *stored.scales)
        if row.per_page:
            self._scales = self._scales[:, :, 0]

    def write(self, layer: int, at: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
        """Store ``rows`` ``[..., heads, width]``."""
        codes, scales = self.codec.encode(rows)
        self._codes[:, layer][at] = codes.cpu()
        self._scales[:, layer][at] = scales.cpu()

    def read(self, layer: int, at: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """The rows, of the dtype and on the device of ``like``."""
        codes = self._codes[:, layer][at].to(like.device)
        return self.codec.decode(codes, self._scales[:, layer][at].to(like.device), like.dtype)


class Transfer(ABC):
    """Moves rows between one device pool and one arena.

    ``device`` holds the pool's buffers by part and layer: each ``[slots, heads, width]`` of that
    part (see as_blocks), rows contiguous, the slot axis of any stride that the transfer serves.
    Parts may be views of one buffer. Both methods enqueue all their work on the current stream
    before they return, and touch only the slots and rows that the indices name. Indices are int64
    ``[tokens]``, on the CPU or on the device, each slot at most once. Host indices of a codec that
    stores whole pages name whole pages, their slots in order.

    Raises ValueError where the codec does not store pages of the arena's size.
    """

    name: ClassVar[str]

    def __init__(
        self, codec: Codec, arena: Arena, device: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        require_pages(codec.name, arena.layout.page_size)
        self.codec = codec
        self.arena = arena
        self.device = tuple(map(tuple, device))
        self.layers = len(self.device[0])

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

    def stored_rows(self) -> list[StoredRows]:
        """The records of each part."""
        return [
            StoredRows(self.codec.of(row), self.arena, row, planes, *buffers[0].shape[1:])
            for row, planes, buffers in zip(
                self.arena.layout.rows, self.arena.planes, self.device, strict=True
            )
        ]

    def whole_pages(self, host_indices: torch.Tensor) -> torch.Tensor:
        """The pages that ``host_indices``, on the CPU, name: int64 ``[tokens / page_size]``.

        Raises ValueError unless they are whole pages, their slots in order.
        """
        size = self.arena.layout.page_size
        if host_indices.numel() % size == 0:
            slots = host_indices.view(-1, size)
            pages = slots[:, 0] // size
            if torch.equal(slots, pages[:, None] * size + torch.arange(size)):
                return pages
        raise ValueError(
            f"codec {self.codec.name} stores whole pages of {size} tokens, and these are not: "
            f"{host_indices.numel()} slots from {host_indices[:1].tolist()}."
        )

    def require_whole_pages(self, host_indices: torch.Tensor) -> None:
        """Refuse what is no whole pages where records are: kernels look at first slots alone.

        On a GPU only their number is looked at: reading them would wait. Raises ValueError.
        """
        layout = self.arena.layout
        if layout.whole_pages and (host_indices.is_cpu or host_indices.numel() % layout.page_size):
            self.whole_pages(host_indices.cpu())

    @property
    def staging_bytes(self) -> int:
        """Device memory that the transfer holds for itself."""
        return 0
