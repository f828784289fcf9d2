"""Codec int8: symmetric, one bf16 scale per token, layer, K|V and head."""

from __future__ import annotations

from typing import ClassVar

import torch

from hiqcache.codecs.base import TokenCodec

#: Codes run from -127 to 127; -128 is never stored.
CODE_MAX = 127

#: The smallest scale, per dtype of the rows. It keeps an all-zero head at exact zeros and all
#: arithmetic out of fp32's subnormal range, where a GPU may flush and rounding steps are coarse:
#: bf16: 2^-120, so that a subnormal input (below 2^-126) rounds to code 0 whether flushed or not;
#: fp16: 2^-23, two of its subnormal steps. With one, a restored row stored again would drift; with
#: many more, heads of small magnitude lose what fp16 still holds (with 2^-18, 11 % of a head of RMS
#: 1e-5).
SCALE_MIN = {torch.bfloat16: 2.0**-120, torch.float16: 2.0**-23}

#: The absolute error that is allowed beside the relative one: see the bound.
FLOOR = {torch.bfloat16: 2.0**-120, torch.float16: 2 * 2.0**-24}

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


class Int8(TokenCodec):
    """x -> code * scale.

    Bound, for every finite element, with step = max|x| / 127 of its head:
    |restored - x| <= (0.5 + 2^-7) * step + 2^-8 * |restored| + floor.
    The first term is half a code step, with room for a scale that bf16 rounded up and for a maximum
    that the clamp cut; the second is the rounding of the product to the row's dtype. ``floor`` is
    what the smallest scale and the dtype's subnormals cost: two subnormal steps of fp16, and for
    bf16 2^-120.

    No drift: storing a restored row gives the same codes and scale. (1) Codes: the product's
    rounding moves it by at most 127/256 of a scale (half a subnormal step of fp16 is 1/4 of the
    smallest scale), less than half a step, so each quotient rounds back to its code. (2) Scale: the
    code of the largest element is +-127, for max|x| / scale is at least 127 / (1 + 2^-8) > 126.5;
    so the new maximum is the product 127 * scale rounded to the row's dtype. With scale = m * 2^e,
    128 <= m <= 255, rounding 127 * m to 8 bits moves it by at most 63, except by 64 for m = 192;
    and 63 / 127 < 0.5, so dividing by 127 rounds back to m. m = 192 would need a bf16 maximum
    strictly between 24320 and 24448 (times 2^e), which are neighbours. fp16 keeps 11 bits, which
    suffices for every m; half a subnormal step is at most 32 in these units. Where a clamp to the
    dtype's largest or to the smallest scale acts, it acts again.
    The test runs over every bf16 and fp16 maximum and every code.
    """

    name: ClassVar[str] = "int8"
    scale_min: ClassVar = SCALE_MIN

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise(rows.float(), SCALE_MIN[rows.dtype])

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return to_rows(codes.float() * scales.float().unsqueeze(-1), dtype)

    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        x, y = rows.double(), restored.double()
        step = x.abs().amax(dim=-1, keepdim=True) / CODE_MAX
        bound = (0.5 + 2 * BF16_ROUNDING) * step + BF16_ROUNDING * y.abs() + FLOOR[rows.dtype]
        return (y - x).abs() - bound
