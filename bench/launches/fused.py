"""The fused transfer over launch shapes: where BACKUP, RESTORE and LAUNCH_TOKENS come from.

The first rows are copies of as many bf16 bytes by the GPU's copy engine, which takes no
multiprocessor: what they cost a GEMM or a decode step is memory traffic alone. Then SGLang's own
pool. All in page_first, pages of one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bench.lab.table import Table
from bench.launches.measuring import DIRECTIONS, SHORT, Direction, Measure
from bench.transfers.compiling import compile_all
from bench.transfers.contenders import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    ROW_BYTES,
    Contender,
    DevicePool,
    stock,
)
from bench.transfers.indices import SLOTS
from bench.transfers.report import ms_lost
from hiqcache.codecs import get_codec
from hiqcache.record import Order, RecordLayout, kv_parts
from hiqcache.transfers.base import Arena
from hiqcache.transfers.fused import FusedTransfer
from hiqcache.transfers.launch import BACKUP, LAUNCH_TOKENS, RESTORE, Launch


class Tile(NamedTuple):
    """What is compiled: a kernel of one codec, and of a launch all but its programs."""

    codec: str
    direction: Direction
    elements: int
    warps: int
    stages: int = 1
    order: Order = "page_first"


class Sweep(NamedTuple):
    """Launches that share a compiled kernel."""

    tile: Tile
    programs: tuple[int, ...]
    #: Tokens times layers of a launch, at most; a backup is one launch.
    launch_tokens: tuple[int, ...] = (LAUNCH_TOKENS,)


SWEEPS = (
    Sweep(Tile("int8", "backup", 8192, 4), (6, 8, 10)),
    Sweep(Tile("int8", "backup", 8192, 8), (6, 8)),
    Sweep(Tile("int8", "backup", 8192, 8, 3), (4, 5, 8)),
    Sweep(Tile("int8", "backup", 8192, 4, 1, "layer_first"), (8, 10, 12)),
    Sweep(Tile("int8", "backup", 8192, 8, 4, "layer_first"), (8, 10)),
    Sweep(Tile("int8-rot", "backup", 8192, 4, 5), (6, 8, 10)),
    Sweep(Tile("int8-rot", "backup", 8192, 8, 1, "layer_first"), (12, 16)),
    Sweep(Tile("int8-rot", "backup", 8192, 4, 1, "layer_first"), (16, 20)),
    Sweep(Tile("int8", "restore", 8192, 8, 5), (4, 5, 6, 8)),
    Sweep(Tile("int8", "restore", 8192, 8, 5), (4, 5, 6), (2 * LAUNCH_TOKENS,)),
    Sweep(Tile("int8", "restore", 8192, 8, 4), (6, 8)),
    Sweep(Tile("int8", "restore", 8192, 8, 8), (5,)),
    Sweep(Tile("int8", "restore", 8192, 4, 5), (6,)),
    Sweep(Tile("int8-rot", "restore", 8192, 4, 5), (10, 12, 16)),
)


def transfer(
    tile: Tile,
    programs: int,
    host: torch.Tensor,
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    launch_tokens: int = LAUNCH_TOKENS,
) -> tuple[FusedTransfer, RecordLayout]:
    """A transfer that launches ``tile`` in its direction, and its layout in ``host``.

    Raises ValueError where the GPU has not the shared memory.
    """
    codec = get_codec(tile.codec)
    layout = RecordLayout(LAYERS, 1, codec.row_formats(kv_parts(HEADS, HEAD_DIM)), order=tile.order)
    slots = layout.pages_in(len(host))
    arena = Arena(host[: layout.arena_bytes(slots)], layout, slots)
    launch = Launch(tile.elements, programs, tile.warps, tile.stages)
    chosen = {tile.direction: launch}
    mover = FusedTransfer(codec, arena, (k, v), launch_tokens=launch_tokens, **chosen)
    if mover.launches[tile.direction] != launch:
        raise ValueError(f"this GPU has room for {mover.launches[tile.direction].stages} stages")
    return mover, layout


def compiled(tile: Tile) -> None:
    """Puts ``tile``'s kernel into Triton's cache."""
    rows = torch.empty(2, LAYERS, 16, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    host = torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)
    transfer(tile, 1, host, list(rows[0]), list(rows[1]))


def compilable() -> list[Tile]:
    """The tiles whose kernels could be compiled; the others are named."""
    faults = compile_all([sweep.tile for sweep in SWEEPS], compiled)
    for tile, fault in faults.items():
        if fault:
            print(f"{tile} is left out: {fault}", flush=True)
    return [tile for tile, fault in faults.items() if not fault]


class CopyEngine:
    """A Mover of plain copies, of as many bf16 rows as there are indices, wherever those point."""

    staging_bytes = 0

    def __init__(self, host: torch.Tensor, pool: DevicePool) -> None:
        self._host, self._pool = host, pool

    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        for layer in range(LAYERS):
            for host, rows in self._pairs(layer, host_indices, device_indices):
                host.copy_(rows, non_blocking=True)

    def restore(self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
        for host, rows in self._pairs(layer, host_indices, device_indices):
            rows.copy_(host, non_blocking=True)

    def _pairs(
        self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = len(device_indices)
        assert len(host_indices) == tokens
        for side, buffers in enumerate((self._pool.k, self._pool.v)):
            rows = buffers[layer][:tokens].view(torch.uint8).view(-1)
            start = (2 * layer + side) * len(rows)
            yield self._host[start : start + len(rows)], rows


def sweep(host: torch.Tensor, pool: DevicePool) -> Iterator[dict[str, Any]]:
    """A row for the copy engine, SGLang's own pool and every launch shape, both directions."""
    measured = Measure()
    own = stock("page_first", 1, pool)
    for contender in (
        Contender("bf16", "copy engine", CopyEngine(host, pool), ROW_BYTES, own.slots),
        own,
    ):
        kind = {"codec": "bf16", "transfer": contender.transfer}
        for direction in DIRECTIONS:
            yield kind | {"direction": direction} | measured(contender, direction)
    own.mover.close()  # type: ignore[attr-defined]
    tiles = compilable()
    for tile, grids, launch_tokens in (sweep for sweep in SWEEPS if sweep.tile in tiles):
        for programs, most in itertools.product(grids, launch_tokens):
            mover, layout = transfer(tile, programs, host, pool.k, pool.v, most)
            contender = Contender(
                tile.codec, "fused", mover, layout.bytes_per_token, layout.pages_in(len(host))
            )
            row = {"transfer": "fused", **tile._asdict()}
            row |= {"programs": programs, "launch_tokens": most}
            yield row | measured(contender, tile.direction)


