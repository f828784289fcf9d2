"""Writes a results folder's report again, from its JSON alone.

    python -m loadtest.experiments.report DIR

Where DIR holds runs.jsonl, the summaries (experiment_a.json, experiment_b.json,
sweep.json) are made from it first. Then report.md, report.html and plots/*.svg are made from the
summaries, or, in a folder of trace simulations, from those.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.experiments import plots, tables
from loadtest.experiments.runs import read
from loadtest.experiments.summaries import summarise
from loadtest.experiments.tables import Summary, Table

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:.3em .6em}"
    "svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    text: Sequence[str]
    tables: Sequence[Table]
    plot: Path | None


def write(folder: Path) -> None:
    """Make the report in ``folder``. Raises ValueError where there is nothing to report."""
    runs = folder / "runs.jsonl"
    if runs.exists():
        for name, summary in summarise(read(runs)).items():
            (folder / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    sections = _sections(folder)
    if not sections:
        raise ValueError(f"{folder} holds no runs.jsonl with valid runs, no summaries, no traces")
    heading = f"Results: {folder.name}"
    (folder / "report.md").write_text(_markdown(heading, sections))
    (folder / "report.html").write_text(_html(heading, sections))


def _sections(folder: Path) -> list[Section]:
    sections = []
    for name, build in (
        ("experiment_a", _same_tokens),
        ("experiment_b", _same_bytes),
        ("sweep", _sweep),
    ):
        file = folder / f"{name}.json"
        if file.exists():
            sections.append(build(json.loads(file.read_text()), folder / "plots" / f"{name}.svg"))
    simulated = [
        summary
        for file in sorted(folder.glob("*.json"))
        if "trace" in (summary := json.loads(file.read_text()))
    ]
    if simulated:
        sections.append(_traces(simulated, folder / "plots" / "traces.svg"))
    replayed = [json.loads(file.read_text()) for file in sorted(folder.glob("*-replay.json"))]
    return [*sections, _replays(replayed)] if replayed else sections


def _same_tokens(summary: Summary, plot: Path) -> Section:
    return Section(
        "Experiment A: the same tokens in L2",
        [
            "Every arm's L2 holds the same number of tokens; requests come one at a time, so that "
            "the hits can be compared. " + _workload(summary["workload"]),
            tables.made_with(summary["setup"]),
        ],
        [tables.same_tokens(summary)],
        plots.same_tokens(summary, plot),
    )


def _same_bytes(summary: Summary, plot: Path) -> Section:
    return Section(
        "Experiment B: the same bytes of L2",
        [*_how(summary), tables.made_with(summary["setup"])],
        [tables.same_bytes(summary), tables.pairs(summary)],
        plots.same_bytes(summary, plot),
    )


def _how(summary: Summary) -> list[str]:
    invalid = summary["invalid_runs"]
    rivals = [
        "An FP8 KV cache halves L1's bytes too, so that arm is given twice the tokens in L1: the "
        "same bytes of GPU memory. What either costs in quality: `make quality`."
    ]
    return [
        "Every arm's L2 takes the same bytes; each run starts from empty caches and counts its "
        "cold misses. " + _workload(summary["workload"]) + " The runs of a pair have the same "
        "prompts in the same order, and come one after the other. Brackets: 95 % bootstrap "
        "intervals. "
        + (f"{invalid} runs were invalid and left out." if invalid else "No run was invalid."),
        *(rivals if "fp8" in summary["arms"] else []),
    ]


def _sweep(summary: Summary, plot: Path) -> Section:
    fits = "; ".join(
        f"{tables.title(arm)} {ratio['value']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"
        for arm, ratio in summary["fits_ttft_ratio"].items()
    )
    return Section(
        "Sweep: where the gain starts and ends",
        [
            "Every prefix is computed once before the measured requests. «All fits»: the prefixes "
            "and everything else that the run leaves in L2 fit BF16's L2 too, so that no gain can "
            f"be had. Mean TTFT over BF16's, all such runs pooled: {fits or 'none ran'}."
            + _by_turns(summary),
            tables.made_with(summary["setup"]),
        ],
        [tables.sweep(summary)],
        plots.sweep(summary, plot),
    )


def _by_turns(summary: Summary) -> str:
    if not (turn := summary["turn"]):
        return ""
    return (
        f" The arms take turns of {turn} requests; brackets: 95 % bootstrap intervals, which draw "
        "runs and turns within them."
    )


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
            "shorter to fit the machine; every arm's L2 takes the same bytes. «As simulated»: "
            "requests whose tokens from L1 and from L2 are those that the simulation says.",
            *(tables.made_with(summary["setup"]) for summary in summaries),
        ],
        [tables.replays(summaries)],
        None,
    )


def _workload(workload: dict[str, Any]) -> str:
    drawn = ", each as often and shuffled," if workload["choice"] == "dealt" else ""
    return (
        f"{workload['requests']} requests draw from {workload['groups']} prefixes of "
        f"{workload['prefix']:,} tokens{drawn} and add {workload['suffix']} of their own; "
        f"{workload['output']} tokens of output; {workload['concurrency']} at a time."
    )


def _markdown(heading: str, sections: Sequence[Section]) -> str:
    parts = [f"# {heading}"]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        parts += [table.markdown() for table in section.tables]
        if section.plot:
            parts.append(f"![{section.title}](plots/{section.plot.name})")
    return "\n\n".join(parts) + "\n"


def _html(heading: str, sections: Sequence[Section]) -> str:
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{_STYLE}</style><h1>{heading}</h1>"
    ]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
        parts += [table.html() for table in section.tables]
        if section.plot:
            drawing = section.plot.read_text()
            parts.append(drawing[drawing.index("<svg") :])
    return "\n".join([*parts, "</html>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.experiments.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        write(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {folder}/report.md, {folder}/report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
