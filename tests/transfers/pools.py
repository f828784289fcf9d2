"""A pool for the tests of transfers: device buffers and an arena, and the same on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hiqcache.codecs import get_codec
from hiqcache.codecs.base import Codec
from hiqcache.record import Format, Order, Part, RecordLayout
from hiqcache.transfers.base import Arena, Transfer
from hiqcache.transfers.fused import FusedTransfer
from hiqcache.transfers.torch import TorchTransfer

#: What untouched arena bytes hold.
POISON = 0xAB


@dataclass(frozen=True)
class Shape:
    """The geometry of a pool. ``row_stride`` is the slot stride of device buffers, in rows."""

    codec: str = "int8"
    layers: int = 2
    heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 1
    order: Order = "page_first"
    format: Format = "packed"
    host_slots: int = 64
    device_slots: int = 48
    row_stride: int = 1
    #: The second part's, where they differ from the first's.
    heads_1: int | None = None
    dim_1: int | None = None
    #: Whether both parts are views of one buffer, as MLA's are.
    joint: bool = False

    @property
    def parts(self) -> tuple[Part, Part]:
        first = Part("k", self.heads, self.dim)
        return first, Part("v", self.heads_1 or self.heads, self.dim_1 or self.dim)

    @property
    def layout(self) -> RecordLayout:
        rows = get_codec(self.codec).row_formats(self.parts)
        return RecordLayout(self.layers, self.page_size, rows, self.order, self.format)

    def but(self, **changes: object) -> Shape:
        return replace(self, **changes)  # type: ignore[arg-type]


Buffers = tuple[list[torch.Tensor], list[torch.Tensor]]


class Pool:
    """Device buffers filled with NaN, and a poisoned arena, on ``device``."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.codec: Codec = get_codec(shape.codec)
        pages = shape.host_slots // shape.page_size
        layout = shape.layout
        self.arena = Arena(
            torch.full(
                (layout.arena_bytes(pages),),
                POISON,
                dtype=torch.uint8,
                pin_memory=device.type == "cuda",
            ),
            layout,
            pages,
        )
        self.k, self.v = self._joint() if shape.joint else map(self._buffers, shape.parts)

    def _buffers(self, part: Part) -> list[torch.Tensor]:
        shape = self.shape
        size = (shape.device_slots, shape.row_stride, part.heads, part.width)
        return [
            torch.full(size, torch.nan, device=self.device).to(shape.dtype)[:, 0]
            for _ in range(shape.layers)
        ]

    def _joint(self) -> Buffers:
        shape, (first, second) = self.shape, self.shape.parts
        widths = first.heads * first.width, second.heads * second.width
        wholes = [
            torch.full(
                (shape.device_slots, sum(widths)), torch.nan, dtype=shape.dtype, device=self.device
            ).split(widths, dim=1)
            for _ in range(shape.layers)
        ]
        return (
            [both[0].unflatten(1, (first.heads, first.width)) for both in wholes],
            [_as_sglang(both[1].unflatten(1, (second.heads, second.width))) for both in wholes],
        )

    def fill(self, seed: int = 0) -> Pool:
        """Random rows, with rows of all that is awkward among them."""
        for index, buffer in enumerate((*self.k, *self.v)):
            heads, dim = buffer.shape[1:]
            buffer.copy_(awkward_rows(self.shape.but(heads=heads, dim=dim), seed + index))
        return self

    def reference(self) -> tuple[TorchTransfer, Pool]:
        """A copy of this pool on the CPU, and the torch transfer on it."""
        copy = Pool(self.shape, torch.device("cpu"))
        copy.arena.buffer.copy_(self.arena.buffer)
        for mine, theirs in zip((*self.k, *self.v), (*copy.k, *copy.v), strict=True):
            theirs.copy_(mine)
        return TorchTransfer(copy.codec, copy.arena, (copy.k, copy.v)), copy

    def restore_all(self, transfer: Transfer, host: torch.Tensor, device: torch.Tensor) -> None:
        for layer in range(self.shape.layers):
            transfer.restore(layer, host, device)

    def rows(self) -> torch.Tensor:
        """All device rows on the CPU: ``[2, layers, slots, heads, head_dim]``.

        Of parts that differ: ``[1, layers, slots, elements]``, both parts' elements. FP8 as bf16.
        """
        wide = torch.bfloat16 if self.shape.dtype.itemsize == 1 else self.shape.dtype
        first, second = (
            torch.stack([rows.to(wide) for rows in part]).cpu() for part in (self.k, self.v)
        )
        if first.shape == second.shape:
            return torch.stack([first, second])
        return torch.cat([first.flatten(2), second.flatten(2)], dim=-1)[None]

    def indices(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device slots of ``tokens`` tokens in random order, on the pool's device."""
        random = torch.Generator().manual_seed(seed)
        host = torch.randperm(self.shape.host_slots, generator=random)[:tokens]
        rows = torch.randperm(self.shape.device_slots, generator=random)[:tokens]
        return host.to(self.device), rows.to(self.device)


def _as_sglang(rows: torch.Tensor) -> torch.Tensor:
    """With the stride that one head's axis has where a wider row was cut along its last axis."""
    if rows.shape[1] > 1:
        return rows
    return rows.as_strided(rows.shape, (rows.stride(0), rows.stride(0), 1))


def fused(pool: Pool, **launches: Any) -> FusedTransfer:
    """The fused transfer of ``pool``; ``launches`` as FusedTransfer takes them."""
    return FusedTransfer(pool.codec, pool.arena, (pool.k, pool.v), **launches)


def awkward_rows(shape: Shape, seed: int) -> torch.Tensor:
    """``[device_slots, heads, head_dim]``: one head each of awkward values, the rest random."""
    random = torch.Generator().manual_seed(seed)
    info = torch.finfo(shape.dtype)
    rows = torch.randn(shape.device_slots, shape.heads, shape.dim, generator=random)
    # As bits: torch indexes no fp8.
    raw = {1: torch.int8, 2: torch.int16}[shape.dtype.itemsize]
    flat = rows.to(shape.dtype).view(raw).view(-1, shape.dim)
    order = iter(torch.randperm(len(flat), generator=random).tolist())
    ramp = torch.linspace(-1, 1, shape.dim)
    for values in (
        torch.zeros(shape.dim),
        -torch.zeros(shape.dim),
        ramp * info.max,
        ramp * info.tiny,
        ramp * info.smallest_normal * info.eps * 4,
        ramp.sign() * info.max,
        torch.full((shape.dim,), 1.0),
        torch.randint(-127, 128, (shape.dim,), generator=random) + 0.5,  # ties at scale 1
    ):
        flat[next(order)] = values.to(shape.dtype).view(raw)
    for value in (torch.nan, torch.inf, -torch.inf):
        place = int(torch.randint(shape.dim, (), generator=random))
        flat[next(order), place] = torch.tensor(value).to(shape.dtype).view(raw)
    # An outlier.
    flat[next(order), 0] = torch.tensor(min(1e4, info.max)).to(shape.dtype).view(raw)
    bits = torch.iinfo(raw)
    flat[next(order)] = torch.randint(
        bits.min, bits.max + 1, (shape.dim,), generator=random, dtype=raw
    )
    return flat.view(rows.shape).view(shape.dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, but for the payload of a NaN, which rounding does not define."""
    left, right = left.cpu(), right.cpu()
    nan = left.isnan() & right.isnan()
    return bool(((left.view(torch.int16) == right.view(torch.int16)) | nan).all())
