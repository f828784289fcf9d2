"""The kernels of codecs that store a token's rows by themselves: tiles of head rows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton

from hiqcache.codecs import TOKEN_CODECS
from hiqcache.codecs.base import TokenCodec
from hiqcache.codecs.int8_rot import hadamard, signs
from hiqcache.transfers import kernels
from hiqcache.transfers.codec_kernels import CodecKernels, Direction, bf16_bits
from hiqcache.transfers.launch import Launch

#: The smallest side of a tile that Triton's dot takes.
DOT_ROWS = 16


class RowKernels(CodecKernels):
    """int8 and int8-rot: a tile is so many head rows, whole tokens of them."""

    codecs: ClassVar[tuple[str, ...]] = TOKEN_CODECS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Tokens a tile. Computed once: a restore's first launch waits for the Python before it.
        self._tile = self._rows(self.launch) // self._token_rows

    @property
    def _widest(self) -> int:
        """Elements of a tile's rows."""
        widest: int = triton.next_power_of_2(max(width for _, width in self._parts))
        return widest

    def tiles(self, tokens: int) -> int:
        return -(-tokens // self._tile)

    def _function(self, kernel: Direction) -> Any:
        return getattr(kernels, kernel)

    def _own(self, kernel: Direction) -> dict[str, Any]:
        shared = {"DIM_BLOCK": self._widest, "ROTATE": self._codec.name == "int8-rot"}
        if kernel == "restore":
            return shared | {
                "LARGEST": torch.finfo(self._dtype).max,
                "SCALES_ALIGNED": self._scales_aligned(),
            }
        assert isinstance(self._codec, TokenCodec)
        smallest = self._codec.scale_min[self._dtype]
        return shared | {"SCALE_MIN_BITS": bf16_bits(smallest), "LAYER_INNER": self._inner}

    def _of_launch(self, launch: Launch) -> dict[str, Any]:
        return {"ROWS": self._rows(launch), "STAGES": launch.stages}

    def _scales_aligned(self) -> bool:
        """Whether the scale of each even head of each record begins a word of four bytes."""
        return all(not value % 4 for _, scales in self._planes for value in scales)

    def _rows(self, launch: Launch) -> int:
        """Head rows of a tile: whole tokens."""
        rows: int = launch.elements // self._widest
        token: int = triton.next_power_of_2(self._token_rows)
        return max(rows, token, DOT_ROWS)

    def _matrices(self, kernel: Direction) -> tuple[torch.Tensor, ...]:
        """int8-rot's matrix for one direction, in a type that holds it exactly."""
        if self._codec.name != "int8-rot":
            return (self._bases,)  # the kernels don't read it
        flips = torch.tensor(signs(self._widest), dtype=torch.float32)
        matrix = hadamard(torch.eye(self._widest))
        # The interpreter's dot knows no bf16.
        dtype = torch.float32 if kernels.INTERPRETED else self._dtype
        if kernel == "backup":
            matrix = matrix * flips[:, None] / self._widest
        else:
            matrix = matrix * flips[None, :]
        return (matrix.to(self._device, dtype),)
