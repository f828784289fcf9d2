"""The contract of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from hiqcache.codecs.formats import row_formats
from hiqcache.record import RowFormat

#: Row dtypes that are served.
DTYPES = (torch.bfloat16, torch.float16)


class Codec(ABC):
    """Turns rows into codes and scales, and back; stateless.

    Rows are ``[..., heads, head_dim]`` of bf16 or fp16. Codes are int8 of the same shape; scales
    are bf16 ``[..., heads]``. Every head of every row stands alone: nothing in one head's codes,
    scale or restored values depends on another head, row, token or layer.

    The torch code is the reference. Other implementations give the same bytes for the same rows.

    Non-finite inputs: a head that holds a NaN or an infinity is stored as a NaN scale with zero
    codes, and restores as NaN throughout, so that a fault upstream stays visible and stays where it
    was. Zeros restore as exact zeros.
    """

    name: ClassVar[str]

    def row_formats(self, heads: int, head_dim: int) -> tuple[RowFormat, RowFormat]:
        """Bytes of a K row and of a V row. Raises ValueError for an unfit ``head_dim``."""
        return row_formats(self.name, heads, head_dim)

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (int8, the shape of ``rows``) and scales (bf16, without the last axis)."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows of ``codes`` and ``scales`` as ``dtype``."""

    @abstractmethod
    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        """How far the error of ``restored`` (from finite ``rows``) lies above the codec's bound.

        float64; at most zero wherever the bound holds. Each codec's docstring states its bound.
        """
