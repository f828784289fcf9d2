"""Who is timed: SGLang's own pool and each of ours, over the same device rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from bench.lab.shapes import QWEN3_8B
from hiqcache.codecs import get_codec
from hiqcache.record import Order, RecordLayout, format_of, kv_parts, tokens_in_gigabytes
from hiqcache.transfers.base import Arena

LAYERS = QWEN3_8B.layers
HEADS, HEAD_DIM = QWEN3_8B.parts[0].heads, QWEN3_8B.parts[0].width
#: Rows of the device pool: twice the largest transfer.
DEVICE_SLOTS = 16_384
#: --hicache-size, decimal GB.
POOL_GB = 8
#: Index sets in rotation, so that no repetition finds its rows in the GPU's L2 (60 MB).
INDEX_SETS = 4


class Indices(NamedTuple):
    """Host slots and device rows of a transfer; the host slots on the CPU too."""

    host: torch.Tensor
    rows: torch.Tensor
    host_on_cpu: torch.Tensor


class Mover(Protocol):
    """What is timed: a Transfer, or SGLang's own pool behind the same calls."""

    @property
    def staging_bytes(self) -> int: ...
    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None: ...
    def restore(
        self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None: ...


class Contender(NamedTuple):
    """One way to keep rows, with a host pool of ``slots`` tokens."""

    codec: str
    transfer: str
    mover: Mover
    bytes_per_token: int
    slots: int
    #: Whether SGLang gives a backup its host slots on the CPU: stock, page_first.
    cpu_slots: bool = False

    def run(self, direction: str, indices: Indices) -> None:
        """Enqueue a whole backup, or the restore of every layer."""
        if direction == "backup":
            host = indices.host_on_cpu if self.cpu_slots else indices.host
            self.mover.backup(host, indices.rows)
        else:
            for layer in range(LAYERS):
                self.mover.restore(layer, indices.host, indices.rows)


class DevicePool:
    """Random K and V rows for all layers, ``[slots, heads, head_dim]`` each."""

    def __init__(self) -> None:
        shape = (DEVICE_SLOTS, HEADS, HEAD_DIM)
        self.k, self.v = (
            [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
            for _ in range(2)
        )


#: Codec and transfer of ours, in the order of the tables.
OURS = (("int8", "mover"), ("int8", "fused"), ("int8-rot", "fused"))


def contenders(order: Order, pool: DevicePool, hosts: Sequence[torch.Tensor]) -> list[Contender]:
    """SGLang's own pool, and each of OURS in its own of ``hosts``, all of POOL_GB."""
    from bench.transfers.stock import StockTransfer
    from hiqcache.sglang.jit_mover import JitMover
    from hiqcache.transfers.fused import FusedTransfer
    from hiqcache.transfers.mover import MoverTransfer

    row_bytes = 2 * LAYERS * HEADS * HEAD_DIM * 2
    slots = tokens_in_gigabytes(POOL_GB, row_bytes)
    stock = StockTransfer(pool.k, pool.v, 1, order, slots)
    found = [
        Contender(
            "bf16", "stock", stock, stock.bytes_per_token, slots, stock.backup_wants_cpu_slots
        )
    ]
    for (codec_name, transfer), host in zip(OURS, hosts, strict=True):
        codec = get_codec(codec_name)
        layout = RecordLayout(
            LAYERS,
            1,
            codec.row_formats(kv_parts(HEADS, HEAD_DIM)),
            order,
            format_of(transfer),
        )
        slots = layout.pages_in(len(host))
        arena = Arena(host[: layout.arena_bytes(slots)], layout, slots)
        mover: Mover = (
            MoverTransfer(codec, arena, (pool.k, pool.v), JitMover())
            if transfer == "mover"
            else FusedTransfer(codec, arena, (pool.k, pool.v))
        )
        found.append(Contender(codec_name, transfer, mover, layout.bytes_per_token, slots))
    return found


def index_sets(tokens: int, slots: str, host_slots: int) -> list[Indices]:
    """INDEX_SETS sets of host slots and device rows, both sequential or both random."""
    generator = torch.Generator().manual_seed(tokens)
    sets = []
    for index in range(INDEX_SETS):
        if slots == "random":
            host = torch.randperm(host_slots, generator=generator)[:tokens]
            device = torch.randperm(DEVICE_SLOTS, generator=generator)[:tokens]
        else:
            host = torch.arange(tokens) + (host_slots - tokens) * index // INDEX_SETS
            device = torch.arange(tokens) + (DEVICE_SLOTS - tokens) * index // INDEX_SETS
        sets.append(Indices(host.cuda(), device.cuda(), host))
    return sets
