"""Triton kernels of the fused transfer: rows to host records and back, in one pass.

Both kernels walk *head rows*: (token, K|V, head) in that order, ``DIM`` elements each. A tile is
``ROWS`` of them, or as many whole tokens as ROWS hold; a token's K and V records, which lie next to
each other in a page, are read or written together.

Where rows lie on the device comes from ``bases``, int64 ``[layers, 2]`` there, each K and V
buffer's distance from the pointer ``device``, and from ``device_stride`` between slots. Where
records lie in the arena comes from its planes (hiqcache.record): the offsets of the first rows, and
how far a layer is from the next. All of it is in bytes.

Rows past the last token are the last token's, loaded again and never stored, so that no load needs
a mask for them; rows that are no token's, where 2 * HEADS does not divide ROWS, have one. Slots are
unsigned: the 64-bit product of one with a stride is one instruction, if the stride is no power of
two that is known when compiling.

The kernels run under TRITON_INTERPRET=1 too, on CPU tensors.

With STAGES above one, an inner loop reads through asynchronous copies into shared memory, rounds
ahead, which Triton makes of its loads of four bytes or more; any other load would wait in every
round.
"""

# Triton's kernels are not typed Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from hiqcache.transfers.kernel_codec import from_rows, quantise, to_float, to_rows

#: Whether the kernels below were defined for Triton's interpreter.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _rows_of_tile(HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Of each of a tile's rows: its token within the tile, 1 if it is of V, its head."""
    row = tl.arange(0, ROWS)
    return row // (2 * HEADS), row // HEADS % 2, row % HEADS


@triton.jit
def _load_slots(tile, token, tokens, host_slots, device_slots, TOKENS: tl.constexpr):
    """The host and the device slot of each of a tile's rows. There are fewer than 2^31."""
    index = tl.minimum(tile * TOKENS + token, tokens - 1)
    host = tl.load(host_slots + index).to(tl.uint32)
    return host, tl.load(device_slots + index).to(tl.uint32)


