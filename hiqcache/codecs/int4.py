"""Codec int4: four bits an element, page by page. K by channels of a page, V by rotated heads."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from hiqcache.codecs.base import DTYPES, FP8_DTYPES, Codec, RowCodec, Stored
from hiqcache.codecs.formats import INT4_KEPT, INT4_PAGES, int4_key_row
from hiqcache.codecs.int8 import BF16_ROUNDING, CODE_MAX, quantise, to_rows
from hiqcache.codecs.int8 import SCALE_MIN as INT8_SCALE_MIN
from hiqcache.codecs.int8_rot import hadamard, signs_on
from hiqcache.record import RowFormat

#: Bits of the codes of K's channels that turn fast and slowly; together they fill a byte.
FAST_BITS, SLOW_BITS = 3, 5

#: A step below this is stored as zero, and every element as the middle. bf16: far above where fp32
#: arithmetic turns subnormal, and further below whatever fp8 holds; fp16: such a step is a small
#: share of its own subnormal one.
STEP_MIN = dict.fromkeys((torch.bfloat16, *FP8_DTYPES), 2.0**-120) | {torch.float16: 2.0**-28}

#: The smallest scale of a kept token. Scales of fp8 rows are never so small, but for zeros: a scale
#: below a subnormal step gives that row back exactly.
KEPT_SCALE_MIN = INT8_SCALE_MIN | dict.fromkeys(FP8_DTYPES, 2.0**-120)

#: What STEP_MIN and subnormals may cost an element: see the bounds.
_FLOOR = {
    torch.bfloat16: 2.0**-115,
    torch.float16: 2 * 2.0**-24,
    torch.float8_e4m3fn: 2.0**-10,
    torch.float8_e5m2: 2.0**-17,
}

#: Rounding to the rows' dtype changes a value by at most this share. FP8 rows go back onto a grid
#: that is coarser than the codes' at times.
_ROUNDING = {
    torch.bfloat16: BF16_ROUNDING,
    torch.float16: BF16_ROUNDING,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}


def steps(
    low: torch.Tensor, high: torch.Tensor, levels: torch.Tensor | float, step_min: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Middles and steps (bf16) of ``levels`` codes for fp32 values between ``low`` and ``high``.

    middle = bf16(low / 2 + high / 2); step = bf16(the larger distance to it * fp32(2 / (levels -
    1))), or zero below ``step_min``. So the first code and the last are the ends: rows that are
    restored and stored again keep them. A middle is NaN where either is not finite.
    """
    middles = (low * 0.5 + high * 0.5).to(torch.bfloat16)
    reach = torch.maximum(high - middles.float(), middles.float() - low)
    found = (reach * (2 / (levels - 1))).to(torch.bfloat16)
    finite = torch.isfinite(low) & torch.isfinite(high)
    found = torch.where(finite & (found >= step_min), found, 0)
    return torch.where(finite, middles, torch.nan), found


def to_codes(
    values: torch.Tensor, middles: torch.Tensor, found: torch.Tensor, levels: torch.Tensor | float
) -> torch.Tensor:
    """Codes 0 to ``levels`` - 1 (int32) of fp32 values: floor((x - middle) / step) + levels / 2.

    The nearest, as far as a product with the rounded reciprocal of the step says.
    """
    step = found.float()
    quotient = (values - middles.float()) * torch.where(step > 0, step, 1).reciprocal()
    codes = torch.minimum(
        (quotient.floor() + levels / 2).clamp(min=0), torch.as_tensor(levels - 1.0)
    )
    return torch.where((step > 0) & torch.isfinite(codes), codes, 0).to(torch.int32)


