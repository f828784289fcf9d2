"""The dma transfer over launches, rings and lengths, at pages of 64 in page_first.

Where ENCODE, DECODE, RING_SLOTS and RING_SLOT_BYTES come from, and from which length on dma is to
take a transfer. The first rows are SGLang's own pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bench.lab.table import Table
from bench.launches.measuring import DIRECTIONS, SHORT, TOKENS, Direction, Measure, length_ms
from bench.transfers.compiling import HOST_BYTES, compile_all
from bench.transfers.contenders import Contender, DevicePool, ours, stock
from bench.transfers.indices import SLOTS
from bench.transfers.report import ms_lost
from hiqcache.codecs import CODEC_NAMES
from hiqcache.transfers.launch import DECODE, ENCODE, RING_SLOT_BYTES, RING_SLOTS, Launch

PAGE = 64

#: Launches that are tried, of the kernels of both directions.
WIDTHS = (
    Launch(8192, 32, 8),
    Launch(8192, 132, 4),
    Launch(8192, 132, 8),
    Launch(8192, 264, 4),
    Launch(8192, 264, 4, 3),
    Launch(8192, 264, 8),
    Launch(8192, 528, 4),
    Launch(8192, 2048, 4),
)


class Ring(NamedTuple):
    """Batches that the ring holds, and bytes of each."""

    slots: int
    slot_bytes: int


#: Rings that are tried, with the launches that serve, for the first codec.
RINGS = (
    Ring(RING_SLOTS, RING_SLOT_BYTES),
    Ring(2, 10_000_000),
    Ring(3, 10_000_000),
    Ring(3, 5_000_000),
    Ring(6, 5_000_000),
    Ring(12, 2_500_000),
)

#: Lengths in tokens that fused and dma are compared at.
LENGTHS = (64, 128, 256, 512, 1024, 2048)

_SERVES = {"backup": ENCODE, "restore": DECODE}


class Shape(NamedTuple):
    """What a dma transfer is built with."""

    codec: str
    launch: Launch
    ring: Ring = RINGS[0]


#: Shapes whose launch and ring are tried, both directions each.
SHAPES = tuple(
    dict.fromkeys(
        (
            *(Shape(codec, launch) for codec in CODEC_NAMES for launch in WIDTHS),
            *(Shape(CODEC_NAMES[0], ENCODE[CODEC_NAMES[0]], ring) for ring in RINGS),
        )
    )
)


def build(shape: Shape, pool: DevicePool, host: torch.Tensor) -> Contender:
    """A contender of ``shape``. Raises ValueError where the GPU has not the shared memory."""
    found = ours(
        shape.codec,
        "dma",
        "page_first",
        PAGE,
        pool,
        host,
        encode=shape.launch,
        decode=shape.launch,
        slots=shape.ring.slots,
        slot_bytes=shape.ring.slot_bytes,
    )
    launches = found.mover.launches  # type: ignore[attr-defined]
    if set(launches.values()) != {shape.launch}:
        raise ValueError(f"this GPU has room for {launches} of {shape.launch}")
    return found


def compiled(shape: Shape) -> None:
    """Puts ``shape``'s kernels into Triton's cache."""
    host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    build(shape, DevicePool(slots=PAGE), host)


def sweep(host: torch.Tensor, pool: DevicePool) -> Iterator[dict[str, Any]]:
    """A row for SGLang's own pool, every shape and every length, both directions."""
    measured = Measure()
    own = stock("page_first", PAGE, pool)
    for direction in DIRECTIONS:
        yield {
            "kind": "stock",
            "codec": "bf16",
            "direction": direction,
            "kernel": own.kernels[direction],
        } | measured(own, direction)
    own.mover.close()  # type: ignore[attr-defined]
    # Rings share the kernels of the first.
    faults = compile_all([shape._replace(ring=RINGS[0]) for shape in SHAPES], compiled)
    for shape in SHAPES:
        if fault := faults[shape._replace(ring=RINGS[0])]:
            print(f"{shape} is left out: {fault}", flush=True)
            continue
        contender = build(shape, pool, host)
        for direction in DIRECTIONS:
            row: dict[str, Any] = {"kind": "shape", "codec": shape.codec, "direction": direction}
            row |= {**shape.launch._asdict(), **shape.ring._asdict()}
            yield row | measured(contender, direction)
    yield from _lengths(host, pool)


def _lengths(host: torch.Tensor, pool: DevicePool) -> Iterator[dict[str, Any]]:
    """A row for every length, by fused and by dma as they serve."""
    for codec in CODEC_NAMES:
        for transfer in ("fused", "dma"):
            contender = ours(codec, transfer, "page_first", PAGE, pool, host)
            for direction in DIRECTIONS:
                for tokens in LENGTHS:
                    found = length_ms(contender, direction, tokens)
                    yield {
                        "kind": "length",
                        "codec": codec,
                        "direction": direction,
                        "transfer": transfer,
                        "tokens": tokens,
                        "bytes_per_token": contender.bytes_per_token,
                        **{name: round(value, 4) for name, value in found.items()},
                    }


