"""The tables and the plot of a transfer benchmark, made from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.lab.table import Table
from bench.transfers.targets import TOKENS, Row, Target, find, layouts, pages, rows, targets

#: Page sizes of the plot: SGLang's documentation recommends the one, its default is the other.
PLOTTED = (64, 1)


def of_pages(page: int) -> str:
    """A page size in words."""
    return f"pages of {page}"


def summary(result: dict[str, Any], layout: str = "page_first") -> str:
    """The targets in ``layout`` at each page size that has some, met or missed, in Markdown."""
    return "\n\n".join(
        Table(
            (f"{TOKENS:,} tokens of Qwen3-8B's KV, {of_pages(page)}, {layout}", *_TARGET_HEADER),
            [_target_cells(target) for target in stated],
        ).markdown()
        for page in pages(result)
        if (stated := targets(result, page, layout))
    )


_TARGET_HEADER = ("measured", "target", "")


def _target_cells(target: Target) -> tuple[str, ...]:
    measured = ", ".join(f"{value:.3f} {codec}" for codec, value in target.values.items())
    bound = "at least" if target.at_least else "at most"
    return (
        target.name,
        measured,
        f"{bound} {target.limit:.3f}",
        "met" if target.met else "**missed**",
    )


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
    for row in rows(result, "beside"):
        same = {key: row[key] for key in ("page", "direction", "codec", "transfer")}
        at = {"tokens": TOKENS, "layout": "page_first", "slots": "sequential"}
        alone = find(rows(result), **same, **at)
        found.append(row | {"ms_lost": ms_lost(row["slowdown"], alone["ms_median"])})
    return found


def costs(result: dict[str, Any]) -> str:
    """Slowdowns, and what one transfer costs the work beside it: a table for each page size."""
    every = lost(result)
    works = list(dict.fromkeys(row["beside"] for row in every))
    tables = []
    for page in sorted({row["page"] for row in every}, reverse=True):
        paths: dict[str, dict[str, Row]] = {}
        for row in every:
            if row["page"] == page:
                path = f"{row['direction']}: {row['codec']}, {row['transfer']}"
                paths.setdefault(path, {})[row["beside"]] = row
        header = [of_pages(page)]
        for work in works:
            header += [f"{work} slowed", "ms lost"]
        cells = []
        for path, found in paths.items():
            cells.append([path])
            for work in works:
                slowed = found[work]
                cells[-1] += [f"{slowed['slowdown']:.2f}x", f"{slowed['ms_lost']:.2f}"]
        tables.append(Table(header, cells).markdown())
    return "\n\n".join(tables)


def _path(row: Row) -> str:
    """Who moved rows, and what SGLang moved its own with."""
    return f"{row['transfer']}, {row['kernel']}" if row["kernel"] else str(row["transfer"])


def _times(given: list[Row]) -> str:
    """The times of one direction at one page size."""
    header = ("layout", "slots", "tokens", "codec", "transfer", "ms", "share")
    return Table(
        (*header, "ms ahead", "host ms", "GPU MB held"),
        [
            (
                row["layout"],
                row["slots"],
                f"{row['tokens']:,}",
                row["codec"],
                _path(row),
                f"{row['ms_median']:.2f} ({row['ms_p10']:.2f}–{row['ms_p90']:.2f})",
                f"{row['pcie_share']:.2f}",
                *("–" if row[k] is None else f"{row[k]:.2f}" for k in ("ms_ahead", "host_ms")),
                f"{row['staging_bytes'] / 1e6:.1f}",
            )
            for row in given
        ],
    ).markdown()


def _left_out(result: dict[str, Any]) -> list[str]:
    """Who was not measured, and why."""
    if not result.get("left_out"):
        return []
    table = Table(
        ("pages of", "layout", "codec", "transfer", "why"),
        [
            (str(each["page"]), *(each[key] for key in ("layout", "codec", "transfer", "why")))
            for each in result["left_out"]
        ],
    )
    return ["", "## Left out", "", table.markdown()]


def _beside(result: dict[str, Any]) -> list[str]:
    """What runs beside transfers."""
    given = rows(result, "beside")
    doubtful = [row for row in given if not (row["covered"] and row.get("ahead", True))]
    header = ("pages of", "work", "transfers", "codec", "transfer", "alone ms", "beside ms")
    table = Table(
        (*header, "slowdown"),
        [
            (
                str(row["page"]),
                row["beside"],
                row["direction"],
                row["codec"],
                row["transfer"],
                f"{row['ms_alone']:.2f}",
                f"{row['ms_median']:.2f} ({row['ms_min']:.2f}–{row['ms_max']:.2f})",
                f"{row['slowdown']:.2f}{' (?)' if row in doubtful else ''}",
            )
            for row in given
        ],
    )
    return [
        "",
        "## Beside other work",
        "",
        f"Transfers of {TOKENS:,} tokens one after the other, sequential slots, page_first, on one "
        "stream; the work on another. Medians of "
        f"{given[0]['runs'] if given else 0} runs."
        + (
            " (?): the transfers ended too early, or the CPU enqueued them too slowly, so that the "
            "slowdown is understated."
            if doubtful
            else ""
        ),
        "",
        table.markdown(),
        "",
        "What one transfer costs the work beside it, computed: the share of its time that the work "
        "loses, times what the transfer takes alone.",
        "",
        costs(result),
    ]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    measured = pages(result)
    lines = [
        "# Transfers",
        "",
        f"`{result['command']}` on one {result['card']} ({versions}). PCIe ceiling, plain copies: "
        f"{result['pcie_gbps']['h2d']} GB/s to the device, {result['pcie_gbps']['d2h']} GB/s to "
        "the host. Qwen3-8B's KV (36 layers, 8 heads of 128, bf16), pages of "
        f"{', '.join(map(str, measured))}, {result.get('pool_gb', 8)} GB host pools. Medians in "
        "milliseconds, p10 and p90 in brackets; share is that of the PCIe ceiling; ms ahead is the "
        "median where the CPU had enqueued all before the stream began, host ms the CPU's time for "
        "that; MB held is GPU memory beside the KV cache. After stock stands what "
        "SGLang moves rows with: its JIT mover by TMA or by registers, or the staging memory of "
        "its page_first backups.",
        "",
        f"## Targets, at {TOKENS:,} tokens",
        "",
        "The worse of the slot orders counts, and the worse of the codecs.",
    ]
    for layout in dict.fromkeys(name for page in measured for name in layouts(result, page)):
        lines += ["", summary(result, layout)]
    if "ended_early" in result:
        lines += ["", f"**The run ended early.** {result['ended_early']}."]
    lines += _left_out(result)
    for page in measured:
        for direction in ("restore", "backup"):
            given = rows(result, page=page, direction=direction)
            lines += ["", f"## {direction.capitalize()}, {of_pages(page)}", "", _times(given)]
    return "\n".join([*lines, *_beside(result)]) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Median milliseconds at TOKENS tokens, page_first, as bars with p10 to p90."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plotted = [page for page in PLOTTED if page in pages(result)] or pages(result)[:1]
    figure, grid = pyplot.subplots(
        len(plotted), 2, figsize=(11, 0.6 + 3.6 * len(plotted)), sharey="row", squeeze=False
    )
    for panels, page in zip(grid, plotted, strict=True):
        for panel, direction in zip(panels, ("restore", "backup"), strict=True):
            _bars(panel, result, page, direction)
            panel.set_title(f"{direction} of {TOKENS:,} tokens, {of_pages(page)}")
        panels[0].set_ylabel("ms (black: its bytes at the PCIe ceiling)")
    grid[0][0].legend()
    figure.suptitle(f"Qwen3-8B KV, page_first, {result['card']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(panel: Any, result: dict[str, Any], page: int, direction: str) -> None:
    """One panel of the plot."""
    ceiling = result["pcie_gbps"]["h2d" if direction == "restore" else "d2h"]
    whole = rows(result, page=page, direction=direction, layout="page_first", tokens=TOKENS)
    for shift, slots in ((-0.2, "sequential"), (0.2, "random")):
        given = [row for row in whole if row["slots"] == slots]
        places = [index + shift for index in range(len(given))]
        middle = [row["ms_median"] for row in given]
        errors = [
            [row["ms_median"] - row["ms_p10"] for row in given],
            [row["ms_p90"] - row["ms_median"] for row in given],
        ]
        panel.bar(places, middle, 0.36, yerr=errors, label=f"{slots} slots", capsize=2)
        floors = [TOKENS * row["bytes_per_token"] / ceiling / 1e6 for row in given]
        panel.hlines(floors, [p - 0.18 for p in places], [p + 0.18 for p in places], "black")
        panel.set_xticks(range(len(given)), [f"{row['codec']}\n{row['transfer']}" for row in given])


def write(path: Path) -> str:
    """Write the table and the plot beside the JSON at ``path``; returns the targets."""
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(result))
    plot(result, path.with_suffix(".png"))
    return "\n".join(
        f"{'met   ' if target.met else 'MISSED'} {of_pages(page)}, {layout}: {target.name}: "
        f"{target.value:.3f} ({target.limit})"
        for page in pages(result)
        for layout in layouts(result, page)
        for target in targets(result, page, layout)
    )
