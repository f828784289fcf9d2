"""The table and the plot of a transfer benchmark, made from its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

#: The transfer length that targets are stated for.
TOKENS = 2048


class Target(NamedTuple):
    """A figure that was asked for: ``value`` against ``limit``."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the value keeps to the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def find(rows: Iterable[Row], **wanted: object) -> Row:
    """The one row with these values. Raises LookupError if there is none or more than one."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {wanted}")
    return found[0]


def targets(result: dict[str, Any], layout: str) -> list[Target]:
    """The targets of the transfers, for TOKENS tokens in ``layout``; the worse slot order counts.

    What runs beside a transfer is measured in one layout, page_first: it has those targets alone.
    """
    rows = [row for row in result["rows"] if (row["tokens"], row["layout"]) == (TOKENS, layout)]
    orders = sorted({row["slots"] for row in rows})

    def ratio(direction: str, codec: str, base: tuple[str, str], slots: str | None = None) -> float:
        """The worst quotient of medians, fused over base."""
        quotients: list[float] = []
        for order in orders:
            at = {"direction": direction, "slots": order}
            if slots in (None, order):
                ours = find(rows, codec=codec, transfer="fused", **at)
                theirs = find(rows, codec=base[0], transfer=base[1], **at)
                quotients.append(ours["ms_median"] / theirs["ms_median"])
        return max(quotients)

    stock, int8 = ("bf16", "stock"), ("int8", "fused")
    fused = [row for row in rows if row["transfer"] == "fused" and row["codec"] == "int8"]
    found = [
        Target("restore, fused int8 / stock BF16", ratio("restore", "int8", stock), 0.54),
        Target("backup, fused int8 / stock BF16", ratio("backup", "int8", stock), 0.55),
        Target(
            "backup, random slots, fused int8 / stock BF16",
            ratio("backup", "int8", stock, "random"),
            0.45,
        ),
    ]
    for direction in ("backup", "restore"):
        share = min(row["pcie_share"] for row in fused if row["direction"] == direction)
        found += [
            Target(
                f"{direction}, fused int8-rot / fused int8",
                ratio(direction, "int8-rot", int8),
                1.10,
            ),
            Target(f"{direction}, share of the PCIe ceiling", share, 0.85, at_least=True),
        ]
    found.append(Target("fused staging bytes", max(row["staging_bytes"] for row in fused), 0))
    if layout != "page_first":
        return found
    for beside in dict.fromkeys(row["beside"] for row in result["beside"]):
        slowed = {
            (row["codec"], row["transfer"]): row["slowdown"]
            for row in result["beside"]
            if row["beside"] == beside and row["direction"] == "restore"
        }
        found.append(
            Target(f"slowdown of a {beside} beside a restore", slowed[int8], slowed[stock])
        )
    return found


def layouts(result: dict[str, Any]) -> list[str]:
    """The layouts that were measured, SGLang's default first."""
    found = {row["layout"] for row in result["rows"] if row["tokens"] == TOKENS}
    return sorted(found, key=lambda layout: (layout != "page_first", layout))


def summary(result: dict[str, Any], layout: str = "page_first") -> str:
    """The targets in ``layout``, met or missed, as a Markdown table."""
    lines = [
        f"| {TOKENS:,} tokens of Qwen3-8B's KV, {layout} | measured | target | |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {target.name} | {target.value:.3f} | {'at least' if target.at_least else 'at most'} "
        f"{target.limit:.3f} | {'met' if target.met else '**missed**'} |"
        for target in targets(result, layout)
    ]
    return "\n".join(lines)


def ms_lost(slowdown: float, ms: float) -> float:
    """Milliseconds that work loses to one transfer beside it, which takes ``ms`` alone.

    The share of its time that it loses beside transfers, times what a transfer takes.
    """
    return (1 - 1 / slowdown) * ms


def lost(result: dict[str, Any]) -> list[Row]:
    """What one transfer of TOKENS tokens costs the work beside it, in milliseconds, computed.

    A shorter transfer slows it for a shorter time. That work slows the transfer too is left out.
    """
    found = []
    for row in result["beside"]:
        alone = find(
            result["rows"],
            tokens=TOKENS,
            layout="page_first",
            slots="sequential",
            direction=row["direction"],
            codec=row["codec"],
            transfer=row["transfer"],
        )
        found.append(row | {"ms_lost": ms_lost(row["slowdown"], alone["ms_median"])})
    return found


