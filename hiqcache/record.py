"""RecordLayout: where every code row and scale row lies in the host arena.

A record is one token's row of one layer and one of K and V: codes, then scales. Two formats:

packed
    A page is one contiguous span: all code rows (layer, K|V, slot in page), then all scale rows,
    rounded up so that the next page starts on a 128 B boundary. Needs a transfer that addresses
    rows itself (fused, torch).
padded
    Each record is contiguous and rounded up to 128 B, the unit of SGLang's JIT mover. The original
    HiQCache's format, kept for the mover transfer.

``page_first`` puts the pages one after the other, ``layer_first`` the layers; only strides differ.
This file is the single place that knows offsets: a transfer gets planes (base and strides).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Order = Literal["page_first", "layer_first"]
Format = Literal["packed", "padded"]

#: GPU memory transactions and SGLang's JIT mover work in groups of 128 B.
ALIGNMENT = 128

#: Scales are bf16, so a scale plane starts on an even address.
SCALE_BYTES = 2


class RowFormat(NamedTuple):
    """Bytes of one token's K or V row of one layer: ``codes``, then ``scales``."""

    codes: int
    scales: int


class Plane(NamedTuple):
    """Rows of one kind (K or V, codes or scales), all in bytes.

    The row of ``slot`` in ``layer`` starts at
    ``base + slot // page_size * page_stride + layer * layer_stride + slot % page_size *
    slot_stride`` and is ``row_bytes`` long.
    """

    base: int
    page_stride: int
    layer_stride: int
    slot_stride: int
    row_bytes: int

    def offset(self, slot: int, layer: int, page_size: int) -> int:
        """Byte offset of a row in the arena."""
        page, index = divmod(slot, page_size)
        in_page = layer * self.layer_stride + index * self.slot_stride
        return self.base + page * self.page_stride + in_page


class Planes(NamedTuple):
    """The four planes of an arena."""

    k_codes: Plane
    v_codes: Plane
    k_scales: Plane
    v_scales: Plane


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class RecordLayout:
    """The arena of ``layers`` layers with ``page_size`` slots a page; K and V have own formats."""

    layers: int
    page_size: int
    k: RowFormat
    v: RowFormat
    order: Order = "page_first"
    format: Format = "packed"

    def __post_init__(self) -> None:
        if min(self.layers, self.page_size, self.k.codes, self.v.codes) < 1:
            raise ValueError(f"layers, page_size and code rows must be positive: {self}")

    @property
    def _codes_per_page(self) -> int:
        codes = self.layers * self.page_size * (self.k.codes + self.v.codes)
        return round_up(codes, SCALE_BYTES)

    def _record(self, row: RowFormat) -> int:
        return round_up(round_up(row.codes, SCALE_BYTES) + row.scales, ALIGNMENT)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, with what rounding adds; a multiple of 128 and of the page size."""
        if self.format == "padded":
            return self.layers * self.page_size * (self._record(self.k) + self._record(self.v))
        scales = self.layers * self.page_size * (self.k.scales + self.v.scales)
        # A whole number of bytes a token: SGLang counts and sizes pools in those.
        return round_up(self._codes_per_page + scales, math.lcm(ALIGNMENT, self.page_size))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of arena that a token takes, rounding included."""
        return self.page_bytes // self.page_size

    def arena_bytes(self, pages: int) -> int:
        """Bytes of an arena of ``pages`` pages, the same in either order."""
        return pages * self.page_bytes

    def pages_in(self, arena_bytes: int) -> int:
        """Whole pages that fit in ``arena_bytes``."""
        return arena_bytes // self.page_bytes

    def planes(self, pages: int) -> Planes:
        """The planes of an arena of ``pages`` pages."""
        return self._padded(pages) if self.format == "padded" else self._packed(pages)

    def _packed(self, pages: int) -> Planes:
        size, layers = self.page_size, self.layers
        if self.order == "page_first":
            in_group, page = size, self.page_bytes
            scale_base = self._codes_per_page
        else:
            in_group, page = size * pages, None
            scale_base = round_up(layers * in_group * (self.k.codes + self.v.codes), SCALE_BYTES)

        def plane(base: int, row: int, pair: int) -> Plane:
            return Plane(base, page or size * row, in_group * pair, row, row)

        codes, scales = self.k.codes + self.v.codes, self.k.scales + self.v.scales
        return Planes(
            plane(0, self.k.codes, codes),
            plane(in_group * self.k.codes, self.v.codes, codes),
            plane(scale_base, self.k.scales, scales),
            plane(scale_base + in_group * self.k.scales, self.v.scales, scales),
        )

    def _padded(self, pages: int) -> Planes:
        size, layers, tokens = self.page_size, self.layers, self.page_size * pages

        def side(base: int, row: RowFormat) -> tuple[Plane, Plane]:
            record = self._record(row)
            if self.order == "page_first":
                strides = (size * layers * record, record, layers * record)
            else:
                strides = (size * record, tokens * record, record)
            scales = base + round_up(row.codes, SCALE_BYTES)
            return Plane(base, *strides, row.codes), Plane(scales, *strides, row.scales)

        # K records first, then V records, as SGLang's mover addresses them.
        k_codes, k_scales = side(0, self.k)
        v_codes, v_scales = side(tokens * layers * self._record(self.k), self.v)
        return Planes(k_codes, v_codes, k_scales, v_scales)


def tokens_in_gigabytes(gigabytes: float, bytes_per_token: int, page_size: int = 1) -> int:
    """Tokens that SGLang gives a pool under ``--hicache-size`` (decimal GB).

    SGLang 0.5.23, mem_cache/pool_host/base.py: the budget's tokens, in whole pages, and one page
    more for padding.
    """
    return (int(gigabytes * 1e9 // bytes_per_token) // page_size + 1) * page_size