def table(result: dict[str, Any]) -> str:
    """The result in Markdown, what the fused transfer launches in bold."""
    link = result["pcie_gbps"]
    lines = [
        "# Launches",
        "",
        f"`{result['command']}` on one {result['card']}. {result['tokens']:,} tokens of Qwen3-8B's "
        f"KV. PCIe ceiling, plain copies: {link['h2d']} GB/s to the device, {link['d2h']} GB/s to "
        'the host. In bold, what the fused transfer launches. Medians; "lost" is what one transfer '
        "costs a decode step beside it: the share of its time that it loses, times what the "
        "transfer takes alone.",
    ]
    defaults = {("restore", codec, "page_first"): launch for codec, launch in RESTORE.items()}
    defaults |= {("backup", codec, order): launch for (codec, order), launch in BACKUP.items()}
    for direction in reversed(DIRECTIONS):
        rows = [row for row in result["rows"] if row["direction"] == direction]
        shapes = _shapes(rows, result["tokens"], defaults).markdown()
        lines += ["", f"## {direction.capitalize()}", "", shapes]
    return "\n".join(lines) + "\n"


def _shapes(
    rows: Sequence[Mapping[str, Any]], tokens: int, defaults: Mapping[Any, Launch]
) -> Table:
    """Rows of one direction; those of ``defaults`` (by direction, codec, order) in bold."""
    header = ("codec", "layout", "tile", "warps", "stages", "programs", "layers per launch")
    times = ("ms, sequential slots", "random", f"{SHORT} tokens")
    cells = []
    for row in rows:
        shape = [f"{row['codec']}, {row['transfer']}", *(["–"] * 6)]
        serves = False
        if row["transfer"] == "fused":
            launch = Launch(row["elements"], row["programs"], row["warps"], row["stages"])
            layers = row["launch_tokens"] // tokens if row["direction"] == "restore" else "–"
            shape = [row["codec"], row["order"], f"{launch.elements:,}", *map(str, launch[2:])]
            shape += [str(launch.programs), str(layers)]
            serves = launch == defaults[row["direction"], row["codec"], row["order"]]
            serves &= row["launch_tokens"] == LAUNCH_TOKENS
        slowed = row["decode_step_slowdown"]
        cells.append(
            [
                *shape,
                *(f"{row[f'ms_{kind}']:.2f}" for kind in (*SLOTS, "short")),
                f"{row['gemm_slowdown']:.2f}",
                f"{slowed:.2f}",
                f"{ms_lost(slowed, row['ms_sequential']):.2f}",
            ]
        )
        if serves:
            cells[-1] = [f"**{cell}**" for cell in cells[-1]]
    return Table((*header, *times, "GEMM slowed", "decode step slowed", "lost ms"), cells)
