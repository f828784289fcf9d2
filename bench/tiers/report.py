"""Writes a bench's report from its folder's JSON alone.

Where the folder holds runs.jsonl, the summaries (same_tokens.json and the like)
are made from it first. Then report.md, report.html and plots/*.svg are made from the summaries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.lab import report
from bench.lab.arms import title
from bench.lab.report import Section, made_with
from bench.tiers import plots, tables
from bench.tiers.runs import read
from bench.tiers.summaries import summarise
from bench.tiers.tables import Summary


def write(folder: Path) -> None:
    """Make the report in ``folder``. Raises ValueError where there is nothing to report."""
    runs = folder / "runs.jsonl"
    if runs.exists():
        for name, summary in summarise(read(runs)).items():
            (folder / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    sections = _sections(folder)
    if not sections:
        raise ValueError(f"{folder} holds no runs.jsonl with valid runs and no summaries")
    report.write(folder, sections)


def _sections(folder: Path) -> list[Section]:
    sections = []
    for name, build in (
        ("same_tokens", _same_tokens),
        ("same_bytes", _same_bytes),
        ("sweep", _sweep),
        ("l3", _l3),
    ):
        file = folder / f"{name}.json"
        if file.exists():
            sections.append(build(json.loads(file.read_text()), folder / "plots" / f"{name}.svg"))
    return sections


def _same_tokens(summary: Summary, plot: Path) -> Section:
    return Section(
        "The same tokens in L2",
        [
            "Every arm's L2 holds the same number of tokens; requests come one at a time, so that "
            "the hits can be compared. " + _workload(summary["workload"]),
            made_with(summary["setup"]),
        ],
        [tables.same_tokens(summary)],
        plots.same_tokens(summary, plot),
    )


def _same_bytes(summary: Summary, plot: Path) -> Section:
    return Section(
        "The same bytes of L2",
        [*_how(summary), made_with(summary["setup"])],
        [tables.same_bytes(summary), tables.pairs(summary)],
        plots.same_bytes(summary, plot),
    )


def _l3(summary: Summary, plot: Path) -> Section:
    cap = summary["arms"]["bf16"]["disk"]["cap_bytes"] / 1e9
    return Section(
        "The same bytes of a disk behind L2",
        [
            f"Behind L2, SGLang's file backend keeps up to {cap:.3g} GB per arm. A request waits "
            "until its prefix has been read (prefetch policy wait_complete). The files stay in the "
            "operating system's page cache as far as there is memory, so TTFT shows no more of the "
            "disk's own speed than that leaves. " + " ".join(_how(summary)),
            made_with(summary["setup"]),
        ],
        [tables.l3(summary), tables.pairs(summary)],
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
        f"{title(arm)} {ratio['value']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"
        for arm, ratio in summary["fits_ttft_ratio"].items()
    )
    return Section(
        "Sweep: where the gain starts and ends",
        [
            'Every prefix is computed once before the measured requests. "All fits": the prefixes '
            "and everything else that the run leaves in L2 fit BF16's L2 too, so that no gain can "
            f"be had. Mean TTFT over BF16's, all such runs pooled: {fits or 'none ran'}."
            + _by_turns(summary),
            made_with(summary["setup"]),
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


def _workload(workload: dict[str, Any]) -> str:
    drawn = ", each as often and shuffled," if workload["choice"] == "dealt" else ""
    return (
        f"{workload['requests']} requests draw from {workload['groups']} prefixes of "
        f"{workload['prefix']:,} tokens{drawn} and add {workload['suffix']} of their own; "
        f"{workload['output']} tokens of output; {workload['concurrency']} at a time."
    )
