"""Triton kernels of the fused transfer: rows to host records and back, in one pass.

Both kernels walk *head rows*: (token, K|V, head) in that order, ``DIM`` elements each, ``ROWS`` of
them a tile. A tile is a dense rectangle for any head count, and a token's K and V records, which
lie next to each other in a page, are read or written together.

Where things lie comes from ``table``, int64 ``[layers, 2, 4]`` on the device: for each layer and
each of K and V, the device buffer's distance from the pointer ``device`` and its slot stride, in
elements, and the offsets in the arena of the first code row and the first scale row, in bytes.
Every offset is 64 bits wide.

The kernels run under TRITON_INTERPRET=1 too, on CPU tensors.
"""

# Triton's kernels are not typed Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

#: Whether the kernels below were defined for Triton's interpreter.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_INTERPRETED = tl.constexpr(INTERPRETED)
_CODE_MAX = tl.constexpr(127.0)
_FLOAT_INF_BITS = tl.constexpr(0x7F800000)
_BF16_NAN_BITS = tl.constexpr(0x7FC0)
# Adding 384 = 1.5 * 2^8 rounds a quotient to a multiple of 2^-15, adding 1.5 * 2^23 to an integer.
_SNAP = tl.constexpr(384.0)
_ROUND = tl.constexpr(12582912.0 - 384.0)


@triton.jit
def _placement(table, layer):
    """A layer's entries of ``table``: four of K, then four of V."""
    k = table + layer * 8
    v = k + 4
    return (
        tl.load(k), tl.load(k + 1), tl.load(k + 2), tl.load(k + 3),
        tl.load(v), tl.load(v + 1), tl.load(v + 2), tl.load(v + 3),
    )  # fmt: skip


