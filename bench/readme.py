"""Fills a README's tables from results/, or checks that they are what results/ says.

    python -m bench.readme --check|--write [README]

A table stands between <!-- results:NAME --> and <!-- /results:NAME -->. Nothing else is touched.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import REPOSITORY, demo
from bench.quality import report as quality
from bench.tiers import tables
from bench.traces import report as traces
from bench.traces import tables as trace_tables
from bench.transfers import report as transfers

_BLOCK = re.compile(
    r"<!-- results:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- /results:(?P=name) -->", re.DOTALL
)
_MARKER = re.compile(r"<!-- /?results:[\w-]+ -->")

Loader = Callable[[Path], str]


class ReadmeError(ValueError):
    """A README that cannot be filled; the text says where."""


def _one(file: str, render: Callable[[dict[str, Any]], str]) -> Loader:
    return lambda results: render(_load(results / file))


def _traces(results: Path) -> str:
    found = traces.simulations(results / "traces")
    if not found:
        raise ReadmeError(f"{results / 'traces'} holds no simulation")
    return trace_tables.traces(found).markdown()


def _replays(results: Path) -> str:
    found = traces.replays(results / "traces")
    if not found:
        raise ReadmeError(f"{results / 'traces'} holds no replay")
    return trace_tables.replays(found).markdown()


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _verified(summary: dict[str, Any]) -> str:
    """bench.verify's counts: what a running server held, and what its restores answered."""
    lines = [
        "| arm | L2 tokens | restored answers bit-equal to L1 hits | requests under pressure | of "
        "them restored | mismatches | largest change of a log-probability | would be seen from |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, found in summary["arms"].items():
        exact = found["exact"]
        cells = [
            arm,
            f"{found['capacity']['host_total_tokens']:,.0f}",
            f"{exact['equal']} of {exact['compared']}",
        ]
        # What a time limit or a crash has cut short shows.
        pressure = found.get("pressure")
        cells += (
            [
                f"{pressure['requests']:,}",
                f"{pressure['restored_requests']:,}",
                str(pressure["mismatches"]),
                f"{pressure['largest_change_restored']:.2f}",
                f"{pressure['bound']:.2f}",
            ]
            if pressure
            else ["not finished", *["–"] * 4]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


#: What can stand in a README, by name.
TABLES: Mapping[str, Loader] = MappingProxyType(
    {
        "demo": _one("demo/summary.json", lambda summary: _code(demo.tables(summary))),
        "server": _one("h200/server.json", _verified),
        "server-smollm2": _one("h200/server_smollm2.json", _verified),
        "server-tp2": _one("h200/server_tp2.json", _verified),
        "transfers": _one("h200/transfers.json", transfers.summary),
        "beside": _one("h200/transfers.json", transfers.costs),
        "quality": _one("quality/SmolLM2-135M-Instruct/summary.json", quality.table),
        "quality-float16": _one(
            "quality/SmolLM2-135M-Instruct-float16/summary.json", quality.table
        ),
        "same-tokens": _one("h200/same_tokens.json", lambda s: tables.same_tokens(s).markdown()),
        "same-bytes": _one("h200/same_bytes.json", lambda s: tables.same_bytes(s).markdown()),
        "pairs": _one("h200/same_bytes.json", lambda s: tables.pairs(s).markdown()),
        "sweep": _one("h200/sweep.json", lambda s: tables.sweep(s).markdown()),
        "traces": _traces,
        "replays": _replays,
    }
)


def fill(text: str, results: Path) -> str:
    """``text`` with every block filled. Raises ReadmeError for an unknown name or lost marker."""

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in TABLES:
            raise ReadmeError(f"results:{name} is unknown; known: {', '.join(TABLES)}")
        return f"<!-- results:{name} -->\n{TABLES[name](results)}\n<!-- /results:{name} -->"

    filled, blocks = _BLOCK.subn(replace, text)
    if 2 * blocks != len(_MARKER.findall(text)):
        raise ReadmeError(
            "a results marker has no partner: <!-- results:X --> … <!-- /results:X -->"
        )
    return filled


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ReadmeError(f"{file} does not exist, so its table cannot be filled") from error
    return loaded


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail where a table is out of date")
    what.add_argument("--write", action="store_true", help="bring the tables up to date")
    parser.add_argument("readme", nargs="?", type=Path, default=REPOSITORY / "README.md")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "results")
    options = parser.parse_args()
    text = options.readme.read_text(encoding="utf-8")
    try:
        filled = fill(text, options.results)
    except ReadmeError as error:
        print(f"{options.readme}: {error}", file=sys.stderr)
        return 1
    if options.write:
        options.readme.write_text(filled, encoding="utf-8")
        return 0
    if filled == text:
        return 0
    sys.stderr.writelines(
        difflib.unified_diff(
            text.splitlines(True), filled.splitlines(True), "README", "README from results/"
        )
    )
    print("run `python -m bench.readme --write`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
