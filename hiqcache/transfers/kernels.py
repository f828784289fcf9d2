"""Triton kernels: rows to records and back, in one pass.

The arena is pinned host memory, or a ring of device memory behind which the copy engine works.

Both kernels walk *head rows*: (token, part, head) in that order, ``DIM`` elements each. There are
two parts, such as K and V, with heads and widths of their own; a tile is as wide as the wider. A
tile is ``ROWS`` of them, or as many whole tokens as ROWS hold; a token's records of both parts,
which lie next to each other in a page, are read or written together.

Where rows lie on the device comes from ``bases``, int64 ``[layers, 2]`` there, each part's buffer's
distance from the pointer ``device``, and from ``device_stride_0`` and ``_1`` between slots. Where
records lie in the arena comes from its planes (hiqcache.record): the offsets of the first rows, and
how far a layer is from the next. All of it is in bytes.

Rows past the last token are the last token's, loaded again and never stored, so that no load needs
a mask for them; rows that are no token's, where a token's rows do not divide ROWS, have one. Slots
are unsigned: the 64-bit product of one with a stride is one instruction, if the stride is no power
of two that is known when compiling.

What differs between the parts is chosen by row; where it does not, it is one constant, and the
machine code has nothing to choose.

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
def _rows_of_tile(HEADS_0: tl.constexpr, HEADS_1: tl.constexpr, ROWS: tl.constexpr):
    """Of each of a tile's rows: its token within the tile, its part (0 or 1), its head."""
    row = tl.arange(0, ROWS)
    token = row // (HEADS_0 + HEADS_1)
    if HEADS_0 == HEADS_1:
        return token, row // HEADS_0 % 2, row % HEADS_0
    else:  # noqa: RET505 - after a return, Triton would compile this too
        row = row % (HEADS_0 + HEADS_1)
        part = (row >= HEADS_0).to(tl.int32)
        return token, part, row - part * HEADS_0


@triton.jit
def _of_part(part, VALUE_0: tl.constexpr, VALUE_1: tl.constexpr):
    """A constant of each row's part."""
    if VALUE_0 == VALUE_1:
        return VALUE_0
    else:  # noqa: RET505
        return tl.where(part == 1, VALUE_1, VALUE_0)


@triton.jit
def _load_slots(tile, token, tokens, host_slots, device_slots, TOKENS: tl.constexpr):
    """The host and the device slot of each of a tile's rows. There are fewer than 2^31."""
    index = tl.minimum(tile * TOKENS + token, tokens - 1)
    host = tl.load(host_slots + index).to(tl.uint32)
    return host, tl.load(device_slots + index).to(tl.uint32)


