"""What a GEMM and a decode step lose while a transfer runs on another stream."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.transfers.contenders import Contender
from bench.transfers.indices import Indices
from bench.transfers.timing import hold, taken, timing_event

ROUNDS = 12
#: Both streams are held back until both have work: so many milliseconds, or the multiple of what it
#: takes to enqueue the transfers.
GATE_MS = 10.0
GATE_COVER = 1.3
#: Transfers queued, as a multiple of the compute's own time.
COVER = 3.0


@dataclass(frozen=True)
class Compute:
    """A captured graph; ``work`` keeps the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def replay(self) -> None:
        self.graph.replay()


def gemms() -> Compute:
    """Forty bf16 products of 4096 x 4096 matrices, about 7 ms on an H200."""
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return _captured(lambda: [torch.mm(a, b, out=out) for _ in range(40)])


def decode_step() -> Compute:
    """The matrix products and the attention of one Qwen3-8B decode step.

    A batch of 16 with 2,048 tokens of context each: 36 layers, 13.9 GB of weights and 4.8 GB of KV
    are read, as in a server.
    """
    batch, context, hidden, heads, kv_heads, dim, ffn = 16, 2048, 4096, 32, 8, 128, 12288

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / math.sqrt(shape[-1])

    layers = [
        (
            random(hidden, (heads + 2 * kv_heads) * dim),
            random(batch * kv_heads, dim, context),
            random(batch * kv_heads, context, dim),
            random(heads * dim, hidden),
            random(hidden, 2 * ffn),
            random(ffn, hidden),
        )
        for _ in range(36)
    ]
    start = random(batch, hidden)

    def step() -> None:
        x = start
        for qkv, k, v, o, up, down in layers:
            q = (x @ qkv)[:, : heads * dim].reshape(batch * kv_heads, heads // kv_heads, dim)
            attended = torch.bmm(torch.softmax(torch.bmm(q, k), dim=-1), v)
            x = attended.reshape(batch, heads * dim) @ o
            gate, value = (x @ up).chunk(2, dim=-1)
            x = (torch.nn.functional.silu(gate) * value) @ down

    return _captured(step)


def _captured(work: Callable[[], object]) -> Compute:
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return Compute(graph, work)


class Load(NamedTuple):
    """Transfers to run beside a compute; both are held back for ``gate_ms`` milliseconds."""

    work: Callable[[], object]
    gate_ms: float = GATE_MS


#: Nothing beside it.
IDLE = Load(lambda: None)


class Beside(NamedTuple):
    """Milliseconds of a compute beside a load, and whether they are what they seem to be.

    covered: the load outlasted the compute. ahead: the CPU had enqueued all of the load before
    either began, so that the load ran as fast as it can.
    """

    ms: float
    covered: bool
    ahead: bool


def compute_ms(compute: Compute, load: Load, side: torch.cuda.Stream) -> Beside:
    """Run ``compute`` on the current stream beside ``load`` on ``side``."""
    start, end, load_end = timing_event(), timing_event(), timing_event()
    torch.cuda.synchronize()
    hold(load.gate_ms)
    start.record()
    side.wait_event(start)
    compute.replay()
    end.record()
    with torch.cuda.stream(side):
        load.work()
        load_end.record()
    ahead = not start.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    taken_ms = float(start.elapsed_time(end))
    return Beside(taken_ms, start.elapsed_time(load_end) > taken_ms, ahead)


class _Plan(NamedTuple):
    """A contender's transfers beside the compute, and what the compute took."""

    contender: Contender
    direction: str
    load: Load
    found: list[Beside]


def interference(given: list[Contender], sets: list[Indices]) -> Iterator[dict[str, Any]]:
    """One row for each compute, direction and contender: medians of ROUNDS runs, in turns.

    slowdown: median time beside the transfers over median time alone. covered, ahead: as in Beside,
    in every round; a figure counts where both are true.
    """
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for name, make in (("gemm", gemms), ("decode step", decode_step)):
        compute = make()
        alone = [compute_ms(compute, IDLE, side).ms for _ in range(3)]
        plans = [
            _Plan(contender, direction, queued(contender, direction, indices, alone[-1]), [])
            for direction in ("backup", "restore")
            for contender, indices in zip(given, sets, strict=True)
        ]
        alone.clear()
        for _ in range(ROUNDS):
            alone.append(compute_ms(compute, IDLE, side).ms)
            for plan in plans:
                plan.found.append(compute_ms(compute, plan.load, side))
        for plan in plans:
            times = [each.ms for each in plan.found]
            yield {
                "beside": name,
                "page": plan.contender.page,
                "codec": plan.contender.codec,
                "transfer": plan.contender.transfer,
                "direction": plan.direction,
                "runs": ROUNDS,
                "ms_alone": round(statistics.median(alone), 3),
                "ms_median": round(statistics.median(times), 3),
                "ms_min": round(min(times), 3),
                "ms_max": round(max(times), 3),
                "slowdown": round(statistics.median(times) / statistics.median(alone), 4),
                "covered": all(each.covered for each in plan.found),
                "ahead": all(each.ahead for each in plan.found),
            }


def queued(contender: Contender, direction: str, indices: Indices, compute_ms: float) -> Load:
    """As many transfers as outlast COVER times the compute."""
    contender.run(direction, indices)
    one = taken(lambda: contender.run(direction, indices))
    count = math.ceil(COVER * compute_ms / one.ms)
    return Load(
        lambda: [contender.run(direction, indices) for _ in range(count)],
        max(GATE_MS, GATE_COVER * count * one.host_ms),
    )