@triton.jit
def _load_slots(tile, tokens, slots, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The slot of each of a tile's rows; 0 where there is none."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return tl.load(slots + row // (2 * HEADS), mask=row < tokens * (2 * HEADS), other=0)


@triton.jit
def _locate(
    tile,
    tokens,
    placement,
    host_slot,
    device_slot,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
):
    """Which of a tile's ROWS exist, and the offsets of their rows, codes and scales."""
    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < tokens * (2 * HEADS)
    head = row % HEADS
    is_k = row // HEADS % 2 == 0
    page = host_slot // PAGE_SIZE
    in_page = host_slot % PAGE_SIZE

    k_rows, k_stride, k_codes, k_scales, v_rows, v_stride, v_codes, v_scales = placement
    rows = tl.where(is_k, k_rows + device_slot * k_stride, v_rows + device_slot * v_stride)
    # Hinted before the head is added: for one head, that sum folds away and its hint with it.
    rows = tl.multiple_of(rows, [DEVICE_ALIGN]) + head * DIM
    codes = tl.where(is_k, k_codes, v_codes)
    codes += page * CODE_PAGE_STRIDE + in_page * CODE_SLOT_STRIDE + head * DIM
    codes = tl.multiple_of(codes, [CODE_ALIGN])
    scales = tl.where(is_k, k_scales, v_scales)
    scales += page * SCALE_PAGE_STRIDE + in_page * SCALE_SLOT_STRIDE + head * 2
    return live, rows, codes, scales


@triton.jit
def _load_record(arena, codes_at, scales_at, live, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """int8 codes [ROWS, DIM_BLOCK] and the bits of bf16 scales [ROWS]."""
    column = tl.arange(0, DIM_BLOCK)[None, :]
    codes = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
    scales = (arena + scales_at).to(tl.pointer_type(tl.int16), bitcast=True)
    return (
        tl.load(codes[:, None] + column, mask=live[:, None] & (column < DIM), other=0),
        tl.load(scales, mask=live, other=0),
    )


@triton.jit
def _quantise(values, SCALE_MIN_BITS: tl.constexpr):
    """fp32 [ROWS, DIM] to int8 codes and the bits of bf16 scales: codecs.int8.quantise, bit by bit.

    Why a product with the reciprocal gives the same codes as the reference's rounded quotient, for
    values of bf16 or fp16 (codec int8). With x and s of at most 11 and 8 significant bits and
    |x / s| >= 0.49, x / s is either a tie k + 1/2 or at least 2^-13 away from one, as 2x - (2k+1)s
    is a whole multiple of the smaller operand's last bit. The product, at most 127.5, is within
    127.5 * 2^-23 < 2^-16 of x / s, fused or not with the addition that follows; so rounding it to
    a multiple of 2^-15 gives exactly k + 1/2 for a tie, and leaves the others on their side.

    No clamp: rounding a scale to bf16 lowers it by at most 2^-8 of itself, so |x / s| is at most
    127 * (1 + 2^-8) < 127.5.
    """
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitudes, axis=1)
    finite = amax < _FLOAT_INF_BITS
    amax = tl.where(finite, amax, _FLOAT_INF_BITS - 1).to(tl.float32, bitcast=True)
    bits = tl.math.div_rn(amax, _CODE_MAX).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to bf16, half to even
    bits = tl.maximum(bits, SCALE_MIN_BITS)
    inverse = tl.math.div_rn(1.0, (bits << 16).to(tl.float32, bitcast=True))
    rounded = (values * inverse[:, None] + _SNAP) + _ROUND
    # The low byte of 1.5 * 2^23 + n is n.
    codes = tl.where(finite[:, None], rounded.to(tl.int32, bitcast=True), 0)
    scales = tl.where(finite, bits, _BF16_NAN_BITS)
    return codes.to(tl.int8), scales.to(tl.int16)


@triton.jit
def _to_rows(values, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 to ``dtype``, half to even, clamped to its largest finite value; NaN stays NaN."""
    values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's cast truncates.
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        rounded = tl.where(values == values, rounded, _BF16_NAN_BITS)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit(do_not_specialize=["host_slots", "device_slots", "tokens"])
def backup(
    arena,
    device,
    table,
    host_slots,
    device_slots,
    matrix,
    tokens,
    LAYERS: tl.constexpr,
    LAYER_INNER: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    SCALE_MIN_BITS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Encodes the rows ``device_slots`` of all layers into the records ``host_slots``.

    ``matrix`` is diag(signs) * H / DIM in the rows' dtype (exact: powers of two) where ROTATE.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if ROTATE:
        index = tl.arange(0, DIM)
        rotation = tl.load(matrix + index[:, None] * DIM + index[None, :])
    tiles = tl.cdiv(tokens * (2 * HEADS), ROWS)
    for item in range(tl.program_id(0), tiles * LAYERS, tl.num_programs(0)):
        if LAYER_INNER:
            layer = item % LAYERS
            tile = item // LAYERS
        else:
            layer = item // tiles
            tile = item % tiles
        host_slot = _load_slots(tile, tokens, host_slots, HEADS, ROWS)
        device_slot = _load_slots(tile, tokens, device_slots, HEADS, ROWS)
        live, rows_at, codes_at, scales_at = _locate(
            tile, tokens, _placement(table, layer), host_slot, device_slot,
            HEADS, DIM, ROWS, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE,
            SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE, DEVICE_ALIGN, CODE_ALIGN,
        )  # fmt: skip
        inside = live[:, None] & (column < DIM)
        values = tl.load((device + rows_at)[:, None] + column, mask=inside, other=0.0)
        if ROTATE:
            values = tl.dot(values.to(rotation.dtype), rotation)
        codes, scales = _quantise(values.to(tl.float32), SCALE_MIN_BITS)
        codes_ptr = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
        tl.store(codes_ptr[:, None] + column, codes, mask=inside)
        scales_ptr = (arena + scales_at).to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(scales_ptr, scales, mask=live)


@triton.jit
def _load_tile(
    item,
    tiles,
    arena,
    table,
    host_slot,
    device_slot,
    tokens,
    layer,
    layers,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
):
    """The records of a tile of a restore, and which rows they are; no row beyond the last item."""
    index, tile = _layer_and_tile(item, tiles, layers)
    live, rows_at, codes_at, scales_at = _locate(
        tile, tokens, _placement(table, layer + index), host_slot, device_slot,
        HEADS, DIM, ROWS, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE,
        SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE, DEVICE_ALIGN, CODE_ALIGN,
    )  # fmt: skip
    codes, bits = _load_record(arena, codes_at, scales_at, live, DIM, DIM_BLOCK)
    return live, rows_at, codes, bits


@triton.jit
def _layer_and_tile(item, tiles, layers):
    """Items are tiles, layer by layer; those beyond the last are tiles that have no rows."""
    index = tl.minimum(item // tl.maximum(tiles, 1), layers - 1)
    return index, item - index * tiles


@triton.jit(do_not_specialize=["host_slots", "device_slots", "tokens", "layer", "layers"])
def restore(
    arena,
    device,
    table,
    host_slots,
    device_slots,
    matrix,
    tokens,
    layer,
    layers,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Decodes the records ``host_slots`` of ``layers`` layers from ``layer`` on into the rows
    ``device_slots``.

    ``matrix`` is H * diag(signs) in the rows' dtype where ROTATE; a product with codes is a sum of
    whole numbers below 2^24, exact in any order.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if ROTATE:
        index = tl.arange(0, DIM)
        rotation = tl.load(matrix + index[:, None] * DIM + index[None, :])
    tiles = tl.cdiv(tokens * (2 * HEADS), ROWS)
    first, step = tl.program_id(0), tl.num_programs(0)

    # A tile's slots are read two tiles ahead of it, its records one.
    tile = _layer_and_tile(first, tiles, layers)[1]
    host_slot = _load_slots(tile, tokens, host_slots, HEADS, ROWS)
    device_slot = _load_slots(tile, tokens, device_slots, HEADS, ROWS)
    live, rows_at, codes, bits = _load_tile(
        first, tiles, arena, table, host_slot, device_slot, tokens, layer, layers,
        HEADS, DIM, DIM_BLOCK, ROWS, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE,
        SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE, DEVICE_ALIGN, CODE_ALIGN,
    )  # fmt: skip
    tile = _layer_and_tile(first + step, tiles, layers)[1]
    host_slot = _load_slots(tile, tokens, host_slots, HEADS, ROWS)
    device_slot = _load_slots(tile, tokens, device_slots, HEADS, ROWS)
    for item in range(first, tiles * layers, step):
        next_live, next_rows_at, next_codes, next_bits = _load_tile(
            item + step, tiles, arena, table, host_slot, device_slot, tokens, layer, layers,
            HEADS, DIM, DIM_BLOCK, ROWS, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE,
            SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE, DEVICE_ALIGN, CODE_ALIGN,
        )  # fmt: skip
        tile = _layer_and_tile(item + 2 * step, tiles, layers)[1]
        host_slot = _load_slots(tile, tokens, host_slots, HEADS, ROWS)
        device_slot = _load_slots(tile, tokens, device_slots, HEADS, ROWS)

        values = tl.dot(codes.to(rotation.dtype), rotation) if ROTATE else codes.to(tl.float32)
        scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        rows = _to_rows(values * scale[:, None], device.dtype.element_ty, LARGEST)
        at = (device + rows_at)[:, None] + column
        tl.store(at, rows, mask=live[:, None] & (column < DIM))
        live, rows_at, codes, bits = next_live, next_rows_at, next_codes, next_bits
