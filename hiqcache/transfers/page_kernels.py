"""The kernels of codecs that store whole pages: a tile is a page of one head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hiqcache.codecs.base import FP8_DTYPES
from hiqcache.codecs.int4 import KEPT_SCALE_MIN, STEP_MIN
from hiqcache.codecs.int8_rot import hadamard, signs
from hiqcache.transfers import kernels, page_kernel_code
from hiqcache.transfers.codec_kernels import CodecKernels, Direction, bf16_bits
from hiqcache.transfers.launch import Launch


class PageKernels(CodecKernels):
    """int4. Host slots name whole pages, in their slots' order."""

    codecs: ClassVar[tuple[str, ...]] = ("int4",)

    def tiles(self, tokens: int) -> int:
        return tokens // self._page_size * self._token_rows

    def _function(self, kernel: Direction) -> Any:
        return getattr(page_kernel_code, kernel)

    def _matrices(self, kernel: Direction) -> tuple[torch.Tensor, ...]:
        width = self._parts[1][1]
        flips = torch.tensor(signs(width), dtype=torch.float32)
        matrix = hadamard(torch.eye(width))
        # The interpreter's dot knows no bf16; bf16 holds whatever fp8 does.
        wide = torch.bfloat16 if self._dtype in FP8_DTYPES else self._dtype
        dtype = torch.float32 if kernels.INTERPRETED else wide
        if kernel == "backup":
            return ((matrix * flips[:, None] / width).to(self._device, dtype),)
        return matrix.to(self._device, dtype), flips.to(self._device)

    def _own(self, kernel: Direction) -> dict[str, Any]:
        if kernel == "restore":
            return {"LARGEST": torch.finfo(self._dtype).max}
        return {
            "STEP_MIN_BITS": bf16_bits(STEP_MIN[self._dtype]),
            "SCALE_MIN_BITS": bf16_bits(KEPT_SCALE_MIN[self._dtype]),
        }

    def _of_launch(self, launch: Launch) -> dict[str, Any]:  # noqa: ARG002 - tiles are pages
        return {}
