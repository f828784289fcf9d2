"""What a transfer takes, and what a GEMM and a decode step lose beside it."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any, Literal

import torch

from bench.transfers.contenders import Contender
from bench.transfers.indices import SLOTS
from bench.transfers.interference import IDLE, Load, compute_ms, decode_step, gemms, queued
from bench.transfers.timing import taken

Direction = Literal["backup", "restore"]
DIRECTIONS: tuple[Direction, ...] = ("backup", "restore")

TOKENS = 2048
SHORT = 128
REPEATS = 12
#: Repetitions with the stream held back, for so many times what enqueueing takes.
AHEAD_REPEATS = 6
AHEAD = 1.5
ROUNDS = 5


class Measure:
    """Measures contenders, all beside the same work."""

    def __init__(self) -> None:
        self._computes = {"gemm": gemms(), "decode_step": decode_step()}
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, contender: Contender, direction: Direction) -> dict[str, Any]:
        """Medians of TOKENS tokens in either slot order, of SHORT tokens, and both slowdowns.

        ms_ahead: of random slots, where the CPU had enqueued all before the stream began; host_ms:
        what that took the CPU.
        """
        sets = {slots: contender.indices(TOKENS, slots) for slots in SLOTS}
        times: dict[str, list[float]] = {slots: [] for slots in SLOTS}
        host = []
        for repeat in range(-1, REPEATS):
            for slots, given in sets.items():
                took = taken(partial(contender.run, direction, given[repeat % len(given)]))
                if repeat >= 0:
                    times[slots].append(took.ms)
                    host.append(took.host_ms)
        row = {f"ms_{slots}": round(statistics.median(found), 3) for slots, found in times.items()}
        row["ms_short"] = round(length_ms(contender, direction, SHORT, "sequential")["ms"], 3)
        held = AHEAD * max(host)
        ahead = [
            taken(partial(contender.run, direction, given), held).ms
            for _, given in zip(range(AHEAD_REPEATS), 2 * sets["random"], strict=False)
        ]
        row["ms_ahead"] = round(statistics.median(ahead), 3)
        row["host_ms"] = round(statistics.median(host), 3)
        for name in self._computes:
            alone = self._beside(name, IDLE)
            load = queued(contender, direction, sets["sequential"][0], alone)
            row[f"{name}_slowdown"] = round(self._beside(name, load) / alone, 3)
        return row

    def _beside(self, name: str, load: Load) -> float:
        compute = self._computes[name]
        return statistics.median(compute_ms(compute, load, self._side).ms for _ in range(ROUNDS))


def length_ms(
    contender: Contender,
    direction: Direction,
    tokens: int,
    slots: Literal["sequential", "random"] = "random",
) -> dict[str, float]:
    """Medians of the stream's and of the CPU's milliseconds, of transfers of ``tokens`` tokens."""
    sets = contender.indices(tokens, slots)
    found = [
        taken(partial(contender.run, direction, sets[repeat % len(sets)]))
        for repeat in range(REPEATS + 1)
    ][1:]
    return {
        "ms": statistics.median(each.ms for each in found),
        "host_ms": statistics.median(each.host_ms for each in found),
    }
