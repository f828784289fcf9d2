"""RecordLayout: where every code row and scale row lies in the host arena.

A record is one token's rows of one layer: one row for each *part*, such as K and V, or the latent
and the rope of MLA. A row is codes and scales; the scales of some codecs are a whole page's, one
row for all its tokens. Two formats:

packed
    A page is one contiguous span. Where it has CHUNK_TOKENS or more, it holds its layers one after
    the other, each a *chunk*: all code rows (part, slot in page), then all scale rows. So the copy
    engine moves a page's layer, or any run of its layers, as one piece. A smaller page is one chunk
    with the rows of all layers, since rounding each layer up would cost too much.
padded
    Each row is contiguous and rounded up to 128 B, the unit of SGLang's JIT mover. The original
    HiQCache's format, kept for the mover transfer.

``page_first`` puts the pages one after the other, ``layer_first`` the layers; only strides differ.
This file is the single place that knows offsets: a transfer gets planes (base and strides).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Order = Literal["page_first", "layer_first"]
Format = Literal["packed", "padded"]

#: GPU memory transactions and SGLang's JIT mover work in groups of 128 B.
ALIGNMENT = 128

#: What a GPU thread moves at a time, at most: chunks start at multiples of it.
VECTOR_BYTES = 16

#: Scales are bf16, so a scale plane starts on an even address.
SCALE_BYTES = 2

#: Pages of so many tokens have a chunk for each layer. The copy engine needs pieces of some 30 kB
#: to come near the link's speed; the rounding is at most 15 B in 16 records.
CHUNK_TOKENS = 16


def format_of(transfer: str | None, rows: Sequence[RowFormat] = ()) -> Format:
    """How the records of ``transfer`` lie: padded for the JIT mover's, packed for all others.

    Raises ValueError where ``rows`` differ and the mover is to move them.
    """
    if transfer != "mover":
        return "packed"
    if len(set(rows)) > 1:
        raise ValueError(
            "transfer mover copies records of one size, and this model's rows differ: use "
            "HIQCACHE_TRANSFER=fused."
        )
    return "padded"


class Part(NamedTuple):
    """Rows of one kind: ``heads`` x ``width`` elements per token and layer."""

    name: str
    heads: int
    width: int


def kv_parts(heads: int, head_dim: int, v_head_dim: int | None = None) -> tuple[Part, ...]:
    """The parts of multi-head attention: K and V, of widths of their own."""
    return Part("k", heads, head_dim), Part("v", heads, v_head_dim or head_dim)


def latent_parts(latent: int, rope: int) -> tuple[Part, ...]:
    """The parts of latent attention, one row for all heads: the latent, and the rope if any."""
    parts = Part("latent", 1, latent), Part("rope", 1, rope)
    return parts if rope else parts[:1]


class RowFormat(NamedTuple):
    """Bytes of one token's row of one part in one layer: ``codes``, then ``scales``.

    ``per_page``: whether ``scales`` are those of all tokens of a page together.
    """

    codes: int
    scales: int
    per_page: bool = False


class Plane(NamedTuple):
    """Rows of one kind (codes or scales of one part), all in bytes.

    The row of ``slot`` in ``layer`` starts at
    ``base + slot // page_size * page_stride + layer * layer_stride + slot % page_size *
    slot_stride`` and is ``row_bytes`` long. A page's slots share a row where slot_stride is 0.
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
    """The two planes of a part."""

    codes: Plane
    scales: Plane


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class RecordLayout:
    """The arena of ``layers`` layers with ``page_size`` slots a page; ``rows`` has a row a part.

    trailer_bytes: kept free at the end of each packed page, for what proves it in storage.
    """

    layers: int
    page_size: int
    rows: tuple[RowFormat, ...]
    order: Order = "page_first"
    format: Format = "packed"
    trailer_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.page_size, *(row.codes for row in self.rows)) < 1:
            raise ValueError(f"layers, page_size and code rows must be positive: {self}")
        if self.whole_pages and (self.format == "padded" or self.page_size < CHUNK_TOKENS):
            raise ValueError(
                f"scales of a whole page take packed pages of {CHUNK_TOKENS} tokens or more: {self}"
            )
        if self.trailer_bytes and self.format != "packed":
            raise ValueError(f"padded pages are no single spans, so they have no trailer: {self}")

    @property
    def whole_pages(self) -> bool:
        """Whether a page is stored and restored as a whole: its tokens share scales."""
        return any(row.per_page for row in self.rows)

    @property
    def chunk_layers(self) -> int:
        """Layers whose rows share a chunk of a packed page: one, or all of them."""
        return 1 if self.page_size >= CHUNK_TOKENS else self.layers

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk of a packed page, rounded up for the next."""
        return round_up(self._chunk_codes + sum(map(self._scale_bytes, self.rows)), VECTOR_BYTES)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, with what rounding adds.

        A multiple of 128 and of twice the page size: SGLang counts whole bytes per token, and cuts
        a page in two halves of tokens.
        """
        if self.format == "padded":
            records = sum(map(_padded_bytes, self.rows))
            return self.layers * self.page_size * records
        chunks = self.layers // self.chunk_layers * self.chunk_bytes
        return round_up(chunks + self.trailer_bytes, math.lcm(ALIGNMENT, 2 * self.page_size))

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

    def planes(self, pages: int) -> tuple[Planes, ...]:
        """The planes of each part in an arena of ``pages`` pages."""
        return tuple(self._padded(pages) if self.format == "padded" else self._packed(pages))

    def _scale_bytes(self, row: RowFormat) -> int:
        """Bytes of all scales of a part in a chunk."""
        return row.scales * (1 if row.per_page else self._tokens_of_chunk)

    @property
    def _tokens_of_chunk(self) -> int:
        return self.page_size * self.chunk_layers

    @property
    def _chunk_codes(self) -> int:
        codes = self._tokens_of_chunk * sum(row.codes for row in self.rows)
        return round_up(codes, SCALE_BYTES)

    def _packed(self, pages: int) -> Iterator[Planes]:
        size = self.page_size
        if self.chunk_layers == 1:
            first = self.order == "page_first"
            chunk = self.chunk_bytes
            strides = (self.page_bytes, chunk) if first else (chunk, chunk * pages)
            offsets = _running(size * row.codes for row in self.rows)
            scale_offsets = _running(map(self._scale_bytes, self.rows))
            for row, codes, scales in zip(self.rows, offsets, scale_offsets, strict=True):
                scale_stride = 0 if row.per_page else row.scales
                yield Planes(
                    Plane(codes, *strides, row.codes, row.codes),
                    Plane(self._chunk_codes + scales, *strides, scale_stride, row.scales),
                )
            return
        # Tokens whose rows of a layer and a part follow each other, and a page's stride.
        if self.order == "page_first":
            run, page, scale_base = size, self.page_bytes, self._chunk_codes
        else:
            run, page = size * pages, None
            codes_of_arena = self.layers * run * sum(row.codes for row in self.rows)
            scale_base = round_up(codes_of_arena, SCALE_BYTES)

        def planes_of(kind: Sequence[int], base: int) -> Iterator[Plane]:
            for width, offset in zip(kind, _running(run * width for width in kind), strict=True):
                yield Plane(base + offset, page or size * width, run * sum(kind), width, width)

        codes_of = planes_of([row.codes for row in self.rows], 0)
        scales_of = planes_of([row.scales for row in self.rows], scale_base)
        yield from map(Planes, codes_of, scales_of)

    def _padded(self, pages: int) -> Iterator[Planes]:
        size, layers, tokens = self.page_size, self.layers, self.page_size * pages
        # All records of the first part, then all of the next, as SGLang's mover addresses them.
        bases = _running(tokens * layers * _padded_bytes(row) for row in self.rows)
        for row, base in zip(self.rows, bases, strict=True):
            record = _padded_bytes(row)
            if self.order == "page_first":
                strides = (size * layers * record, record, layers * record)
            else:
                strides = (size * record, tokens * record, record)
            scales = base + round_up(row.codes, SCALE_BYTES)
            yield Planes(Plane(base, *strides, row.codes), Plane(scales, *strides, row.scales))


def _padded_bytes(row: RowFormat) -> int:
    return round_up(round_up(row.codes, SCALE_BYTES) + row.scales, ALIGNMENT)


def _running(sizes: Iterator[int]) -> Iterator[int]:
    """Where each of ``sizes`` starts if they follow each other."""
    start = 0
    for size in sizes:
        yield start
        start += size


def tokens_in_gigabytes(gigabytes: float, bytes_per_token: int, page_size: int = 1) -> int:
    """Tokens that SGLang gives a pool under ``--hicache-size`` (decimal GB).

    SGLang 0.5.23, mem_cache/pool_host/base.py: the budget's tokens, in whole pages, and one page
    more for padding.
    """
    return (int(gigabytes * 1e9 // bytes_per_token) // page_size + 1) * page_size