@triton.jit
def _columns(part, DIM_0: tl.constexpr, DIM_1: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """The columns of a tile, and which of them are elements of a row."""
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if DIM_0 == DIM_1:
        return column, column < DIM_0
    else:  # noqa: RET505
        return column, column < _of_part(part, DIM_0, DIM_1)[:, None]


@triton.jit
def _within(token, inside, TOKENS: tl.constexpr, TOKEN_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """Which elements of a tile are some token's, whether it exists or not."""
    if TOKENS * TOKEN_ROWS != ROWS:
        inside &= (token < TOKENS)[:, None]
    return inside


@triton.jit
def _is_live(token, left, TOKENS: tl.constexpr, TOKEN_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """Which of a tile's rows are some token's, if ``left`` are to come, its own too."""
    live = token < left
    if TOKENS * TOKEN_ROWS != ROWS:
        live &= token < TOKENS
    return live


@triton.jit
def _layer_offsets(
    bases,
    layer,
    part,
    head,
    codes_0,
    codes_1,
    scales_0,
    scales_1,
    code_layer_stride,
    scale_layer_stride,
    DIM_0: tl.constexpr,
    DIM_1: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
):
    """Where slot 0 of each of a tile's rows lies in a layer: on the device, its codes, its scale.

    Codes are hinted before the head is added: for one head, that sum folds away and its hint too.
    """
    rows_0 = tl.load(bases + layer * 2)
    rows_1 = tl.load(bases + layer * 2 + 1)
    width = _of_part(part, DIM_0, DIM_1)
    rows = tl.where(part == 1, rows_1, rows_0) + head * (width * ELEMENT_BYTES)
    # A loop's counter is a Python int in the interpreter.
    codes = tl.where(part == 1, codes_1, codes_0) + code_layer_stride.to(tl.int64) * layer
    codes = tl.multiple_of(codes, [CODE_ALIGN]) + head * width
    scales = tl.where(part == 1, scales_1, scales_0) + scale_layer_stride.to(tl.int64) * layer
    return rows, codes, scales + head * 2


@triton.jit
def _row_stride(part, device_stride_0, device_stride_1, SAME_STRIDE: tl.constexpr):
    """Bytes between a row's slots on the device."""
    if SAME_STRIDE:
        return device_stride_0.to(tl.uint32).to(tl.int64)
    else:  # noqa: RET505
        return tl.where(part == 1, device_stride_1, device_stride_0).to(tl.uint32).to(tl.int64)


@triton.jit
def _row_pointers(device, rows_at, slot, row_stride, DEVICE_ALIGN: tl.constexpr):
    """Where the rows of ``slot`` lie, if those of slot 0 are at ``rows_at``."""
    rows_at += slot.to(tl.int64) * row_stride
    rows_at = tl.multiple_of(rows_at, [DEVICE_ALIGN])
    pointers = device.to(tl.pointer_type(tl.int8), bitcast=True) + rows_at
    return pointers.to(device.dtype, bitcast=True)


@triton.jit
def _slot_offset(slot, page_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """How far ``slot`` of a plane is from its slot 0, in bytes."""
    page = (slot // PAGE_SIZE).to(tl.int64)
    return page * page_stride + (slot % PAGE_SIZE).to(tl.int64) * slot_stride


@triton.jit
def _rotated(rows, rotation, part, DIM_0: tl.constexpr, DIM_1: tl.constexpr):
    """fp32 rows times ``rotation``, which is made for the wider part.

    Sylvester's matrices hold each other: the first columns of a narrow row's product are its own
    rotation, and the others repeat it, but for the division by the width.
    """
    values = tl.dot(rows.to(rotation.dtype), rotation)
    if DIM_0 < DIM_1:
        values *= tl.where(part == 1, 1.0, DIM_1 / DIM_0)[:, None]
    if DIM_0 > DIM_1:
        values *= tl.where(part == 1, DIM_0 / DIM_1, 1.0)[:, None]
    return values


@triton.jit
def _store_encoded(
    values,
    arena,
    codes_at,
    scales_at,
    live,
    column,
    inside,
    SCALE_MIN_BITS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Encodes fp32 [ROWS, DIM_BLOCK] and stores what is ``live`` at these offsets of the arena."""
    codes, scales = quantise(values, SCALE_MIN_BITS, ROTATE)
    codes_ptr = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
    tl.store(codes_ptr[:, None] + column, codes, mask=live[:, None] & inside)
    scales_ptr = (arena + scales_at).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(scales_ptr, scales, mask=live)


@triton.jit(
    do_not_specialize=[
        "host_slots", "device_slots", "tokens", "layer", "layers",
        "codes_0", "codes_1", "scales_0", "scales_1", "code_layer_stride", "scale_layer_stride",
        "device_stride_0", "device_stride_1",
    ]
)  # fmt: skip
def backup(
    # memory
    arena,
    device,
    bases,
    matrix,
    # where: in the arena, on the device
    codes_0,
    codes_1,
    scales_0,
    scales_1,
    code_layer_stride,
    scale_layer_stride,
    device_stride_0,
    device_stride_1,
    # what
    host_slots,
    device_slots,
    tokens,
    layer,
    layers,
    # rows
    HEADS_0: tl.constexpr,
    HEADS_1: tl.constexpr,
    DIM_0: tl.constexpr,
    DIM_1: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    SAME_STRIDE: tl.constexpr,
    # records
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE_0: tl.constexpr,
    CODE_PAGE_STRIDE_1: tl.constexpr,
    CODE_SLOT_STRIDE_0: tl.constexpr,
    CODE_SLOT_STRIDE_1: tl.constexpr,
    SCALE_PAGE_STRIDE_0: tl.constexpr,
    SCALE_PAGE_STRIDE_1: tl.constexpr,
    SCALE_SLOT_STRIDE_0: tl.constexpr,
    SCALE_SLOT_STRIDE_1: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    # codec and launch
    SCALE_MIN_BITS: tl.constexpr,
    ROTATE: tl.constexpr,
    LAYER_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Encodes the rows ``device_slots`` of ``layers`` layers from ``layer`` on into ``host_slots``.

    The grid's first axis shares out the tiles, its second the layers. LAYER_INNER: all layers of a
    tile, then the next, so that a page_first page is written whole; else all tiles of a layer.
    ``matrix`` is diag(signs) * H / DIM_BLOCK in the rows' dtype where ROTATE: powers of two, exact.
    """
    TOKEN_ROWS: tl.constexpr = HEADS_0 + HEADS_1
    TOKENS: tl.constexpr = ROWS // TOKEN_ROWS
    ELEMENT_BYTES: tl.constexpr = device.dtype.element_ty.primitive_bitwidth // 8
    if ROTATE:
        index = tl.arange(0, DIM_BLOCK)
        rotation = tl.load(matrix + index[:, None] * DIM_BLOCK + index[None, :])
    token, part, head = _rows_of_tile(HEADS_0, HEADS_1, ROWS)
    column, inside = _columns(part, DIM_0, DIM_1, DIM_BLOCK)
    within = _within(token, inside, TOKENS, TOKEN_ROWS, ROWS)
    width = _of_part(part, DIM_0, DIM_1)
    row_stride = _row_stride(part, device_stride_0, device_stride_1, SAME_STRIDE)
    code_page = _of_part(part, CODE_PAGE_STRIDE_0, CODE_PAGE_STRIDE_1)
    code_slot = _of_part(part, CODE_SLOT_STRIDE_0, CODE_SLOT_STRIDE_1)
    scale_page = _of_part(part, SCALE_PAGE_STRIDE_0, SCALE_PAGE_STRIDE_1)
    scale_slot = _of_part(part, SCALE_SLOT_STRIDE_0, SCALE_SLOT_STRIDE_1)
    tiles = tl.cdiv(tokens, TOKENS)
    step = tl.num_programs(0)
    end = layer + layers
    if LAYER_INNER:
        for tile in range(tl.program_id(0), tiles, step):
            host_slot, device_slot = _load_slots(
                tile, token, tokens, host_slots, device_slots, TOKENS
            )
            codes_at = _slot_offset(host_slot, code_page, code_slot, PAGE_SIZE)
            codes_at = tl.where(part == 1, codes_1, codes_0) + codes_at
            codes_at = tl.multiple_of(codes_at, [CODE_ALIGN]) + head * width
            scales_at = _slot_offset(host_slot, scale_page, scale_slot, PAGE_SIZE)
            scales_at += tl.where(part == 1, scales_1, scales_0) + head * 2
            live = _is_live(token, tokens - tile * TOKENS, TOKENS, TOKEN_ROWS, ROWS)
            first = layer + tl.program_id(1)
            for at in tl.range(first, end, tl.num_programs(1), num_stages=STAGES):
                # Rounds past the last layer copy nothing, but from an address, made of what lay in
                # shared memory: an aligned one at least.
                base = tl.load(bases + at * 2 + part) & -DEVICE_ALIGN
                base += head * (width * ELEMENT_BYTES)
                rows_ptr = _row_pointers(device, base, device_slot, row_stride, DEVICE_ALIGN)
                rows = tl.load(rows_ptr[:, None] + column, mask=within, other=0.0)
                if ROTATE:  # noqa: SIM108 - one line would be too long
                    values = _rotated(rows, rotation, part, DIM_0, DIM_1)
                else:
                    values = from_rows(rows)
                layer_codes = tl.multiple_of(code_layer_stride.to(tl.int64) * at, CODE_ALIGN)
                layer_scales = scale_layer_stride.to(tl.int64) * at
                _store_encoded(
                    values, arena, codes_at + layer_codes, scales_at + layer_scales, live,
                    column, inside, SCALE_MIN_BITS, ROTATE,
                )  # fmt: skip
    else:
        for at in range(layer + tl.program_id(1), end, tl.num_programs(1)):
            layer_rows, layer_codes, layer_scales = _layer_offsets(
                bases, at, part, head,
                codes_0, codes_1, scales_0, scales_1, code_layer_stride, scale_layer_stride,
                DIM_0, DIM_1, ELEMENT_BYTES, CODE_ALIGN,
            )  # fmt: skip
            left = tokens - tl.program_id(0) * TOKENS
            for tile in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
                host_slot, device_slot = _load_slots(
                    tile, token, tokens, host_slots, device_slots, TOKENS
                )
                rows_ptr = _row_pointers(device, layer_rows, device_slot, row_stride, DEVICE_ALIGN)
                rows = tl.load(rows_ptr[:, None] + column, mask=within, other=0.0)
                if ROTATE:  # noqa: SIM108 - one line would be too long
                    values = _rotated(rows, rotation, part, DIM_0, DIM_1)
                else:
                    values = from_rows(rows)
                codes_at = layer_codes + _slot_offset(host_slot, code_page, code_slot, PAGE_SIZE)
                scales_at = layer_scales + _slot_offset(
                    host_slot, scale_page, scale_slot, PAGE_SIZE
                )
                live = _is_live(token, left, TOKENS, TOKEN_ROWS, ROWS)
                left -= step * TOKENS
                _store_encoded(
                    values, arena, codes_at, scales_at, live,
                    column, inside, SCALE_MIN_BITS, ROTATE,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "host_slots", "device_slots", "tokens", "layer", "layers",
        "codes_0", "codes_1", "scales_0", "scales_1", "code_layer_stride", "scale_layer_stride",
        "device_stride_0", "device_stride_1",
    ]
)  # fmt: skip
def restore(
    # memory
    arena,
    device,
    bases,
    matrix,
    # where: in the arena, on the device
    codes_0,
    codes_1,
    scales_0,
    scales_1,
    code_layer_stride,
    scale_layer_stride,
    device_stride_0,
    device_stride_1,
    # what
    host_slots,
    device_slots,
    tokens,
    layer,
    layers,
    # rows
    HEADS_0: tl.constexpr,
    HEADS_1: tl.constexpr,
    DIM_0: tl.constexpr,
    DIM_1: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    DEVICE_ALIGN: tl.constexpr,
    SAME_STRIDE: tl.constexpr,
    # records
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE_0: tl.constexpr,
    CODE_PAGE_STRIDE_1: tl.constexpr,
    CODE_SLOT_STRIDE_0: tl.constexpr,
    CODE_SLOT_STRIDE_1: tl.constexpr,
    SCALE_PAGE_STRIDE_0: tl.constexpr,
    SCALE_PAGE_STRIDE_1: tl.constexpr,
    SCALE_SLOT_STRIDE_0: tl.constexpr,
    SCALE_SLOT_STRIDE_1: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    SCALES_ALIGNED: tl.constexpr,
    # codec and launch
    LARGEST: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Decodes records ``host_slots`` of ``layers`` layers from ``layer`` on into ``device_slots``.

    The grid's first axis shares out a layer's tiles, its second the layers. ``matrix`` is
    H * diag(signs) in the rows' dtype where ROTATE; a product with codes is a sum of whole numbers
    below 2^24, exact in any order. SCALES_ALIGNED: the scale of each even head begins a word.

    What depends on the layer alone is kept out of the inner loop, a division too.
    """
    TOKEN_ROWS: tl.constexpr = HEADS_0 + HEADS_1
    TOKENS: tl.constexpr = ROWS // TOKEN_ROWS
    ELEMENT_BYTES: tl.constexpr = device.dtype.element_ty.primitive_bitwidth // 8
    if ROTATE:
        index = tl.arange(0, DIM_BLOCK)
        rotation = tl.load(matrix + index[:, None] * DIM_BLOCK + index[None, :])
    token, part, head = _rows_of_tile(HEADS_0, HEADS_1, ROWS)
    column, inside = _columns(part, DIM_0, DIM_1, DIM_BLOCK)
    within = _within(token, inside, TOKENS, TOKEN_ROWS, ROWS)
    row_stride = _row_stride(part, device_stride_0, device_stride_1, SAME_STRIDE)
    code_page = _of_part(part, CODE_PAGE_STRIDE_0, CODE_PAGE_STRIDE_1)
    code_slot = _of_part(part, CODE_SLOT_STRIDE_0, CODE_SLOT_STRIDE_1)
    scale_page = _of_part(part, SCALE_PAGE_STRIDE_0, SCALE_PAGE_STRIDE_1)
    scale_slot = _of_part(part, SCALE_SLOT_STRIDE_0, SCALE_SLOT_STRIDE_1)
    tiles = tl.cdiv(tokens, TOKENS)
    step = tl.num_programs(0)
    for at in range(layer + tl.program_id(1), layer + layers, tl.num_programs(1)):
        layer_rows, layer_codes, layer_scales = _layer_offsets(
            bases, at, part, head,
            codes_0, codes_1, scales_0, scales_1, code_layer_stride, scale_layer_stride,
            DIM_0, DIM_1, ELEMENT_BYTES, CODE_ALIGN,
        )  # fmt: skip
        # Counted beside ``tile``, which the copies are ahead with: no value is kept for rounds.
        left = tokens - tl.program_id(0) * TOKENS
        for tile in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
            host_slot, device_slot = _load_slots(
                tile, token, tokens, host_slots, device_slots, TOKENS
            )
            codes_at = layer_codes + _slot_offset(host_slot, code_page, code_slot, PAGE_SIZE)
            codes_ptr = (arena + codes_at).to(tl.pointer_type(tl.int8), bitcast=True)
            codes = tl.load(codes_ptr[:, None] + column, mask=within, other=0)
            # A scale with its neighbour, of which bf16's bits are made fp32's.
            scales_at = layer_scales + _slot_offset(host_slot, scale_page, scale_slot, PAGE_SIZE)
            pair_at = tl.multiple_of(scales_at & -4, [4])
            pair = tl.load((arena + pair_at).to(tl.pointer_type(tl.int32), bitcast=True))
            is_first = head % 2 == 0 if SCALES_ALIGNED else scales_at & 2 == 0
            bits = tl.where(is_first, pair << 16, pair & -0x10000)
            scale = bits.to(tl.float32, bitcast=True)
            rows_ptr = _row_pointers(device, layer_rows, device_slot, row_stride, DEVICE_ALIGN)
            live = _is_live(token, left, TOKENS, TOKEN_ROWS, ROWS)
            left -= step * TOKENS
            values = tl.dot(codes.to(rotation.dtype), rotation) if ROTATE else to_float(codes)
            rows = to_rows(values * scale[:, None], device.dtype.element_ty, LARGEST)
            tl.store(rows_ptr[:, None] + column, rows, mask=live[:, None] & inside)