class Int4Keys(RowCodec):
    """K of a head: per page and channel a middle and a step; four tokens of a page are kept finer.

    Channels turn with the position (rotary embedding, halves): channel c and c + D/2 by the same
    angle, the faster the smaller c. What turns slowly hardly changes within a page but for what it
    says, and attention hears every step of it; so channels of the slower half have 32 levels, those
    of the faster half 8. Channels c and c + D/4 of a half share a byte: the fast one's code in the
    low 3 bits, the slow one's in the high 5.

    Kept are the INT4_KEPT tokens of the smallest L2 norm (in fp64; of equal ones the earlier):
    attention sinks have it, lie far from all others, and would widen every channel. They are no
    part of the channels' ranges, and are stored as int8 stores a head, one bf16 scale each.

    x -> middle + (code - (levels - 1) / 2) * step. Bound of every element of a page without
    non-finite values, with ``step`` of its channel made of the ``D``-wide rows that are not kept:
    |restored - x| <= (0.5 + 2^-7) * step + r * |restored| + 2^-8 * the channel's largest |x|
    + floor, and (0.5 + 2^-7) * max|x| / 127 + r * |restored| + floor for those that are kept. r is
    the rounding to the rows' dtype: 2^-8, of FP8 rows 2^-4 (e4m3) and 2^-3 (e5m2).

    Where a token has a non-finite element, its channel is stored as NaN, for the whole page. Zeros
    restore as exact zeros where the channel is all zeros.

    codes: uint8 ``[..., tokens, heads, D / 2]``, where the rows of kept tokens hold the first half
    of their int8 codes. scales: uint8 ``[..., bytes]`` of a page, one after the other: middles and
    steps, bf16 ``[heads, D]`` each, the second halves of kept codes, int8 ``[heads, kept, D / 2]``,
    their scales, bf16 ``[heads, kept]``, and slots, uint8 ``[heads, kept]``, in their order.
    """

    scale_min: ClassVar = STEP_MIN

    def stored(self, heads: int, width: int) -> Stored:
        row = int4_key_row(heads, width)
        return Stored(torch.uint8, (heads, width // 2), torch.uint8, (row.scales,))

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows.float()
        width = rows.shape[-1]
        slots = kept_slots(rows)
        is_kept = _is_kept(slots, rows.shape[-3])[..., None]
        low = values.where(~is_kept, torch.inf).amin(dim=-3)
        high = values.where(~is_kept, -torch.inf).amax(dim=-3)
        # A NaN passes amin and amax; an infinity of a kept token's does not count.
        levels = levels_of(width, rows.device)
        middles, found = steps(low, high, levels, STEP_MIN[rows.dtype])
        codes = to_codes(values, middles.unsqueeze(-3), found.unsqueeze(-3), levels)
        fast, slow = by_speed(codes)
        packed = (fast | slow << FAST_BITS).to(torch.uint8)
        at = slots.transpose(-1, -2)[..., None]  # [..., kept, heads, 1]
        kept = values.gather(-3, at.expand(*at.shape[:-1], width))
        kept_codes, kept_scales = quantise(kept, KEPT_SCALE_MIN[rows.dtype])
        first, second = kept_codes.view(torch.uint8).chunk(2, dim=-1)
        packed = packed.scatter(-3, at.expand_as(first), first)
        lead = rows.shape[:-3]
        pieces = (
            middles,
            found,
            second.transpose(-2, -3),
            kept_scales.transpose(-1, -2),
            slots.to(torch.uint8),
        )
        scales = [piece.contiguous().view(torch.uint8).reshape(*lead, -1) for piece in pieces]
        return packed, torch.cat(scales, dim=-1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        heads, width = codes.shape[-2], 2 * codes.shape[-1]
        middles, found, second, kept_scales, slots = _pieces(scales, heads, width)
        wide = from_speeds(codes & (2**FAST_BITS - 1), codes >> FAST_BITS).float()
        doubled = 2 * wide - (levels_of(width, codes.device) - 1)
        # By halves: a product may exceed fp32 where the sum does not.
        values = doubled * (found.float() * 0.25).unsqueeze(-3)
        values = (values + (middles.float() * 0.5).unsqueeze(-3)) * 2
        # A damaged record may name any slot: its rows are wrong then, and no others'.
        at = (slots.long() % codes.shape[-3]).transpose(-1, -2)[..., None]
        first = codes.gather(-3, at.expand(*at.shape[:-1], width // 2)).view(torch.int8)
        kept = torch.cat([first, second.transpose(-2, -3)], dim=-1).float()
        kept = kept * kept_scales.float().transpose(-1, -2)[..., None]
        return to_rows(values.scatter(-3, at.expand_as(kept), kept), dtype)

    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        x, y = rows.double(), restored.double()
        is_kept = _is_kept(kept_slots(rows), rows.shape[-3])[..., None]
        low = x.where(~is_kept, torch.inf).amin(dim=-3, keepdim=True)
        high = x.where(~is_kept, -torch.inf).amax(dim=-3, keepdim=True)
        step = (high - low) / (levels_of(rows.shape[-1], rows.device).double() - 1)
        largest = torch.maximum(high.abs(), low.abs())
        half = 0.5 + 2 * BF16_ROUNDING
        back = _ROUNDING[rows.dtype] * y.abs() + _FLOOR[rows.dtype]
        bound = half * step + BF16_ROUNDING * largest + back
        finer = half * x.abs().amax(dim=-1, keepdim=True) / CODE_MAX + back
        return (y - x).abs() - torch.where(is_kept, finer, bound)


class Int4Values(RowCodec):
    """V of a head, rotated as int8-rot's: a middle, a step and 16 levels.

    y = H(signs * x) / D -> middle + (code - 7.5) * step, and back by signs * H(.).

    Bound, in the L2 norm of each finite head, with step = (max y - min y) / 15:
    ||restored - x|| <= (0.5 + 2^-7) * D * step + D * 2^-8 * max|y| + r * ||restored||
    + sqrt(D) * floor, r as for K.

    codes: uint8 ``[..., heads, D / 2]``, element c's in the low four bits, c + D/2's in the high.
    scales: bf16 ``[..., heads, 2]``: middle and step.
    """

    scale_min: ClassVar = STEP_MIN
    _levels: ClassVar = 16

    def stored(self, heads: int, width: int) -> Stored:
        return Stored(torch.uint8, (heads, width // 2), torch.bfloat16, (heads, 2))

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = _rotated(rows)
        low, high = values.amin(dim=-1), values.amax(dim=-1)
        middles, found = steps(low, high, self._levels, STEP_MIN[rows.dtype])
        codes = to_codes(values, middles[..., None], found[..., None], self._levels)
        first, second = codes.chunk(2, dim=-1)
        return (first | second << 4).to(torch.uint8), torch.stack([middles, found], dim=-1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        middles, found = (each.float().unsqueeze(-1) for each in scales.unbind(-1))
        wide = torch.cat([codes & 15, codes >> 4], dim=-1).float()
        dim = wide.shape[-1]
        # By D-th parts: a product may exceed fp32 where the sum does not.
        values = hadamard(2 * wide - (self._levels - 1)) * (found * (0.5 / dim))
        # H of a constant is D times it in the first element, and zero in the others.
        values = torch.cat([values[..., :1] + middles, values[..., 1:] + middles * 0], dim=-1) * dim
        return to_rows(values * signs_on(dim, codes.device), dtype)

    def excess(self, rows: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
        dim = rows.shape[-1]
        x, y = rows.double(), restored.double()
        rotated = hadamard(x * signs_on(dim, rows.device)) / dim
        step = (rotated.amax(dim=-1) - rotated.amin(dim=-1)) / (self._levels - 1)
        bound = (
            (0.5 + 2 * BF16_ROUNDING) * dim * step
            + dim * BF16_ROUNDING * rotated.abs().amax(dim=-1)
            + _ROUNDING[rows.dtype] * y.norm(dim=-1)
            + math.sqrt(dim) * _FLOOR[rows.dtype]
        )
        excess: torch.Tensor = (y - x).norm(dim=-1) - bound
        return excess


class Int4(Codec):
    """Int4Keys and Int4Values: 3.55 times the tokens of bf16 in the same bytes, at 128 wide heads.

    Takes whole pages. Why so: K's error is what attention feels, and it sits in channels (a model's
    bias, the slow rotary frequencies) that a scale per token cannot serve; token-wise four bits of
    K destroy models with a large constant in K. V has no such channels. results/codec-study.

    Behind an FP8 KV cache it holds 1.78 times the tokens. SGLang's K and V scales of such a cache
    divide all rows of a layer: the codec is indifferent to them. V drifts there: each cycle rounds
    to FP8 what the rotation spreads, and after 20 its error may be twice that of one.
    """

    name: ClassVar[str] = "int4"
    page_sizes: ClassVar = INT4_PAGES
    dtypes: ClassVar = DTYPES + FP8_DTYPES

    def of(self, row: RowFormat) -> RowCodec:
        return Int4Keys() if row.per_page else Int4Values()


def levels_of(width: int, device: torch.device) -> torch.Tensor:
    """Levels of each channel of K, fp32 ``[width]``: quarters of 8, 32, 8, 32."""
    of_half = [2.0**FAST_BITS] * (width // 4) + [2.0**SLOW_BITS] * (width // 4)
    return torch.tensor(of_half * 2, device=device)


def by_speed(channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The fast and the slow channels of ``[..., D]``, ``[..., D / 2]`` each."""
    quarters = channels.reshape(*channels.shape[:-1], 2, 2, -1)
    return quarters[..., 0, :].flatten(-2), quarters[..., 1, :].flatten(-2)


def from_speeds(fast: torch.Tensor, slow: torch.Tensor) -> torch.Tensor:
    """The reverse of by_speed."""
    pair = [each.reshape(*each.shape[:-1], 2, -1) for each in (fast, slow)]
    return torch.stack(pair, dim=-2).flatten(-3)


def kept_slots(rows: torch.Tensor) -> torch.Tensor:
    """Slots of the kept tokens, int64 ``[..., heads, INT4_KEPT]``, of rows ``[..., T, heads, D]``.

    In fp64 a sum of squares of 16-bit floats is exact in any order, but for ranges of 2^15 and more
    within a head.
    """
    norms = rows.double().square().sum(dim=-1).transpose(-1, -2)
    norms = torch.where(torch.isfinite(norms), norms, torch.inf)
    found = torch.sort(norms, dim=-1, stable=True).indices[..., :INT4_KEPT]
    return found.sort(dim=-1).values


def _is_kept(slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Whether a token is kept: bool ``[..., tokens, heads]``."""
    slot = torch.arange(tokens, device=slots.device)
    return (slots[..., None] == slot).any(dim=-2).transpose(-1, -2)


def _pieces(scales: torch.Tensor, heads: int, width: int) -> tuple[torch.Tensor, ...]:
    lead = scales.shape[:-1]
    channels, codes, few = 2 * heads * width, heads * INT4_KEPT * (width // 2), heads * INT4_KEPT
    middles, found, second, kept_scales, slots = torch.split(
        scales, [channels, channels, codes, 2 * few, few], dim=-1
    )

    def bf16(piece: torch.Tensor, *shape: int) -> torch.Tensor:
        return piece.contiguous().view(torch.bfloat16).view(*lead, *shape)

    return (
        bf16(middles, heads, width),
        bf16(found, heads, width),
        second.contiguous().view(torch.int8).view(*lead, heads, INT4_KEPT, width // 2),
        bf16(kept_scales, heads, INT4_KEPT),
        slots.reshape(*lead, heads, INT4_KEPT),
    )


def _rotated(rows: torch.Tensor) -> torch.Tensor:
    dim = rows.shape[-1]
    # Divided first: a sum of D of the largest bf16 values would overflow fp32.
    return hadamard(rows.float() / dim * signs_on(dim, rows.device))
