"""Triton kernels of the fused transfer: rows to host records and back, in one pass.

Both kernels walk *head rows*: (token, K|V, head) in that order, ``DIM`` elements each. A tile is
``ROWS`` of them, or as many whole tokens as ROWS hold; a token's K and V records, which lie next to
each other in a page, are read or written together.

Where rows lie on the device comes from ``bases``, int64 ``[layers, 2]`` there, each K and V
buffer's distance from the pointer ``device``, and from ``device_stride`` between slots, both in
elements. Where records lie in the arena comes from its planes (hiqcache.record): the offsets of the
first rows, and how far a layer is from the next, in bytes.

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
def _rows_of_tile(HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Of each of a tile's rows: its token within the tile, 1 if it is of V, its head."""
    row = tl.arange(0, ROWS)
    return row // (2 * HEADS), row // HEADS % 2, row % HEADS


@triton.jit
def _live(tile, token, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Which of a tile's rows exist; the rows' index in the slots."""
    TOKENS: tl.constexpr = ROWS // (2 * HEADS)
    index = tile * TOKENS + token
    live = index < tokens
    if TOKENS * 2 * HEADS != ROWS:
        live &= token < TOKENS
    return live, index


@triton.jit
def _load_slots(
    tile, token, tokens, host_slots, device_slots, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    """The host and the device slot of each of a tile's rows; 0 where there is none."""
    live, index = _live(tile, token, tokens, HEADS, ROWS)
    host = tl.load(host_slots + index, mask=live, other=0)
    device = tl.load(device_slots + index, mask=live, other=0)
    # Half the registers; there are fewer than 2^31.
    return host.to(tl.int32), device.to(tl.int32)


@triton.jit
def _record_offsets(
    layer,
    is_v,
    head,
    slot,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    code_layer_stride,
    scale_layer_stride,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE: tl.constexpr,
    CODE_SLOT_STRIDE: tl.constexpr,
    SCALE_PAGE_STRIDE: tl.constexpr,
    SCALE_SLOT_STRIDE: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
):
    """Where the codes and the scale of each row lie in the arena."""
    page = (slot // PAGE_SIZE).to(tl.int64)
    in_page = slot % PAGE_SIZE
    layer = layer.to(tl.int64)
    codes = tl.where(is_v == 1, v_codes, k_codes) + layer * code_layer_stride
    codes += page * CODE_PAGE_STRIDE + in_page * CODE_SLOT_STRIDE + head * DIM
    codes = tl.multiple_of(codes, [CODE_ALIGN])
    scales = tl.where(is_v == 1, v_scales, k_scales) + layer * scale_layer_stride
    scales += page * SCALE_PAGE_STRIDE + in_page * SCALE_SLOT_STRIDE + head * 2
    return codes, scales


@triton.jit
def _row_offsets(
    bases,
    layer,
    is_v,
    head,
    slot,
    live,
    device_stride,
    DIM: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
):
    """Where each row lies on the device."""
    base = tl.load(bases + layer * 2 + is_v, mask=live, other=0)
    # Hinted before the head is added: for one head, that sum folds away and its hint with it.
    return tl.multiple_of(base + slot.to(tl.int64) * device_stride, [DEVICE_ALIGN]) + head * DIM


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


@triton.jit(
    do_not_specialize=[
        "host_slots", "device_slots", "tokens",
        "k_codes", "v_codes", "k_scales", "v_scales", "code_layer_stride", "scale_layer_stride",
        "device_stride",
    ]
)  # fmt: skip
def backup(
    arena,
    device,
    bases,
    matrix,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    code_layer_stride,
    scale_layer_stride,
    device_stride,
    host_slots,
    device_slots,
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
    token, is_v, head = _rows_of_tile(HEADS, ROWS)
    TOKENS: tl.constexpr = ROWS // (2 * HEADS)
    tiles = tl.cdiv(tokens, TOKENS)
    for item in range(tl.program_id(0), tiles * LAYERS, tl.num_programs(0)):
        if LAYER_INNER:
            layer = item % LAYERS
            tile = item // LAYERS
        else:
            layer = item // tiles
            tile = item % tiles
        live = _live(tile, token, tokens, HEADS, ROWS)[0]
        host_slot, device_slot = _load_slots(
            tile, token, tokens, host_slots, device_slots, HEADS, ROWS
        )
        rows_at = _row_offsets(
            bases, layer, is_v, head, device_slot, live, device_stride, DIM, DEVICE_ALIGN
        )
        codes_at, scales_at = _record_offsets(
            layer, is_v, head, host_slot,
            k_codes, v_codes, k_scales, v_scales, code_layer_stride, scale_layer_stride,
            DIM, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE, SCALE_PAGE_STRIDE,
            SCALE_SLOT_STRIDE, CODE_ALIGN,
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


@triton.jit(
    do_not_specialize=[
        "host_slots", "device_slots", "tokens", "layer", "layers",
        "k_codes", "v_codes", "k_scales", "v_scales", "code_layer_stride", "scale_layer_stride",
        "device_stride",
    ]
)  # fmt: skip
def restore(
    arena,
    device,
    bases,
    matrix,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    code_layer_stride,
    scale_layer_stride,
    device_stride,
    host_slots,
    device_slots,
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
    STAGES: tl.constexpr,
):
    """Decodes records ``host_slots`` of ``layers`` layers from ``layer`` on into ``device_slots``.

    ``matrix`` is H * diag(signs) in the rows' dtype where ROTATE; a product with codes is a sum of
    whole numbers below 2^24, exact in any order.

    Triton makes of the loop's loads asynchronous copies into shared memory, rounds ahead by STAGES;
    a load of less than four bytes would not be one, and would wait for PCIe in every round.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if ROTATE:
        index = tl.arange(0, DIM)
        rotation = tl.load(matrix + index[:, None] * DIM + index[None, :])
    token, is_v, head = _rows_of_tile(HEADS, ROWS)
    TOKENS: tl.constexpr = ROWS // (2 * HEADS)
    tiles = tl.cdiv(tokens, TOKENS)
    for item in tl.range(tl.program_id(0), tiles * layers, tl.num_programs(0), num_stages=STAGES):
        at = layer + item // tiles
        tile = item % tiles
        live = _live(tile, token, tokens, HEADS, ROWS)[0]
        inside = live[:, None] & (column < DIM)
        host_slot, device_slot = _load_slots(
            tile, token, tokens, host_slots, device_slots, HEADS, ROWS
        )
        codes_at, scales_at = _record_offsets(
            at, is_v, head, host_slot,
            k_codes, v_codes, k_scales, v_scales, code_layer_stride, scale_layer_stride,
            DIM, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE, SCALE_PAGE_STRIDE,
            SCALE_SLOT_STRIDE, CODE_ALIGN,
        )  # fmt: skip
        codes_ptr = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
        codes = tl.load(codes_ptr[:, None] + column, mask=inside, other=0)
        # A scale with its neighbour, of which bf16's bits are made fp32's.
        pair_at = tl.multiple_of(scales_at & -4, [4])
        pair_ptr = (arena + pair_at).to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.load(pair_ptr, mask=live, other=0)
        bits = tl.where((scales_at & 2) == 0, pair << 16, pair & -0x10000)
        scale = bits.to(tl.float32, bitcast=True)
        rows_at = _row_offsets(
            bases, at, is_v, head, device_slot, live, device_stride, DIM, DEVICE_ALIGN
        )
        values = tl.dot(codes.to(rotation.dtype), rotation) if ROTATE else codes.to(tl.float32)
        rows = _to_rows(values * scale[:, None], device.dtype.element_ty, LARGEST)
        tl.store((device + rows_at)[:, None] + column, rows, mask=inside)