def least_tokens(rows: Sequence[Mapping[str, Any]], codec: str, direction: str) -> int | None:
    """The length from which on dma is no slower than fused at any length; None where there is none.

    ``rows``: those of a sweep.
    """
    by_length: dict[int, dict[str, float]] = {}
    for row in rows:
        if (row["kind"], row["codec"], row["direction"]) == ("length", codec, direction):
            by_length.setdefault(row["tokens"], {})[row["transfer"]] = row["ms"]
    least = None
    for tokens in sorted(by_length, reverse=True):
        if by_length[tokens]["dma"] > by_length[tokens]["fused"]:
            break
        least = tokens
    return least


def table(result: dict[str, Any]) -> str:
    """The result in Markdown, what the dma transfer launches in bold."""
    link = result["pcie_gbps"]
    lines = [
        "# Launches of dma",
        "",
        f"`{result['command']}` on one {result['card']}. {TOKENS:,} tokens of Qwen3-8B's KV, pages "
        f"of {PAGE}, page_first. PCIe ceiling, plain copies: {link['h2d']} GB/s to the device, "
        f"{link['d2h']} GB/s to the host. In bold, what serves. Medians; ahead: where the CPU had "
        "enqueued all before the stream began, random slots; host: the CPU's time for that; lost "
        "is what one transfer costs a decode step beside it: the share of its time that it loses, "
        "times what the transfer takes alone.",
    ]
    for direction in reversed(DIRECTIONS):
        rows = [row for row in result["rows"] if row["direction"] == direction]
        shapes = [row for row in rows if row["kind"] != "length"]
        lines += ["", f"## {direction.capitalize()}", "", _shapes(shapes, direction).markdown()]
    lines += [
        "",
        "## Short transfers",
        "",
        "Random slots, by fused and by dma, host slots on the CPU.",
        "",
        _by_length(result["rows"]).markdown(),
        "",
    ]
    # A table from before a codec has none of it.
    for codec in dict.fromkeys(row["codec"] for row in result["rows"] if row["kind"] == "length"):
        for direction in DIRECTIONS:
            least = least_tokens(result["rows"], codec, direction)
            lines.append(
                f"- {codec}, {direction}: dma is no slower "
                + (f"from {least:,} tokens on." if least else "at no length that was tried.")
            )
    return "\n".join(lines) + "\n"


def _shapes(rows: Sequence[Mapping[str, Any]], direction: Direction) -> Table:
    header = ("codec", "tile", "programs", "warps", "stages", "ring", "ms, sequential slots")
    more = ("random", "ahead", "host", f"{SHORT} tokens", "GEMM slowed", "decode step slowed")
    cells = []
    for row in rows:
        shape, serves = [f"bf16, stock ({row.get('kernel')})", *["–"] * 5], False
        if row["kind"] == "shape":
            launch = Launch(row["elements"], row["programs"], row["warps"], row["stages"])
            ring = Ring(row["slots"], row["slot_bytes"])
            shape = [row["codec"], f"{launch.elements:,}", *map(str, launch[1:])]
            shape.append(f"{ring.slots} x {ring.slot_bytes / 1e6:g} MB")
            serves = (launch, ring) == (_SERVES[direction][row["codec"]], RINGS[0])
        times = [row[f"ms_{kind}"] for kind in (*SLOTS, "ahead")]
        slowed = row["decode_step_slowdown"]
        cells.append(
            [
                *shape,
                *(f"{ms:.2f}" for ms in (*times, row["host_ms"], row["ms_short"])),
                f"{row['gemm_slowdown']:.3f}",
                f"{slowed:.3f}",
                f"{ms_lost(slowed, row['ms_sequential']):.2f}",
            ]
        )
        if serves:
            cells[-1] = [f"**{cell}**" for cell in cells[-1]]
    return Table((*header, *more, "lost ms"), cells)


def _by_length(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = {
        (row["codec"], row["direction"], row["tokens"], row["transfer"]): row
        for row in rows
        if row["kind"] == "length"
    }
    return Table(
        ("codec", "direction", "tokens", "fused ms", "dma ms", "fused host ms", "dma host ms"),
        [
            (
                codec,
                direction,
                f"{tokens:,}",
                *(
                    f"{found[codec, direction, tokens, transfer][what]:.3f}"
                    for what in ("ms", "host_ms")
                    for transfer in ("fused", "dma")
                ),
            )
            for codec, direction, tokens in dict.fromkeys(key[:3] for key in found)
        ],
    )
