"""Codec int8: symmetric, one bf16 scale per token, layer, K|V and head."""

from __future__ import annotations

from typing import ClassVar

import torch

from hiqcache.codecs.base import Codec

#: Codes run from -127 to 127; -128 is never stored.
CODE_MAX = 127

#: The smallest scale, per dtype of the rows. It keeps an all-zero head at exact zeros and all
#: arithmetic out of the subnormal range, where a GPU may flush and rounding steps are coarse:
#: bf16: 2^-120, so that a subnormal input (below 2^-126) rounds to code 0 whether flushed or not;
#: fp16: 2^-18, 64 subnormal steps of fp16, so that half a step is within the error bound.
SCALE_MIN = {torch.bfloat16: 2.0**-120, torch.float16: 2.0**-18}

#: bf16 keeps 8 significant bits: rounding to it changes a value by at most this share.
BF16_ROUNDING = 2.0**-8


def quantise(values: torch.Tensor, scale_min: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of fp32 ``values``, with one scale for the last axis.

    scale = bf16(max|x| / 127), at least ``scale_min``; code = round(x / scale), half to even,
    clamped to +-127. The quotient is formed in fp32, since a bf16 quotient would add its own error;
    the clamp is needed because a scale that was rounded down lets |x / scale| reach 127.5.
    """
    amax = values.abs().amax(dim=-1, keepdim=True)  # NaN if any value is
    finite = torch.isfinite(amax)
    scales = (amax / CODE_MAX).to(torch.bfloat16).clamp(min=scale_min)
    quotient = values / scales.float()
    codes = torch.where(finite, quotient.round().clamp(-CODE_MAX, CODE_MAX), 0)
    scales = torch.where(finite, scales, torch.nan)
    return codes.to(torch.int8), scales.squeeze(-1)


def to_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 ``values`` as ``dtype``, cut at its largest where a product exceeds that."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


class Int8(Codec):
    """x -> code * scale.

    Bound, for every finite element: |restored - x| <= (0.5 + 2^-8) * scale + 2^-8 * |restored|.
    The first term is half a code step, with room for a maximum that the clamp cut; the second is
    the rounding of the product to the row's dtype.

    No drift: storing a restored row gives the same codes and scale. (1) Codes: the product's
    rounding moves it by at most 127/256 of a scale (half a subnormal step of fp16 is 1/128 of the
    smallest scale), less than half a step, so each quotient rounds back to its code. (2) Scale: the
    code of the largest element is +-127, for max|x| / scale is at least 127 / (1 + 2^-8) > 126.5;
    so the new maximum is the product 127 * scale rounded to the row's dtype. With scale = m * 2^e,
    128 <= m <= 255, rounding 127 * m to 8 bits moves it by at most 63, except by 64 for m = 192;
    and 63 / 127 < 0.5, so dividing by 127 rounds back to m. m = 192 would need a bf16 maximum
    strictly between 24320 and 24448 (times 2^e), which are neighbours. fp16 keeps 11 bits, which
    suffices for every m. Where a clamp to the dtype's largest or to the smallest scale acts, it
    acts again.
    The test runs over every bf16 and fp16 maximum and every code.
    """

    name: ClassVar[str] = "int8"

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise(rows.float(), SCALE_MIN[rows.dtype])

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return to_rows(codes.float() * scales.float().unsqueeze(-1), dtype)

    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        _, scales = self.encode(rows)
        x, y = rows.double(), restored.double()
        bound = (0.5 + BF16_ROUNDING) * scales.double().unsqueeze(-1) + BF16_ROUNDING * y.abs()
        return (y - x).abs() - bound
