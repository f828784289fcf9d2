"""The study's table: every candidate beside the targets that FP8 sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.codec_study.candidates import FOUR_BITS, FP8
from bench.lab.environment import hardware
from bench.lab.table import Table

Kept = Mapping[str, Any]

#: Restored KL of four bits, as a share of FP8's, at most: set before anything was measured.
TARGETS = {"Qwen2.5-Coder-0.5B-Instruct": 1 / 3, "SmolLM2-135M-Instruct": 1.0}


def write(out: Path) -> None:
    """Make study.md in ``out`` of the models' JSON files there."""
    studies = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    (out / "study.md").write_text(markdown(studies))


def markdown(studies: list[Kept]) -> str:
    """Tables of KL by candidate, largest ratio last, and of KL by cycle."""
    parts = [
        "# Which codec for four bits",
        "K (after RoPE) and V pass a candidate in fp32; KL is against exact rows, in nats, with "
        "its standard error. Restored: a prefix passes once, the suffix is computed exactly. "
        "Whole: every row passes in every layer. x BF16 counts codes, scales and what a page "
        f"keeps. of FP8: restored KL over that of `{FP8.name}`.",
        *(_setting(study) for study in studies),
        "## Against the targets",
        *_verdicts(studies),
        "## Candidates",
        _candidates(studies).markdown(),
    ]
    if any(study["drift"] for study in studies):
        parts += [
            "## Stored again",
            "Restored KL after so many cycles of rows restored, rounded to BF16 and stored again.",
            _drift(studies).markdown(),
        ]
    return "\n\n".join(parts) + "\n"


def _setting(study: Kept) -> str:
    setting, restored, whole = (
        study["setting"],
        study["setting"]["restored"],
        study["setting"]["whole"],
    )
    made = sorted(
        {
            f"`{found['command']}` at {found['environment']['commit']}"
            for part in ("candidates", "drift")
            for found in study[part].values()
        }
    )
    environment = next(iter(study["candidates"].values()))["environment"]
    return (
        f"**{setting['model']}** (heads of {setting['head_dim']}, {setting['layers']} layers): "
        f"{restored['windows_per_text']} windows of each of {len(setting['texts'])} texts with "
        f"{restored['prefix']} tokens restored and {restored['suffix']} scored; whole: "
        f"{whole['windows_per_text']} of {whole['tokens']} tokens each. On "
        f"{hardware(environment)}, torch {environment['versions']['torch']}. By "
        + "; ".join(made)
        + "."
    )


def shares(study: Kept) -> dict[str, float]:
    """Restored KL of each candidate, as a share of FP8's."""
    found = study["candidates"]
    fp8 = found[FP8.name]["restored"]["kl"]
    return {name: one["restored"]["kl"] / fp8 for name, one in found.items()}


def _verdicts(studies: list[Kept]) -> list[str]:
    """Whether four bits meet each target, and how many tokens the target leaves."""
    if any(FP8.name not in study["candidates"] for study in studies):
        return [f"No verdict: `{FP8.name}` was not measured on every model."]
    lines = []
    meeting: list[set[str]] = []
    ratios: dict[str, float] = {}
    for study in studies:
        model, of_fp8 = study["setting"]["model"], shares(study)
        target = TARGETS[model]
        fp8 = study["candidates"][FP8.name]["restored"]["kl"]
        meeting.append(
            {
                name
                for name, one in study["candidates"].items()
                if one["restored"]["kl"] + one["restored"]["kl_standard_error"] <= target * fp8
            }
        )
        ratios |= {name: one["times_bf16_at_128"] for name, one in study["candidates"].items()}
        if FOUR_BITS.name in of_fp8:
            share = of_fp8[FOUR_BITS.name]
            lines.append(
                f"{model}: `{FOUR_BITS.name}` restores with {share:.2f} of FP8's KL; at most "
                f"{target:.2f} was asked: {'met' if share <= target else '**missed**'}."
            )
    common = set.intersection(*meeting)
    if common:
        best = max(common, key=lambda name: ratios[name])
        lines.append(
            f"Of these, the most tokens with every target met by a standard error: `{best}`, "
            f"{ratios[best]:.2f}x at heads of 128."
        )
    return lines


def _candidates(studies: list[Kept]) -> Table:
    header = ["candidate", "page", "x BF16, heads of 128"]
    for study in studies:
        name = study["setting"]["model"]
        header += [
            f"{name}: x BF16", "restored KL", "of FP8", "top-1 %", "perplexity", "whole KL",
        ]  # fmt: skip
    first = studies[0]["candidates"]
    names = sorted(first, key=lambda name: first[name]["times_bf16_at_128"])
    return Table(header, [_row(name, studies) for name in names])


def _row(name: str, studies: list[Kept]) -> list[str]:
    first = studies[0]["candidates"][name]
    row = [
        name,
        "any" if first["block"] == 1 else str(first["block"]),
        f"{first['times_bf16_at_128']:.2f}",
    ]
    for study in studies:
        found, fp8 = study["candidates"].get(name), study["candidates"].get(FP8.name)
        if found is None:
            row += ["-"] * 6
            continue
        restored, whole = found["restored"], found.get("whole")
        row += [
            f"{found['times_bf16_here']:.2f}",
            f"{restored['kl']:.1e} ± {restored['kl_standard_error']:.0e}",
            f"{restored['kl'] / fp8['restored']['kl']:.2f}" if fp8 else "-",
            f"{restored['top1_percent']:.1f}",
            f"{restored['perplexity_ratio']:.4f}",
            f"{whole['kl']:.1e}" if whole else "-",
        ]
    return row


def _drift(studies: list[Kept]) -> Table:
    cycles = [
        cycle for study in studies for found in study["drift"].values() for cycle in found["cycles"]
    ]
    columns = list(dict.fromkeys(cycles))
    rows = [
        [study["setting"]["model"], name, *(f"{found['cycles'][c]['kl']:.1e}" for c in columns)]
        for study in studies
        for name, found in study["drift"].items()
    ]
    return Table(["model", "candidate", *columns], rows)