def costs(result: dict[str, Any]) -> str:
    """Slowdowns, and what one transfer costs the work beside it, as a Markdown table."""
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in lost(result):
        key = row["direction"], f"{row['codec']}, {row['transfer']}"
        rows.setdefault(key, {})[row["beside"]] = row
    works = list(dict.fromkeys(row["beside"] for row in result["beside"]))
    lines = [
        f"| | {' | '.join(f'{work} slowed | ms lost' for work in works)} |",
        "| --- |" + " --- | --- |" * len(works),
    ]
    lines += [
        f"| {direction}: {path} | "
        + " | ".join(
            f"{found[work]['slowdown']:.2f}x | {found[work]['ms_lost']:.2f}" for work in works
        )
        + " |"
        for (direction, path), found in rows.items()
    ]
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# Transfers",
        "",
        f"`{result['command']}` on one {result['card']} ({versions}). PCIe ceiling, plain copies: "
        f"{result['pcie_gbps']['h2d']} GB/s to the device, {result['pcie_gbps']['d2h']} GB/s to "
        "the host. Qwen3-8B's KV (36 layers, 8 heads of 128, bf16), page size 1, 8 GB host pools. "
        "Medians in milliseconds, p10 and p90 in brackets; share is that of the PCIe ceiling.",
        "",
        "## Targets, at 2,048 tokens",
        "",
        "The worse of the slot orders counts. A slowdown's limit is that of the stock mover.",
        *(line for layout in layouts(result) for line in ("", summary(result, layout))),
    ]
    if "ended_early" in result:
        lines += ["", f"**The run ended early.** {result['ended_early']}."]
    for direction in ("restore", "backup"):
        lines += [
            "",
            f"## {direction.capitalize()}",
            "",
            "| layout | slots | tokens | codec | transfer | ms | share | staging MB |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row['layout']} | {row['slots']} | {row['tokens']:,} | {row['codec']} | "
            f"{row['transfer']} | {row['ms_median']:.2f} "
            f"({row['ms_p10']:.2f}–{row['ms_p90']:.2f}) | {row['pcie_share']:.2f} | "
            f"{row['staging_bytes'] / 1e6:.1f} |"
            for row in result["rows"]
            if row["direction"] == direction
        ]
    lines += [
        "",
        "## Beside other work",
        "",
        "Transfers of 2,048 tokens one after the other, sequential slots, page_first, on one "
        "stream; the work on another. Medians of "
        f"{result['beside'][0]['runs'] if result['beside'] else 0} runs.",
        "",
        "| work | transfers | codec | transfer | alone ms | beside ms | slowdown |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['beside']} | {row['direction']} | {row['codec']} | {row['transfer']} | "
        f"{row['ms_alone']:.2f} | {row['ms_median']:.2f} ({row['ms_min']:.2f}–"
        f"{row['ms_max']:.2f}) | {row['slowdown']:.2f} |"
        for row in result["beside"]
    ]
    lines += [
        "",
        "What one transfer costs the work beside it, computed: the share of its time that the work "
        "loses, times what the transfer takes alone.",
        "",
        costs(result),
    ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Median milliseconds at TOKENS tokens, page_first, as bars with p10 to p90."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for panel, direction in zip(panels, ("restore", "backup"), strict=True):
        ceiling = result["pcie_gbps"]["h2d" if direction == "restore" else "d2h"]
        for shift, slots in ((-0.2, "sequential"), (0.2, "random")):
            rows = [
                row
                for row in result["rows"]
                if (row["direction"], row["slots"], row["layout"], row["tokens"])
                == (direction, slots, "page_first", TOKENS)
            ]
            places = [index + shift for index in range(len(rows))]
            middle = [row["ms_median"] for row in rows]
            errors = [
                [row["ms_median"] - row["ms_p10"] for row in rows],
                [row["ms_p90"] - row["ms_median"] for row in rows],
            ]
            panel.bar(places, middle, 0.36, yerr=errors, label=f"{slots} slots", capsize=2)
            floors = [TOKENS * row["bytes_per_token"] / ceiling / 1e6 for row in rows]
            panel.hlines(floors, [p - 0.18 for p in places], [p + 0.18 for p in places], "black")
        panel.set_xticks(range(len(rows)), [f"{row['codec']}\n{row['transfer']}" for row in rows])
        panel.set_title(f"{direction} of {TOKENS:,} tokens")
    panels[0].set_ylabel("ms (black: its bytes at the PCIe ceiling)")
    panels[0].legend()
    figure.suptitle(f"Qwen3-8B KV, page_first, {result['card']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(path: Path) -> str:
    """Write the table and the plot beside the JSON at ``path``; returns the targets."""
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(result))
    plot(result, path.with_suffix(".png"))
    return "\n".join(
        f"{'met   ' if target.met else 'MISSED'} {layout}: {target.name}: {target.value:.3f} "
        f"({target.limit})"
        for layout in layouts(result)
        for target in targets(result, layout)
    )
