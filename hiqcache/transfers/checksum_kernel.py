"""Sums of records by a kernel that reads host memory, for CheckedTransfer."""

# Triton's kernels are not typed Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hiqcache.record import Plane
from hiqcache.transfers.base import Arena


@triton.jit(do_not_specialize=["tokens", "place", "layer"])
def _add_sums(
    sums,
    buffer,
    slots,
    tokens,
    page_size,
    base,
    page_stride,
    layer_stride,
    slot_stride,
    row_bytes,
    place,
    layer,
    WEIGHT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds one row's bytes, each times the weight of its place in the record."""
    token = tl.program_id(0)
    index = tl.program_id(1)
    slot = tl.load(slots + token)
    row = buffer + base + slot // page_size * page_stride + slot % page_size * slot_stride
    row += (layer + index).to(tl.int64) * layer_stride
    total = tl.zeros((1,), tl.int64)
    for start in range(0, row_bytes, BLOCK):
        byte = start + tl.arange(0, BLOCK)
        # Past all caches: the copy engine may have written since this was last read.
        value = tl.load(row + byte, mask=byte < row_bytes, other=0, volatile=True).to(tl.int64)
        weight = ((place + byte).to(tl.int64) * WEIGHT & MASK) | 1
        total += tl.sum(value * weight)
    out = sums + index * tokens + token + tl.arange(0, 1)
    tl.store(out, tl.load(out) + total)


def add_sums(
    sums: torch.Tensor,
    arena: Arena,
    plane: Plane,
    place: int,
    weight: int,
    mask: int,
    slots: torch.Tensor,
    layer: int,
) -> None:
    """Add to ``sums`` (int64 ``[layers, tokens]``) those of ``plane``'s rows at ``slots``.

    ``place``: where the rows begin in a record, of which byte n counts ``n * weight & mask | 1``
    times. ``layer``: the first of the layers. Enqueued on the current stream.
    """
    layers, tokens = sums.shape
    if not tokens:
        return
    block = min(1024, max(16, triton.next_power_of_2(plane.row_bytes)))
    _add_sums[(tokens, layers)](
        *(sums, arena.buffer, slots, tokens, arena.layout.page_size, plane.base),
        *(plane.page_stride, plane.layer_stride, plane.slot_stride, plane.row_bytes),
        *(place, layer, weight, mask, block),
    )
