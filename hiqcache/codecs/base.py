"""The contract of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

from hiqcache.codecs.formats import row_formats
from hiqcache.record import Part, RowFormat

#: Row dtypes that every codec serves.
DTYPES = (torch.bfloat16, torch.float16)

#: Rows of an FP8 KV cache, as SGLang's --kv-cache-dtype makes them.
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Stored(NamedTuple):
    """What is stored of a part of ``heads`` x ``width``: dtypes, and shapes without leading axes.

    ``codes`` of one token; ``scales`` of one token too, or of one page where its RowFormat says so.
    """

    codes_dtype: torch.dtype
    codes: tuple[int, ...]
    scales_dtype: torch.dtype
    scales: tuple[int, ...]


class RowCodec(ABC):
    """Turns rows of one part into codes and scales, and back; stateless.

    Rows are ``[..., heads, width]`` of one of the codec's dtypes, those of whole pages
    ``[..., tokens of a page, heads, width]`` where scales are a page's. Codes have the shape
    ``[..., *stored.codes]``, scales ``[..., *stored.scales]``, where a page's have no axis of
    tokens.

    Where scales are a token's, every head of every row stands alone: nothing in one head's codes,
    scale or restored values depends on another head, row, token or layer. Where they are a page's,
    every head of every page and layer does.

    The torch code is the reference. For the same rows other implementations give the same bytes,
    where all arithmetic is exact or correctly rounded; where it sums in fp32 (a rotation), a sum in
    another order may round to a neighbouring code or scale.

    Non-finite inputs: what stands alone and holds a NaN or an infinity restores as NaN throughout,
    so that a fault upstream stays visible and stays where it was. Zeros restore as exact zeros.
    """

    #: The smallest scale that is stored, per dtype of the rows.
    scale_min: ClassVar[Mapping[torch.dtype, float]]

    @abstractmethod
    def stored(self, heads: int, width: int) -> Stored:
        """What is stored of rows of ``heads`` x ``width``."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of ``rows``."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows of ``codes`` and ``scales`` as ``dtype``."""

    @abstractmethod
    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """How far the error of ``restored`` (from finite ``rows``) lies above the codec's bound.

        float64; at most zero wherever the bound holds. Each codec's docstring states its bound. It
        is made of ``rows`` and ``restored``, never of a scale that the codec chose.
        """


class Codec(ABC):
    """A name that HIQCACHE_CODEC takes, and how it stores the rows of each part."""

    name: ClassVar[str]

    #: Tokens of a page that it takes; None: any. Page-wise codecs take whole pages.
    page_sizes: ClassVar[tuple[int, ...] | None] = None

    #: Dtypes of the rows that it takes.
    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES

    def row_formats(self, parts: Sequence[Part]) -> tuple[RowFormat, ...]:
        """Bytes of a row of each part. Raises ValueError for a part that is not served."""
        return row_formats(self.name, parts)

    @abstractmethod
    def of(self, row: RowFormat) -> RowCodec:
        """What stores the rows of a part whose format is ``row``."""

    def stores(self, parts: Sequence[Part]) -> tuple[RowCodec, ...]:
        """What stores the rows of each part."""
        return tuple(map(self.of, self.row_formats(parts)))


class TokenCodec(Codec, RowCodec):
    """A codec that stores the rows of all parts alike: a byte an element, a bf16 scale a head."""

    def of(self, row: RowFormat) -> RowCodec:  # noqa: ARG002 - all rows are alike
        return self

    def stored(self, heads: int, width: int) -> Stored:
        return Stored(torch.int8, (heads, width), torch.bfloat16, (heads,))
