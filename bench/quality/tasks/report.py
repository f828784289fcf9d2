"""The tasks' tables, in Markdown, from summary.json alone."""

from __future__ import annotations

from typing import Any

from bench.lab import shards
from bench.lab.environment import hardware
from bench.lab.table import Table


def markdown(summary: dict[str, Any]) -> str:
    """A table for each task, and what made it."""
    environment = summary["environment"]
    versions = environment["versions"]
    parts = [
        f"# Right answers after restored prefixes: {summary['model']}",
        "Every item's few-shot prefix came from L2, as the server reported request by request. "
        "Lost, gained: items that bf16 had right and the arm wrong, and the reverse. p: McNemar's "
        "exact test, two-sided. bf16-again: the same requests once more, so its changes are "
        f"noise. {summary['concurrency']} at a time, L1 of {summary['l1_tokens']} tokens"
        f"{shards.described(summary)}.",
    ]
    for name, task in summary["tasks"].items():
        parts += [
            f"## {name}",
            f"{summary['items']} items, {task['prefixes']} prefixes of "
            f"{task['prefix_tokens']:.0f} tokens on average.",
            table(task).markdown(),
        ]
    parts.append(
        f"Made by `{summary['command']}` on {hardware(environment)}; SGLang {versions['sglang']}, "
        f"torch {versions['torch']}, HiQCache {versions['hiqcache']} ({environment['commit']}), "
        f"{environment['time']}."
    )
    return "\n\n".join(parts) + "\n"


def table(task: dict[str, Any]) -> Table:
    """One task by arm, the control first."""
    arms = task["arms"]
    names = sorted(arms, key=lambda name: (not name.startswith("bf16"), name))
    rows = []
    for name in names:
        arm = arms[name]
        kl = "-" if arm["kl"] is None else f"{arm['kl']:.2g}"
        rows.append(
            [
                name,
                f"{arm['accuracy']:.1%}",
                str(arm["lost"]),
                str(arm["gained"]),
                f"{arm['p']:.3f}",
                f"{arm['same'] / len(arm['right']):.1%}",
                kl,
            ]
        )
    return Table(
        ["arm", "accuracy", "lost", "gained", "p", "same answer", "KL at the answer"], rows
    )
