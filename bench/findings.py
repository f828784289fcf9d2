"""What README says of the measurements: one table and a few lines, from results/ alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lab.arms import title
from bench.lab.shapes import QWEN3_8B
from bench.lab.table import Table, ms, ratio
from bench.transfers import targets
from hiqcache.compatibility import FAMILIES
from hiqcache.host_pools import HostPool, Model
from hiqcache.plan import PAGE_SIZE, as_table, plan

Result = dict[str, Any]


def load(file: Path) -> Result:
    """A result. Raises FileNotFoundError and ValueError."""
    loaded: Result = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def setting(results: Path) -> str:
    """What headline was measured with, in a sentence or two."""
    summary = load(results / "h200" / "same_bytes.json")
    work, stock = summary["workload"], summary["arms"]["bf16"]
    gpus = summary["setup"]["environment"]["gpus"]
    dummy = ", dummy weights" if summary["setup"]["dummy_weights"] else ""
    asked = (
        f"{work['requests']} requests over {work['groups']} prefixes of {work['prefix']:,} tokens"
    )
    held = stock["l2_tokens"], summary["arms"]["int8"]["l2_tokens"]
    if held[0] < work["groups"] * work["prefix"] < held[1]:
        workload = (
            f"The workload is one that L2's size decides: {asked}, more than BF16's L2 holds and "
            "less than int8's"
        )
    else:
        workload = f"The workload is not one that L2's size decides: {asked}"
    return (
        f"One {gpus[0]}, {summary['setup']['model']}{dummy}, {stock['l2_bytes'] / 1e9:.0f} GB of "
        f"L2 per arm. {workload}, from empty caches. Pages of "
        f"{_tokens(summary['setup'].get('page_size', 1))}. Brackets: 95 % intervals."
    )


def headline(results: Path) -> Table:
    """The same bytes of L2: what each arm held, hit and answered in."""
    summary = load(results / "h200" / "same_bytes.json")
    rows = []
    for name, arm in summary["arms"].items():
        pooled = summary["pooled"].get(name)
        rows.append(
            (
                title(name),
                f"{arm['l2_tokens']:,}",
                f"{arm['hit_ratio']:.1%}",
                ms(arm["ttft_ms"]["mean"]),
                ratio(pooled["ttft_ratio"]) if pooled else "1",
                f"{arm['output_tokens_per_s']:.0f}",
            )
        )
    return Table(
        ("L2", "L2 tokens", "hit ratio", "mean TTFT (ms)", "of BF16's", "output tokens per s"), rows
    )


def findings(results: Path) -> str:
    """The findings, a line each, with links to the tables behind them."""
    lines = (_speed, _beside, _fidelity, _correct, _where)
    return "\n".join(f"- {line(results)}" for line in lines)


def _speed(results: Path) -> str:
    result = load(results / "h200" / "transfers.json")
    parts, met = [], []
    for page in targets.pages(result):
        found = targets.targets(result, page, "page_first")
        if not found:
            continue
        values = {target.name: target.value for target in found}
        parts.append(
            f"{values['restore / stock']:.2f} (restore) and {values['backup / stock']:.2f} "
            f"(backup) of SGLang's own time at pages of {_tokens(page)}, by "
            f"{targets.STATED_FOR[page]}"
        )
        met += [target.met for target in found]
    caveat = (
        " SGLang's own backup is slow there and faster at larger pages, where that ratio does not "
        "hold."
    )
    return (
        f"**Transfers** of {targets.TOKENS:,} tokens take {'; '.join(parts)}."
        f"{caveat if targets.pages(result) == [1] else ''} {_missed(met)} "
        "([which](docs/results.md#speed-of-transfers))."
    )


def _missed(met: Sequence[bool]) -> str:
    if all(met):
        return f"All {len(met)} targets are met"
    return f"{met.count(False)} of {len(met)} targets are **missed**"


def _tokens(page: int) -> str:
    return "one token" if page == 1 else f"{page} tokens"


def _beside(results: Path) -> str:
    result = load(results / "h200" / "transfers.json")
    measured = {row["page"] for row in targets.rows(result, "beside")}
    pages = sorted(measured & targets.STATED_FOR.keys(), reverse=True)
    slowed = {
        (page, work, direction): tuple(
            round(targets.Setting(result, page, "page_first").slowdown(work, direction, *whose), 2)
            for whose in (("int8", targets.STATED_FOR[page]), ("bf16", "stock"))
        )
        for page in pages
        for work in ("decode step", "gemm")
        for direction in ("restore", "backup")
    }

    def said(work: str, direction: str) -> str:
        return "{:.2f} ({:.2f})".format(*slowed[pages[0], work, direction])

    names = {"decode step": "a decode step", "gemm": "a GEMM"}
    more = []
    for page in pages:
        lost = [
            f"{names[work]} beside {direction}s"
            for (at, work, direction), (ours, stock) in slowed.items()
            if at == page and ours > stock
        ]
        more += [f"{', '.join(lost)} (pages of {_tokens(page)})"] if lost else []
    return (
        "**Beside other work** a transfer slows it, in brackets SGLang's own: a decode step "
        f"{said('decode step', 'restore')} times beside restores and "
        f"{said('decode step', 'backup')} beside backups, a GEMM {said('gemm', 'restore')} and "
        f"{said('gemm', 'backup')}, at pages of {_tokens(pages[0])}. Slowed more than by "
        f"SGLang's own: {'; '.join(more) or 'nothing'} "
        "([beside other work](docs/results.md#beside-other-work))."
    )


def _fidelity(results: Path) -> str:
    arms = load(results / "quality" / "SmolLM2-135M-Instruct" / "summary.json")
    met, found = arms["acceptance"], arms["arms"]
    noise = sorted(found[name]["kl_mean"]["value"] for name in ("cold", "batched"))
    share, greedy = met["int8_rot_kl_share_of_int8"], found["int8"]["greedy"]
    floor = found["batched"]["greedy"] or found["cold"]["greedy"]
    beside = f"{floor['agreed_whole']:.0%}" if floor else "was not measured"
    return (
        f"**Fidelity**, {arms['model']}: restored int8 prefixes change next-token distributions "
        f"by a mean KL of {found['int8']['kl_mean']['value']:.3g} nats; BF16's own noise, the same "
        f"sums in other shapes, is {noise[0]:.3g} to {noise[1]:.3g}. int8-rot has "
        f"{share['value']:.2f} of int8's; at most {met['int8_rot_kl_at_most']} was the target, "
        f"{'met' if met['int8_rot_kl_met'] else '**missed**'}. {greedy['agreed_whole']:.0%} of "
        f"int8's greedy answers agree whole; noise's share {beside}. An FP8 KV cache has "
        f"{found['fp8']['kl_mean']['value']:.3g} nats ([quality](docs/results.md#quality))."
    )


def _correct(results: Path) -> str:
    result = load(results / "h200" / "server.json")
    done = {name: found for name, found in result["arms"].items() if "pressure" in found}
    requests = sum(found["pressure"]["requests"] for found in done.values())
    restored = sum(found["pressure"]["restored_requests"] for found in done.values())
    wrong = sum(found["pressure"]["mismatches"] for found in done.values())
    return (
        f"**Restored answers** under pressure: {wrong} mismatches in {requests:,} requests, "
        f"{restored:,} of them restored, on {', '.join(done)} "
        "([restores on servers](docs/results.md#restores-on-running-servers))."
    )


def _where(results: Path) -> str:
    summary = load(results / "h200" / "sweep.json")
    fits = summary["fits_ttft_ratio"]["int8"]
    rows = [row for row in summary["rows"] if row["arm"] == "int8"]
    best = min(rows, key=lambda row: float(row["ttft_ratio"]["value"]))
    at_best = best["ttft_ratio"]["value"]
    falls = "falls to" if at_best < 1 else "does not fall: it is"
    fitting = (
        "it is shorter too"
        if fits["high"] < 1
        else "it is longer"
        if fits["low"] > 1
        else "there is nothing to gain"
    )
    return (
        f"**Where it helps**: the mean TTFT {falls} {at_best:.2f} of BF16's "
        f"at best ({best['groups']} prefixes of {best['prefix']:,} tokens). Where everything fits "
        f"BF16's L2 {fitting}: {fits['value']:.2f} "
        f"({fits['low']:.2f}–{fits['high']:.2f}) ([sweep](docs/results.md#the-sweep))."
    )


def planned() -> str:
    """`hiqcache plan` for Qwen3-8B and 8 GB of L2."""
    model = Model(Path("Qwen3-8B"), FAMILIES["plain"], (HostPool("kv", QWEN3_8B),), source="")
    return as_table(plan(model, 8, PAGE_SIZE))
