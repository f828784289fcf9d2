"""Codec int4 in Triton: one page of one head, to its record and back.

K's channels are two tiles of half the width, by how fast they turn: fast ones are of the first and
the third quarter, slow ones of the second and the fourth, and the same place in both shares a byte.
So nothing is shuffled between threads. V's halves are two products with half of the matrix each.
"""

# Triton's kernels are not typed Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from hiqcache.codecs import int4
from hiqcache.codecs.formats import INT4_KEPT
from hiqcache.transfers.kernel_codec import (
    BF16_NAN_BITS,
    ROUND,
    SNAP,
    by_code_max,
    from_rows,
    reciprocal,
    to_bf16_bits,
    to_rows,
)

_KEPT = tl.constexpr(INT4_KEPT)
_FAST_BITS = tl.constexpr(int4.FAST_BITS)
_FAST_LEVELS = tl.constexpr(2**int4.FAST_BITS)
_SLOW_LEVELS = tl.constexpr(2**int4.SLOW_BITS)
_VALUE_LEVELS = tl.constexpr(16)
_INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _is_finite(values):
    return (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITE_BITS


@triton.jit
def _float_of(bits):
    """fp32 of bf16 bits, int16 or int32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _steps(low, high, LEVELS: tl.constexpr, STEP_MIN_BITS: tl.constexpr):
    """codecs.int4.steps: the bits of middles and steps, int32."""
    finite = _is_finite(low) & _is_finite(high)
    middles = to_bf16_bits(tl.where(finite, low * 0.5 + high * 0.5, 0.0))
    middle = _float_of(middles)
    reach = tl.where(finite, tl.maximum(high - middle, middle - low), 0.0)
    steps = to_bf16_bits(reach * (2 / (LEVELS - 1)))
    steps = tl.where(steps >= STEP_MIN_BITS, steps, 0)
    return tl.where(finite, middles, BF16_NAN_BITS), steps


@triton.jit
def _codes(values, middle, step, LEVELS: tl.constexpr):
    """codecs.int4.to_codes, int32; ``middle`` and ``step`` broadcast."""
    inverse = reciprocal(tl.where(step > 0.0, step, 1.0))
    codes = tl.floor((values - middle) * inverse) + LEVELS // 2
    codes = tl.clamp(codes, 0.0, LEVELS - 1.0)
    return tl.where((step > 0.0) & (codes == codes), codes, 0.0).to(tl.int32)


@triton.jit
def _less(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _more(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _ends(values, kept):
    """The least and the most of each channel without kept tokens; NaN where one is."""
    low = tl.reduce(tl.where(kept[:, None], float("inf"), values), 0, _less)
    high = tl.reduce(tl.where(kept[:, None], float("-inf"), values), 0, _more)
    return low, high


@triton.jit
def _kept_tokens(fast, slow, slot):
    """Which tokens are kept, and the rank of each among them: those of the smallest norm."""
    norms = tl.sum(fast.to(tl.float64) * fast.to(tl.float64), axis=1)
    norms += tl.sum(slow.to(tl.float64) * slow.to(tl.float64), axis=1)
    # Any that is not finite comes last, before those that are taken already.
    norms = tl.where(norms < 1e300, norms, 1e300)
    kept = slot < 0
    for _ in tl.static_range(_KEPT):
        least = tl.argmin(norms, axis=0)
        kept |= slot == least
        norms = tl.where(slot == least, float("inf"), norms)
    return kept, tl.cumsum(kept.to(tl.int32), axis=0) - 1


@triton.jit
def _row_pointers(device, rows_at, device_slot, row_stride, ALIGN: tl.constexpr):
    """Where the rows of ``device_slot`` begin, if those of slot 0 do at ``rows_at``, in bytes."""
    at = tl.multiple_of(rows_at + device_slot.to(tl.int64) * row_stride, [ALIGN])
    pointers = device.to(tl.pointer_type(tl.int8), bitcast=True) + at
    return pointers.to(device.dtype, bitcast=True)


@triton.jit
def _code_pointers(arena, codes_at, slot, SLOT_STRIDE: tl.constexpr, ALIGN: tl.constexpr):
    """Where the codes of a tile's tokens begin, if those of slot 0 do at ``codes_at``."""
    return arena + tl.multiple_of(codes_at + slot * SLOT_STRIDE, [ALIGN])


@triton.jit
def _channels(half, QUARTER: tl.constexpr):
    """The fast channels: of the first and the third quarter. The slow ones are QUARTER further."""
    channel = half + tl.where(half >= QUARTER, QUARTER, 0)
    return tl.max_contiguous(tl.multiple_of(channel, [QUARTER]), [QUARTER])


@triton.jit
def backup_keys(
    arena,
    device,
    device_slots,
    first_token,
    rows_at,
    row_stride,
    device_slot,
    codes_at,
    side_at,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    STEP_MIN_BITS: tl.constexpr,
    SCALE_MIN_BITS: tl.constexpr,
):
    """One page of one head of K."""
    HALF: tl.constexpr = DIM // 2
    QUARTER: tl.constexpr = DIM // 4
    slot = tl.arange(0, PAGE_SIZE)
    half = tl.arange(0, HALF)
    second = half >= QUARTER
    channel = _channels(half, QUARTER)
    rows = _row_pointers(device, rows_at, device_slot, row_stride, DEVICE_ALIGN)
    rows = rows[:, None] + channel[None, :]
    fast = from_rows(tl.load(rows))
    slow = from_rows(tl.load(rows + QUARTER))
    kept, rank = _kept_tokens(fast, slow, slot)

    low, high = _ends(fast, kept)
    fast_middles, fast_steps = _steps(low, high, _FAST_LEVELS, STEP_MIN_BITS)
    low, high = _ends(slow, kept)
    slow_middles, slow_steps = _steps(low, high, _SLOW_LEVELS, STEP_MIN_BITS)
    fast_codes = _codes(
        fast, _float_of(fast_middles)[None, :], _float_of(fast_steps)[None, :], _FAST_LEVELS
    )
    slow_codes = _codes(
        slow, _float_of(slow_middles)[None, :], _float_of(slow_steps)[None, :], _SLOW_LEVELS
    )
    codes = (fast_codes | (slow_codes << _FAST_BITS)).to(tl.uint8)
    codes_at += head * HALF
    at = _code_pointers(arena, codes_at, slot, CODE_SLOT_STRIDE, CODE_ALIGN)
    tl.store(at[:, None] + half[None, :], codes, mask=~kept[:, None])

    words = (arena + side_at + head * (DIM * 2)).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(words + channel, fast_middles.to(tl.int16))
    tl.store(words + channel + QUARTER, slow_middles.to(tl.int16))
    words += HEADS * DIM
    tl.store(words + channel, fast_steps.to(tl.int16))
    tl.store(words + channel + QUARTER, slow_steps.to(tl.int16))

    for index in tl.static_range(_KEPT):
        chosen = kept & (rank == index)
        at_slot = tl.sum(tl.where(chosen, slot, 0), axis=0)
        # Loaded again: a reduction of a tile takes longer.
        row_slot = tl.load(device_slots + first_token + at_slot).to(tl.uint32)
        row = _row_pointers(device, rows_at, row_slot, row_stride, DEVICE_ALIGN) + channel
        fast_row, slow_row = from_rows(tl.load(row)), from_rows(tl.load(row + QUARTER))
        most = tl.reduce(_more(tl.abs(fast_row), tl.abs(slow_row)), 0, _more)
        finite = _is_finite(most)
        most = tl.where(finite, most, 0.0)
        fast_row, slow_row = tl.where(finite, fast_row, 0.0), tl.where(finite, slow_row, 0.0)
        scale = tl.maximum(to_bf16_bits(by_code_max(most)), SCALE_MIN_BITS)
        inverse = reciprocal(_float_of(scale))
        number = head * _KEPT + index
        codes_of_row = codes_at + at_slot * CODE_SLOT_STRIDE
        codes_of_side = side_at + 4 * HEADS * DIM + number * HALF
        start = tl.where(second, codes_of_side, codes_of_row)
        fast_at, slow_at = _kept_places(half, second, QUARTER)
        tl.store(arena + start + fast_at, _as_int8(fast_row, inverse))
        tl.store(arena + start + slow_at, _as_int8(slow_row, inverse))
        after = side_at + 4 * HEADS * DIM + HEADS * _KEPT * HALF
        scale_ptr = (arena + after + number * 2).to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(scale_ptr, tl.where(finite, scale, BF16_NAN_BITS).to(tl.int16))
        tl.store(arena + after + HEADS * _KEPT * 2 + number, at_slot.to(tl.uint8))


@triton.jit
def _kept_places(half, second, QUARTER: tl.constexpr):
    """Where fast and slow channels' codes of a kept token lie within their half of it."""
    return tl.where(second, half - QUARTER, half), tl.where(second, half, half + QUARTER)


@triton.jit
def _as_int8(row, inverse):
    """The codes of kernel_codec.quantise of a finite head, as bytes."""
    return ((row * inverse + SNAP) + ROUND).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def backup_values(
    arena,
    device,
    matrix,
    rows_at,
    row_stride,
    device_slot,
    codes_at,
    scales_at,
    head,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    STEP_MIN_BITS: tl.constexpr,
):
    """One page of one head of V."""
    HALF: tl.constexpr = DIM // 2
    slot = tl.arange(0, PAGE_SIZE)
    half = tl.arange(0, HALF)
    column = tl.arange(0, DIM)
    rows = _row_pointers(device, rows_at, device_slot, row_stride, DEVICE_ALIGN)
    rows = tl.load(rows[:, None] + column[None, :])
    if rows.dtype.primitive_bitwidth == 8:
        rows = from_rows(rows)
    of_matrix = matrix + column[:, None] * DIM + half[None, :]
    first = tl.dot(rows.to(matrix.dtype.element_ty), tl.load(of_matrix))
    last = tl.dot(rows.to(matrix.dtype.element_ty), tl.load(of_matrix + HALF))
    low = tl.reduce(_less(first, last), 1, _less)
    high = tl.reduce(_more(first, last), 1, _more)
    middles, steps = _steps(low, high, _VALUE_LEVELS, STEP_MIN_BITS)
    middle, step = _float_of(middles)[:, None], _float_of(steps)[:, None]
    codes = _codes(first, middle, step, _VALUE_LEVELS)
    codes |= _codes(last, middle, step, _VALUE_LEVELS) << 4
    at = _code_pointers(arena, codes_at + head * HALF, slot, CODE_SLOT_STRIDE, CODE_ALIGN)
    tl.store(at[:, None] + half[None, :], codes.to(tl.uint8))
    words = (arena + scales_at + head * 4 + slot * SCALE_SLOT_STRIDE).to(
        tl.pointer_type(tl.int32), bitcast=True
    )
    tl.store(words, middles | (steps << 16))


@triton.jit
def restore_keys(
    arena,
    device,
    device_slots,
    first_token,
    rows_at,
    row_stride,
    device_slot,
    codes_at,
    side_at,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One page of one head of K."""
    HALF: tl.constexpr = DIM // 2
    QUARTER: tl.constexpr = DIM // 4
    dtype: tl.constexpr = device.dtype.element_ty
    slot = tl.arange(0, PAGE_SIZE)
    half = tl.arange(0, HALF)
    second = half >= QUARTER
    channel = _channels(half, QUARTER)
    codes_at += head * HALF
    at = _code_pointers(arena, codes_at, slot, CODE_SLOT_STRIDE, CODE_ALIGN)
    codes = tl.load(at[:, None] + half[None, :]).to(tl.int32)
    words = (arena + side_at + head * (DIM * 2)).to(tl.pointer_type(tl.int16), bitcast=True)
    fast_middle = _float_of(tl.load(words + channel))
    slow_middle = _float_of(tl.load(words + channel + QUARTER))
    words += HEADS * DIM
    # By halves: a product may exceed fp32 where the sum does not.
    fast_step = _float_of(tl.load(words + channel)) * 0.25
    slow_step = _float_of(tl.load(words + channel + QUARTER)) * 0.25
    after = side_at + 4 * HEADS * DIM + HEADS * _KEPT * HALF
    slots_at = after + HEADS * _KEPT * 2 + head * _KEPT
    kept = slot < 0
    for index in tl.static_range(_KEPT):
        kept |= slot == tl.load(arena + slots_at + index).to(tl.int32) % PAGE_SIZE
    fast = 2 * (codes & (_FAST_LEVELS - 1)) - (_FAST_LEVELS - 1)
    slow = 2 * (codes >> _FAST_BITS) - (_SLOW_LEVELS - 1)
    fast = (fast.to(tl.float32) * fast_step[None, :] + fast_middle[None, :] * 0.5) * 2.0
    slow = (slow.to(tl.float32) * slow_step[None, :] + slow_middle[None, :] * 0.5) * 2.0
    rows = _row_pointers(device, rows_at, device_slot, row_stride, DEVICE_ALIGN)
    rows = rows[:, None] + channel[None, :]
    tl.store(rows, to_rows(fast, dtype, LARGEST), mask=~kept[:, None])
    tl.store(rows + QUARTER, to_rows(slow, dtype, LARGEST), mask=~kept[:, None])

    fast_at, slow_at = _kept_places(half, second, QUARTER)
    for index in tl.static_range(_KEPT):
        # A record that is no record must not write elsewhere.
        at_slot = tl.load(arena + slots_at + index).to(tl.int32) % PAGE_SIZE
        number = head * _KEPT + index
        codes_of_row = codes_at + at_slot * CODE_SLOT_STRIDE
        codes_of_side = side_at + 4 * HEADS * DIM + number * HALF
        start = tl.where(second, codes_of_side, codes_of_row)
        scale_ptr = (arena + after + number * 2).to(tl.pointer_type(tl.int16), bitcast=True)
        scale = _float_of(tl.load(scale_ptr))
        fast_row = tl.load(arena + start + fast_at).to(tl.int8, bitcast=True).to(tl.float32)
        slow_row = tl.load(arena + start + slow_at).to(tl.int8, bitcast=True).to(tl.float32)
        row_slot = tl.load(device_slots + first_token + at_slot).to(tl.uint32)
        row = _row_pointers(device, rows_at, row_slot, row_stride, DEVICE_ALIGN) + channel
        tl.store(row, to_rows(fast_row * scale, dtype, LARGEST))
        tl.store(row + QUARTER, to_rows(slow_row * scale, dtype, LARGEST))


@triton.jit
def restore_values(
    arena,
    device,
    matrix,
    signs,
    rows_at,
    row_stride,
    device_slot,
    codes_at,
    scales_at,
    head,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One page of one head of V. A product with codes is a sum of whole numbers, exact."""
    HALF: tl.constexpr = DIM // 2
    slot = tl.arange(0, PAGE_SIZE)
    half = tl.arange(0, HALF)
    column = tl.arange(0, DIM)
    at = _code_pointers(arena, codes_at + head * HALF, slot, CODE_SLOT_STRIDE, CODE_ALIGN)
    codes = tl.load(at[:, None] + half[None, :]).to(tl.int32)
    words = (arena + scales_at + head * 4 + slot * SCALE_SLOT_STRIDE).to(
        tl.pointer_type(tl.int32), bitcast=True
    )
    both = tl.load(words)
    middle = (both << 16).to(tl.float32, bitcast=True)
    # By D-th parts: a product may exceed fp32 where the sum does not.
    step = (both & -0x10000).to(tl.float32, bitcast=True) * (0.5 / DIM)
    of_matrix = matrix + half[:, None] * DIM + column[None, :]
    first = (2 * (codes & 15) - (_VALUE_LEVELS - 1)).to(matrix.dtype.element_ty)
    last = (2 * (codes >> 4) - (_VALUE_LEVELS - 1)).to(matrix.dtype.element_ty)
    sums = tl.dot(first, tl.load(of_matrix))
    sums = tl.dot(last, tl.load(of_matrix + HALF * DIM), acc=sums)
    constant = tl.where(column[None, :] == 0, middle[:, None], middle[:, None] * 0.0)
    values = (sums * step[:, None] + constant) * DIM * tl.load(signs + column)[None, :]
    rows = _row_pointers(device, rows_at, device_slot, row_stride, DEVICE_ALIGN)
    tl.store(rows[:, None] + column[None, :], to_rows(values, device.dtype.element_ty, LARGEST))
