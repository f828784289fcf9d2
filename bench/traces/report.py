"""Writes the report of a folder of simulations and replays, from their JSON alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.lab import report
from bench.lab.report import Section, made_with
from bench.traces import plots, tables
from bench.traces.tables import Summary


def write(folder: Path) -> None:
    """Make the report in ``folder``. Raises ValueError where there is nothing to report."""
    simulated = simulations(folder)
    sections = [_traces(simulated, folder / "plots" / "traces.svg")] if simulated else []
    replayed = replays(folder)
    sections += [_replays(replayed)] if replayed else []
    if not sections:
        raise ValueError(f"{folder} holds no simulation and no replay of a trace")
    report.write(folder, sections)


def simulations(folder: Path) -> list[Summary]:
    """The summaries of simulated traces in ``folder``."""
    found = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    return [summary for summary in found if "trace" in summary]


def replays(folder: Path) -> list[Summary]:
    """The summaries of replayed traces in ``folder``."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*-replay.json"))]


def _traces(summaries: Sequence[Summary], plot: Path) -> Section:
    first = summaries[0]
    return Section(
        "Traces, simulated",
        [
            f"L1 holds {first['l1_tokens']:,} tokens, pages are {first['page_size']} tokens, the "
            f"model's KV is {first['model']}'s. The line: what an unbounded L2 would give. "
            "Simulated one request after the other under SGLang's rules; a test holds the "
            "simulation to a real server's hits, request by request.",
            *(f"Made by `{summary['command']}`." for summary in summaries),
        ],
        [tables.traces(summaries)],
        plots.traces(summaries, plot),
    )


def _replays(summaries: Sequence[Summary]) -> Section:
    return Section(
        "Traces, replayed on servers",
        [
            "The first requests of a trace, one after the other, a block of 512 tokens made "
            'shorter to fit the machine; every arm\'s L2 takes the same bytes. "As simulated": '
            "requests whose tokens from L1 and from L2 are those that the simulation says.",
            *(made_with(summary["setup"]) for summary in summaries),
        ],
        [tables.replays(summaries)],
        None,
    )
