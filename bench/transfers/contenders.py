"""Who is timed: SGLang's own pool and each of ours, over the same device rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from bench.lab.shapes import QWEN3_8B
from bench.transfers.indices import Indices, Slots, index_sets
from hiqcache.codecs import get_codec
from hiqcache.record import Format, Order, RecordLayout, format_of, kv_parts, tokens_in_gigabytes
from hiqcache.transfers.base import Arena, Transfer

LAYERS = QWEN3_8B.layers
HEADS, HEAD_DIM = QWEN3_8B.parts[0].heads, QWEN3_8B.parts[0].width
#: Bytes of a token's rows on the device.
ROW_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2
#: Rows of the device pool: twice the largest transfer.
DEVICE_SLOTS = 16_384
#: --hicache-size, decimal GB. To pin more takes longer than to measure.
POOL_GB = 4


class Mover(Protocol):
    """What is timed: a Transfer, or SGLang's own pool behind the same calls."""

    @property
    def staging_bytes(self) -> int: ...
    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None: ...
    def restore(
        self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None: ...


class Contender(NamedTuple):
    """One way to keep rows, with a host pool of ``slots`` tokens in pages of ``page``."""

    codec: str
    transfer: str
    mover: Mover
    bytes_per_token: int
    slots: int
    page: int = 1
    #: Directions whose host slots come on the CPU, as a server hands them over.
    cpu_slots: tuple[str, ...] = ()
    #: What SGLang's own pool moves rows with, by direction; empty for ours.
    kernels: Mapping[str, str] = MappingProxyType({})
    layers: int = LAYERS

    def indices(self, tokens: int, slots: Slots) -> list[Indices]:
        """The index sets of transfers of ``tokens`` tokens."""
        return index_sets(tokens, slots, self.slots, DEVICE_SLOTS, self.page)

    def run(self, direction: str, indices: Indices) -> None:
        """Enqueue a whole backup, or the restore of every layer."""
        host = indices.host_on_cpu if direction in self.cpu_slots else indices.host
        if direction == "backup":
            self.mover.backup(host, indices.rows)
        else:
            for layer in range(self.layers):
                self.mover.restore(layer, host, indices.rows)


class DevicePool:
    """Random K and V rows for all layers, ``[slots, heads, head_dim]`` each."""

    def __init__(self, slots: int = DEVICE_SLOTS) -> None:
        shape = (slots, HEADS, HEAD_DIM)
        self.k, self.v = (
            [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
            for _ in range(2)
        )


class LeftOut(NamedTuple):
    """A contender that does not serve a setting, and why."""

    page: int
    layout: Order
    codec: str
    transfer: str
    why: str


#: Codec and transfer of ours, in the order of the tables.
OURS = (
    ("int8", "mover"),
    ("int8", "fused"),
    ("int8", "dma"),
    ("int8-rot", "fused"),
    ("int8-rot", "dma"),
    ("int4", "fused"),
    ("int4", "dma"),
)

#: Host memory that contenders share: of one codec and format they write the same bytes. Another
#: codec would read there what this one wrote.
Hosts = Mapping[tuple[str, Format], torch.Tensor]
HOSTS: tuple[tuple[str, Format], ...] = tuple(
    dict.fromkeys((codec, format_of(transfer)) for codec, transfer in OURS)
)


def stock(order: Order, page: int, pool: DevicePool) -> Contender:
    """SGLang's own pool of POOL_GB, as a server builds it; its mover is a StockTransfer."""
    from bench.transfers.stock import StockTransfer

    slots = tokens_in_gigabytes(POOL_GB, ROW_BYTES, page)
    mover = StockTransfer(pool.k, pool.v, page, order, slots)
    return Contender(
        "bf16",
        "stock",
        mover,
        mover.bytes_per_token,
        slots,
        page,
        ("backup",) if mover.backup_wants_cpu_slots else (),
        mover.kernels(),
    )


def ours(
    codec_name: str,
    transfer: str,
    order: Order,
    page: int,
    pool: DevicePool,
    host: torch.Tensor,
    **options: Any,
) -> Contender:
    """A pool of ours in ``host``; ``options`` as the transfer takes them.

    Raises ValueError where the transfer does not serve its pages.
    """
    codec = get_codec(codec_name)
    rows = codec.row_formats(kv_parts(HEADS, HEAD_DIM))
    layout = RecordLayout(LAYERS, page, rows, order, format_of(transfer))
    pages = layout.pages_in(len(host))
    arena = Arena(host[: layout.arena_bytes(pages)], layout, pages)
    return Contender(
        codec_name,
        transfer,
        _transfer(transfer, codec_name, arena, pool, options),
        layout.bytes_per_token,
        pages * page,
        page,
        ("backup", "restore"),
    )


def _transfer(
    name: str, codec_name: str, arena: Arena, pool: DevicePool, options: Mapping[str, Any]
) -> Transfer:
    """As hiqcache.sglang.transfer builds it, which imports no more than it needs."""
    from hiqcache.transfers.dma import DmaTransfer
    from hiqcache.transfers.fused import FusedTransfer

    given = get_codec(codec_name), arena, (pool.k, pool.v)
    if name == "mover":
        from hiqcache.sglang.jit_mover import JitMover
        from hiqcache.transfers.mover import MoverTransfer

        return MoverTransfer(*given, JitMover())
    cls: type[Transfer] = DmaTransfer if name == "dma" else FusedTransfer
    return cls(*given, **options)


def contenders(
    order: Order, page: int, pool: DevicePool, hosts: Hosts
) -> tuple[list[Contender], list[LeftOut]]:
    """SGLang's own pool, and each of OURS in its own of ``hosts``; and who can't be there."""
    found, left_out = [stock(order, page, pool)], []
    for codec, transfer in OURS:
        try:
            host = hosts[codec, format_of(transfer)]
            found.append(ours(codec, transfer, order, page, pool, host))
        except ValueError as error:
            left_out.append(LeftOut(page, order, codec, transfer, str(error)))
    return found, left_out
