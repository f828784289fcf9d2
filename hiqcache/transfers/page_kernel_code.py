"""Triton kernels of codec int4: whole pages to records and back, in one pass.

A tile is one page of one head of one part, K's heads first (hiqcache.transfers.page_tiles). Where
rows and records lie is said as in hiqcache.transfers.kernels; scales of K are a page's, so their
slots have no stride. Pages are whole: the first slot of each says which it is.

The kernels run under TRITON_INTERPRET=1 too, on CPU tensors.
"""

# Triton's kernels are not typed Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from hiqcache.transfers.page_tiles import (
    backup_keys,
    backup_values,
    restore_keys,
    restore_values,
)


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
    scale_layer_stride,  # noqa: ARG001 - a chunk is one piece: as codes'
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
    DEVICE_ALIGN: tl.constexpr,
    # records
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE_0: tl.constexpr,
    CODE_SLOT_STRIDE_0: tl.constexpr,
    CODE_SLOT_STRIDE_1: tl.constexpr,
    SCALE_SLOT_STRIDE_1: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    # codec
    STEP_MIN_BITS: tl.constexpr,
    SCALE_MIN_BITS: tl.constexpr,
):
    """Encodes the rows ``device_slots`` of ``layers`` layers from ``layer`` on into ``host_slots``.

    The grid's first axis shares out the tiles, its second the layers. ``matrix`` is
    diag(signs) * H / DIM_1 in the rows' dtype: powers of two, exact.
    """
    HEADS: tl.constexpr = HEADS_0 + HEADS_1
    ELEMENT_BYTES: tl.constexpr = device.dtype.element_ty.primitive_bitwidth // 8
    slot = tl.arange(0, PAGE_SIZE)
    tiles = tokens // PAGE_SIZE * HEADS
    for at in range(layer + tl.program_id(1), layer + layers, tl.num_programs(1)):
        of_layer = code_layer_stride.to(tl.int64) * at
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            first_token = tile // HEADS * PAGE_SIZE
            head = tile % HEADS
            page = (tl.load(host_slots + first_token) // PAGE_SIZE).to(tl.int64)
            in_arena = of_layer + page * CODE_PAGE_STRIDE_0
            device_slot = tl.load(device_slots + first_token + slot).to(tl.uint32)
            if head < HEADS_0:
                rows_at = tl.load(bases + at * 2) + head * (DIM_0 * ELEMENT_BYTES)
                backup_keys(
                    arena, device, device_slots, first_token, rows_at, device_stride_0,
                    device_slot, codes_0 + in_arena, scales_0 + in_arena, head,
                    HEADS_0, DIM_0, PAGE_SIZE, CODE_SLOT_STRIDE_0, DEVICE_ALIGN, CODE_ALIGN,
                    STEP_MIN_BITS, SCALE_MIN_BITS,
                )  # fmt: skip
            else:
                head -= HEADS_0
                rows_at = tl.load(bases + at * 2 + 1) + head * (DIM_1 * ELEMENT_BYTES)
                backup_values(
                    arena, device, matrix, rows_at, device_stride_1, device_slot,
                    codes_1 + in_arena, scales_1 + in_arena, head,
                    DIM_1, PAGE_SIZE, CODE_SLOT_STRIDE_1, DEVICE_ALIGN, CODE_ALIGN,
                    SCALE_SLOT_STRIDE_1, STEP_MIN_BITS,
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
    signs,
    # where: in the arena, on the device
    codes_0,
    codes_1,
    scales_0,
    scales_1,
    code_layer_stride,
    scale_layer_stride,  # noqa: ARG001 - a chunk is one piece: as codes'
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
    DEVICE_ALIGN: tl.constexpr,
    # records
    PAGE_SIZE: tl.constexpr,
    CODE_PAGE_STRIDE_0: tl.constexpr,
    CODE_SLOT_STRIDE_0: tl.constexpr,
    CODE_SLOT_STRIDE_1: tl.constexpr,
    SCALE_SLOT_STRIDE_1: tl.constexpr,
    CODE_ALIGN: tl.constexpr,
    # codec
    LARGEST: tl.constexpr,
):
    """Decodes records ``host_slots`` of ``layers`` layers from ``layer`` on into ``device_slots``.

    ``matrix`` is H in the rows' dtype, ``signs`` fp32.
    """
    HEADS: tl.constexpr = HEADS_0 + HEADS_1
    ELEMENT_BYTES: tl.constexpr = device.dtype.element_ty.primitive_bitwidth // 8
    slot = tl.arange(0, PAGE_SIZE)
    tiles = tokens // PAGE_SIZE * HEADS
    for at in range(layer + tl.program_id(1), layer + layers, tl.num_programs(1)):
        of_layer = code_layer_stride.to(tl.int64) * at
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            first_token = tile // HEADS * PAGE_SIZE
            head = tile % HEADS
            page = (tl.load(host_slots + first_token) // PAGE_SIZE).to(tl.int64)
            in_arena = of_layer + page * CODE_PAGE_STRIDE_0
            device_slot = tl.load(device_slots + first_token + slot).to(tl.uint32)
            if head < HEADS_0:
                rows_at = tl.load(bases + at * 2) + head * (DIM_0 * ELEMENT_BYTES)
                restore_keys(
                    arena, device, device_slots, first_token, rows_at, device_stride_0,
                    device_slot, codes_0 + in_arena, scales_0 + in_arena, head,
                    HEADS_0, DIM_0, PAGE_SIZE, CODE_SLOT_STRIDE_0, DEVICE_ALIGN, CODE_ALIGN,
                    LARGEST,
                )  # fmt: skip
            else:
                head -= HEADS_0
                rows_at = tl.load(bases + at * 2 + 1) + head * (DIM_1 * ELEMENT_BYTES)
                restore_values(
                    arena, device, matrix, signs, rows_at, device_stride_1, device_slot,
                    codes_1 + in_arena, scales_1 + in_arena, head,
                    DIM_1, PAGE_SIZE, CODE_SLOT_STRIDE_1, DEVICE_ALIGN, CODE_ALIGN,
                    SCALE_SLOT_STRIDE_1, LARGEST,
                )  # fmt: skip
