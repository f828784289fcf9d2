"""The quality table, in Markdown, from summary.json alone."""

from __future__ import annotations

from typing import Any

from bench.lab import shards
from bench.lab.arms import title
from bench.lab.environment import hardware
from bench.lab.table import Table
from bench.lab.texts import TEXTS

#: Rows that are no arm's: BF16 or FP16 without any codec, in other shapes.
NOISE = {
    "cold": "noise: {0}, cold prefill (another shape)",
    "batched": "noise: {0} restored, two requests per batch",
}

_PRECISION = {"bfloat16": "BF16", "float16": "FP16"}


def table(summary: dict[str, Any]) -> Table:
    """Quality of each arm against the same requests with their prefix still in L1."""
    rows = []
    for name, arm in summary["arms"].items():
        ratio, kl, top = (arm[key] for key in ("perplexity_ratio", "kl_mean", "top1_agreement"))
        rows.append(
            (
                _row_title(name, _PRECISION[summary["dtype"]]),
                f"{ratio['value']:.4f} ({ratio['low']:.4f}–{ratio['high']:.4f})",
                f"{kl['value']:.3g} ({kl['low']:.2g}–{kl['high']:.2g})",
                f"{arm['kl_p99']['value']:.2g}",
                f"{top['value']:.2%}",
                _greedy(arm["greedy"]),
                _recalled(arm, "needle"),
                _recalled(arm, "key-value"),
                f"{arm['identical']} of {arm['comparable']}",
            )
        )
    header = ("arm", "perplexity ratio", "mean KL (nats)", "p99 KL", "top-1", "greedy agreement")
    return Table((*header, "needle", "key-value", "bit-identical"), rows)


def _row_title(name: str, precision: str) -> str:
    """``precision``: what the model computes in, and with it SGLang's own rows."""
    if name in NOISE:
        return NOISE[name].format(precision)
    return f"{title(name).replace('BF16', precision)}, restored from L2"


def markdown(summary: dict[str, Any]) -> str:
    """The whole report."""
    met, size, environment = summary["acceptance"], summary["size"], summary["environment"]
    versions = environment["versions"]
    titles = "; ".join(TEXTS[name].title for name in summary["texts"])
    share = met["int8_rot_kl_share_of_int8"]
    lines = [
        f"# Quality of restored prefixes: {summary['model']}",
        "",
        table(summary).markdown(),
        "",
        "Reference: the same request while its prefix was still in L1. The noise rows have no "
        "codec at all: they are what other shapes of the same sums change in "
        f"{_PRECISION[summary['dtype']]}. Intervals: 95 %, bootstrap over windows. Needle, "
        "key-value: answers whose every token was the model's "
        "first choice, and in brackets how many the reference got. "
        f"Texts: {titles}; {size['windows']} windows each, {size['prefix']} tokens restored, "
        f"{size['suffix']} scored{shards.described(summary)}.",
        "",
        *_promises(met, share),
        "",
        "Share of the scored prefixes that came from L2, as the server reported request by "
        f"request: {_shares(summary)}. KL counts the {size['top']} most probable tokens one by "
        f"one and the rest as one lump; whole distributions, asked for one window of each text, "
        f"give: {_lumping(summary)}.",
        "",
        "## Each text",
        "",
        _texts(summary).markdown(),
        "",
        "## Recall by depth",
        "",
        _depths(summary).markdown(),
        "",
        f"Made by `{summary['command']}` on {hardware(environment)}; SGLang {versions['sglang']}, "
        f"torch {versions['torch']}, HiQCache {versions['hiqcache']} ({environment['commit']}), "
        f"{environment['time']}.",
    ]
    return "\n".join(lines) + "\n"


def _promises(met: dict[str, Any], share: dict[str, float] | None) -> list[str]:
    lines = [
        "- SGLang's own L2 restored equals L1 bit by bit: "
        f"{_verdict(met['bf16_restored_identical'])}."
    ]
    if share:
        lines.append(
            f"- int8-rot's mean KL is {share['value']:.2f} times "
            f"({share['low']:.2f}–{share['high']:.2f}) int8's; promised at most "
            f"{met['int8_rot_kl_at_most']}: {_verdict(met['int8_rot_kl_met'])}."
        )
    if met["int8_perplexity_ratio"] is not None:
        lines.append(
            f"- int8's perplexity ratio is {met['int8_perplexity_ratio']:.4f}; promised at most "
            f"{met['int8_perplexity_ratio_at_most']}: {_verdict(met['int8_perplexity_ratio_met'])}."
        )
    return lines


def _verdict(met: bool | None) -> str:
    return "not measured" if met is None else "met" if met else "**missed**"


def _greedy(greedy: dict[str, float] | None) -> str:
    if greedy is None:
        return "–"
    return (
        f"{greedy['agreed_mean']:.1f} of {greedy['tokens']} tokens, "
        f"{greedy['agreed_whole']:.0%} whole"
    )


def _recalled(arm: dict[str, Any], kind: str) -> str:
    found = arm["recall"].get(kind)
    if found is None:
        return "–"
    return f"{found['recalled']}/{found['questions']} ({found['reference_recalled']})"


def _shares(summary: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {arm['host_share']:.1%}"
        for name, arm in summary["arms"].items()
        if name not in NOISE
    )


def _lumping(summary: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {lump['kl_lumped']:.3g} lumped and {lump['kl_whole']:.3g} whole"
        for name, lump in ((name, arm["lumping"]) for name, arm in summary["arms"].items())
        if lump["kl_whole"] is not None and name != "bf16"
    )


def _texts(summary: dict[str, Any]) -> Table:
    return Table(
        ("text", "arm", "perplexity", "ratio", "mean KL", "p99 KL", "top-1"),
        [
            (
                text,
                name,
                f"{own['perplexity']:.2f}",
                f"{own['perplexity_ratio']:.4f}",
                f"{own['kl_mean']:.3g}",
                f"{own['kl_p99']:.2g}",
                f"{own['top1_agreement']:.2%}",
            )
            for text in summary["texts"]
            for name, arm in summary["arms"].items()
            for own in [arm["texts"][text]]
        ],
    )


def _depths(summary: dict[str, Any]) -> Table:
    return Table(
        ("arm", "kind", "depth: recalled of asked"),
        [
            (
                name,
                kind,
                ", ".join(
                    f"{depth}: {own['recalled']} of {own['questions']}"
                    for depth, own in found["by_depth"].items()
                ),
            )
            for name, arm in summary["arms"].items()
            for kind, found in arm["recall"].items()
        ],
    )
