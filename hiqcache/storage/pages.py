"""PageImages: the pages of an arena as storage keeps them.

An image is one page of the page_first order, uint8 ``[page_bytes]``: rows where ``RecordLayout``
puts them, zeros where it puts none, and the seal in its last bytes. So arenas of both orders read
and write the same images.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from hiqcache.record import RecordLayout
from hiqcache.storage import seal
from hiqcache.transfers.base import Arena


class PageImages:
    """The images of ``arena``, whose pages end with room for a seal.

    Raises ValueError for pages without that room.
    """

    def __init__(self, arena: Arena) -> None:
        layout = arena.layout
        if layout.trailer_bytes < seal.SEAL_BYTES:
            raise ValueError(f"pages need {seal.SEAL_BYTES} B for their seal: {layout}")
        self._arena = arena
        self._order = dataclasses.replace(layout, order="page_first")
        self._holes = list(holes(self._order))
        self._contiguous = layout.order == "page_first"
        if not self._contiguous:
            self._rows = _rows(arena)
            # A page's end lies nowhere in this order, so its seal is kept beside the arena.
            self._seals = torch.zeros(arena.pages, seal.SEAL_BYTES, dtype=torch.uint8)

    @property
    def page_bytes(self) -> int:
        """Bytes of an image."""
        return self._order.page_bytes

    @property
    def contiguous(self) -> bool:
        """Whether an image is a span of the arena, which storage may read and write itself."""
        return self._contiguous

    def image(self, page: int) -> torch.Tensor:
        """The image of ``page``: a view of the arena where it is contiguous, else a copy."""
        if self._contiguous:
            start = page * self.page_bytes
            return self._arena.buffer[start : start + self.page_bytes]
        image = torch.zeros(self.page_bytes, dtype=torch.uint8)
        for arena_rows, rows in zip(self._rows, self._rows_of(image), strict=True):
            rows[0].copy_(arena_rows[page])
        image[-seal.SEAL_BYTES :] = self._seals[page]
        return image

    def store(self, page: int, image: torch.Tensor) -> None:
        """Make ``page`` what ``image`` holds. Raises ValueError for an image of another size."""
        image = image.view(torch.uint8).reshape(-1)
        if image.numel() != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} B, this image {image.numel()} B")
        if self._contiguous:
            self.image(page).copy_(image)
            return
        for arena_rows, rows in zip(self._rows, self._rows_of(image), strict=True):
            arena_rows[page].copy_(rows[0])
        self._seals[page] = image[-seal.SEAL_BYTES :]

    def seal_image(self, image: torch.Tensor, identity: str) -> None:
        """Seal ``image`` as ``identity``, with zeros where no row lies."""
        for start, stop in self._holes:
            image[start:stop] = 0
        seal.seal(identity, image)

    def seal(self, page: int, identity: str) -> None:
        """Seal ``page`` where it lies in the arena."""
        image = self.image(page)
        self.seal_image(image, identity)
        if not self._contiguous:
            self._seals[page] = image[-seal.SEAL_BYTES :]

    def sealed(self, page: int, identity: str) -> bool:
        """Whether ``page``, as it lies in the arena, is ``identity``."""
        return seal.sealed(identity, self.image(page))

    def _rows_of(self, image: torch.Tensor) -> list[torch.Tensor]:
        return _rows(Arena(image, self._order, 1))


def _rows(arena: Arena) -> list[torch.Tensor]:
    """Views ``[pages, layers, slots, row_bytes]`` of all rows of ``arena``, plane by plane.

    slots: page_size, or one where a page's slots share a row.
    """
    views = []
    for plane in itertools.chain(*arena.planes):
        rows = arena.view(plane, torch.uint8, plane.row_bytes)
        views.append(rows if plane.slot_stride else rows[:, :, :1])
    return views


def holes(layout: RecordLayout) -> Iterator[tuple[int, int]]:
    """Spans (start, stop) of a page_first page that hold no row, before its trailer."""
    taken = sorted(
        (start := plane.offset(slot, layer, layout.page_size), start + plane.row_bytes)
        for planes in layout.planes(1)
        for plane in planes
        for layer in range(layout.layers)
        for slot in range(layout.page_size)
    )
    at = 0
    for start, stop in taken:
        if start > at:
            yield at, start
        at = stop
    end = layout.page_bytes - layout.trailer_bytes
    if end > at:
        yield at, end
