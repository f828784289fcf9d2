"""The contract of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from hiqcache.codecs.formats import row_formats
from hiqcache.record import Part, RowFormat

#: Row dtypes that are served.
DTYPES = (torch.bfloat16, torch.float16)


class Codec(ABC):
    """Turns rows into codes and scales, and back; stateless.

    Rows are ``[..., heads, head_dim]`` of bf16 or fp16. Codes are int8 of the same shape; scales
    are bf16 ``[..., heads]``. Every head of every row stands alone: nothing in one head's codes,
    scale or restored values depends on another head, row, token or layer.

    The torch code is the reference. For the same rows other implementations give the same bytes,
    where all of a codec's arithmetic is exact or correctly rounded (int8); where it sums in fp32
    (int8-rot), a sum in another order may round to a neighbouring code or scale.

    Non-finite inputs: a head that holds a NaN or an infinity is stored as a NaN scale with zero
    codes, and restores as NaN throughout, so that a fault upstream stays visible and stays where it
    was. Zeros restore as exact zeros.
    """

    name: ClassVar[str]

    #: The smallest scale that is stored, per dtype of the rows.
    scale_min: ClassVar[Mapping[torch.dtype, float]]

    def row_formats(self, parts: Sequence[Part]) -> tuple[RowFormat, ...]:
        """Bytes of a row of each part. Raises ValueError for a width that is not served."""
        return row_formats(self.name, parts)

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (int8, the shape of ``rows``) and scales (bf16, without the last axis)."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows of ``codes`` and ``scales`` as ``dtype``."""

    @abstractmethod
    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """How far the error of ``restored`` (from finite ``rows``) lies above the codec's bound.

        float64; at most zero wherever the bound holds. Each codec's docstring states its bound. It
        is made of ``rows`` and ``restored``, never of a scale that the codec chose.
        """