@triton.jit
def _within(
    token, column, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Which elements of a tile are some token's, whether it exists or not."""
    within = column < DIM
    if TOKENS * 2 * HEADS != ROWS:
        within &= (token < TOKENS)[:, None]
    return within


@triton.jit
def _is_live(token, left, TOKENS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Which of a tile's rows are some token's, if ``left`` are to come, its own too."""
    live = token < left
    if TOKENS * 2 * HEADS != ROWS:
        live &= token < TOKENS
    return live


@triton.jit
def _layer_offsets(
    bases,
    layer,
    is_v,
    head,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    code_layer_stride,
    scale_layer_stride,
    DIM: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
):
    """Where slot 0 of each of a tile's rows lies in a layer: on the device, its codes, its scale.

    Codes are hinted before the head is added: for one head, that sum folds away and its hint too.
    """
    k_rows = tl.load(bases + layer * 2)
    v_rows = tl.load(bases + layer * 2 + 1)
    rows = tl.where(is_v == 1, v_rows, k_rows) + head * (DIM * ELEMENT_BYTES)
    # A loop's counter is a Python int in the interpreter.
    codes = tl.where(is_v == 1, v_codes, k_codes) + code_layer_stride.to(tl.int64) * layer
    codes = tl.multiple_of(codes, [CODE_ALIGN]) + head * DIM
    scales = tl.where(is_v == 1, v_scales, k_scales) + scale_layer_stride.to(tl.int64) * layer
    return rows, codes, scales + head * 2


@triton.jit
def _row_pointers(device, rows_at, slot, device_stride, DEVICE_ALIGN: tl.constexpr):
    """Where the rows of ``slot`` lie, if those of slot 0 are at ``rows_at``."""
    rows_at += slot.to(tl.int64) * device_stride.to(tl.uint32).to(tl.int64)
    rows_at = tl.multiple_of(rows_at, [DEVICE_ALIGN])
    pointers = device.to(tl.pointer_type(tl.int8), bitcast=True) + rows_at
    return pointers.to(device.dtype, bitcast=True)


@triton.jit
def _slot_offset(
    slot, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr
):
    """How far ``slot`` of a plane is from its slot 0, in bytes."""
    page = (slot // PAGE_SIZE).to(tl.int64)
    return page * PAGE_STRIDE + (slot % PAGE_SIZE).to(tl.int64) * SLOT_STRIDE


@triton.jit
def _store_encoded(
    values,
    arena,
    codes_at,
    scales_at,
    live,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SCALE_MIN_BITS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Encodes fp32 [ROWS, DIM_BLOCK] and stores what is ``live`` at these offsets of the arena."""
    column = tl.arange(0, DIM_BLOCK)[None, :]
    codes, scales = quantise(values, SCALE_MIN_BITS, ROTATE)
    codes_ptr = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
    tl.store(codes_ptr[:, None] + column, codes, mask=live[:, None] & (column < DIM))
    scales_ptr = (arena + scales_at).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(scales_ptr, scales, mask=live)


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
    STAGES: tl.constexpr,
):
    """Encodes the rows ``device_slots`` of all layers into the records ``host_slots``.

    The grid's first axis shares out the tiles, its second the layers. LAYER_INNER: all layers of a
    tile, then the next, so that a page_first page is written whole; else all tiles of a layer.
    ``matrix`` is diag(signs) * H / DIM in the rows' dtype (exact: powers of two) where ROTATE.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if ROTATE:
        index = tl.arange(0, DIM)
        rotation = tl.load(matrix + index[:, None] * DIM + index[None, :])
    token, is_v, head = _rows_of_tile(HEADS, ROWS)
    TOKENS: tl.constexpr = ROWS // (2 * HEADS)
    ELEMENT_BYTES: tl.constexpr = device.dtype.element_ty.primitive_bitwidth // 8
    within = _within(token, column, TOKENS, HEADS, DIM, ROWS)
    tiles = tl.cdiv(tokens, TOKENS)
    step = tl.num_programs(0)
    if LAYER_INNER:
        for tile in range(tl.program_id(0), tiles, step):
            host_slot, device_slot = _load_slots(
                tile, token, tokens, host_slots, device_slots, TOKENS
            )
            code_slot = _slot_offset(host_slot, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE)
            code_slot = tl.where(is_v == 1, v_codes, k_codes) + code_slot
            code_slot = tl.multiple_of(code_slot, [CODE_ALIGN]) + head * DIM
            scale_slot = _slot_offset(host_slot, PAGE_SIZE, SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE)
            scale_slot += tl.where(is_v == 1, v_scales, k_scales) + head * 2
            live = _is_live(token, tokens - tile * TOKENS, TOKENS, HEADS, ROWS)
            for at in tl.range(tl.program_id(1), LAYERS, tl.num_programs(1), num_stages=STAGES):
                # Rounds past the last layer copy nothing, but from an address, made of what lay in
                # shared memory: an aligned one at least.
                base = tl.load(bases + at * 2 + is_v) & -DEVICE_ALIGN
                base += head * (DIM * ELEMENT_BYTES)
                rows_ptr = _row_pointers(device, base, device_slot, device_stride, DEVICE_ALIGN)
                rows = tl.load(rows_ptr[:, None] + column, mask=within, other=0.0)
                values = tl.dot(rows.to(rotation.dtype), rotation) if ROTATE else from_rows(rows)
                layer_codes = tl.multiple_of(code_layer_stride.to(tl.int64) * at, CODE_ALIGN)
                layer_scales = scale_layer_stride.to(tl.int64) * at
                _store_encoded(
                    values, arena, code_slot + layer_codes, scale_slot + layer_scales, live,
                    DIM, DIM_BLOCK, SCALE_MIN_BITS, ROTATE,
                )  # fmt: skip
    else:
        for at in range(tl.program_id(1), LAYERS, tl.num_programs(1)):
            layer_rows, layer_codes, layer_scales = _layer_offsets(
                bases, at, is_v, head,
                k_codes, v_codes, k_scales, v_scales, code_layer_stride, scale_layer_stride,
                DIM, ELEMENT_BYTES, CODE_ALIGN,
            )  # fmt: skip
            left = tokens - tl.program_id(0) * TOKENS
            for tile in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
                host_slot, device_slot = _load_slots(
                    tile, token, tokens, host_slots, device_slots, TOKENS
                )
                rows_ptr = _row_pointers(
                    device, layer_rows, device_slot, device_stride, DEVICE_ALIGN
                )
                rows = tl.load(rows_ptr[:, None] + column, mask=within, other=0.0)
                values = tl.dot(rows.to(rotation.dtype), rotation) if ROTATE else from_rows(rows)
                code_slot = _slot_offset(host_slot, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE)
                scale_slot = _slot_offset(
                    host_slot, PAGE_SIZE, SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE
                )
                live = _is_live(token, left, TOKENS, HEADS, ROWS)
                left -= step * TOKENS
                _store_encoded(
                    values, arena, layer_codes + code_slot, layer_scales + scale_slot, live,
                    DIM, DIM_BLOCK, SCALE_MIN_BITS, ROTATE,
                )  # fmt: skip


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

    The grid's first axis shares out a layer's tiles, its second the layers. ``matrix`` is
    H * diag(signs) in the rows' dtype where ROTATE; a product with codes is a sum of whole numbers
    below 2^24, exact in any order.

    What depends on the layer alone is kept out of the inner loop, a division too.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if ROTATE:
        inner = tl.arange(0, DIM)
        rotation = tl.load(matrix + inner[:, None] * DIM + inner[None, :])
    token, is_v, head = _rows_of_tile(HEADS, ROWS)
    TOKENS: tl.constexpr = ROWS // (2 * HEADS)
    ELEMENT_BYTES: tl.constexpr = device.dtype.element_ty.primitive_bitwidth // 8
    within = _within(token, column, TOKENS, HEADS, DIM, ROWS)
    tiles = tl.cdiv(tokens, TOKENS)
    step = tl.num_programs(0)
    for at in range(layer + tl.program_id(1), layer + layers, tl.num_programs(1)):
        layer_rows, layer_codes, layer_scales = _layer_offsets(
            bases, at, is_v, head,
            k_codes, v_codes, k_scales, v_scales, code_layer_stride, scale_layer_stride,
            DIM, ELEMENT_BYTES, CODE_ALIGN,
        )  # fmt: skip
        # Counted beside ``tile``, which the copies are ahead with: no value is kept for rounds.
        left = tokens - tl.program_id(0) * TOKENS
        for tile in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
            host_slot, device_slot = _load_slots(
                tile, token, tokens, host_slots, device_slots, TOKENS
            )
            codes_at = layer_codes + _slot_offset(
                host_slot, PAGE_SIZE, CODE_PAGE_STRIDE, CODE_SLOT_STRIDE
            )
            codes_ptr = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
            codes = tl.load(codes_ptr[:, None] + column, mask=within, other=0)
            # A scale with its neighbour, of which bf16's bits are made fp32's.
            scales_at = layer_scales + _slot_offset(
                host_slot, PAGE_SIZE, SCALE_PAGE_STRIDE, SCALE_SLOT_STRIDE
            )
            pair_at = tl.multiple_of(scales_at & -4, [4])
            pair = tl.load((arena + pair_at).to(tl.pointer_type(tl.int32), bitcast=True))
            # Of an even number of heads, the first one's scale begins a word in every record.
            is_first = head % 2 == 0 if HEADS % 2 == 0 else scales_at & 2 == 0
            bits = tl.where(is_first, pair << 16, pair & -0x10000)
            scale = bits.to(tl.float32, bitcast=True)
            rows_ptr = _row_pointers(device, layer_rows, device_slot, device_stride, DEVICE_ALIGN)
            live = _is_live(token, left, TOKENS, HEADS, ROWS)
            left -= step * TOKENS
            values = tl.dot(codes.to(rotation.dtype), rotation) if ROTATE else to_float(codes)
            rows = to_rows(values * scale[:, None], device.dtype.element_ty, LARGEST)
            inside = live[:, None] & (column < DIM)
            tl.store(rows_ptr[:, None] + column, rows, mask=inside)
