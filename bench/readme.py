"""Fills the documents' tables from results/, or checks that they are what results/ says.

    python -m bench.readme [--check] [DOCUMENT ...]

A block stands between <!-- results:NAME --> and <!-- /results:NAME -->. Nothing else is touched.
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

from bench import REPOSITORY, demo, findings
from bench.clients import report as clients
from bench.lab.environment import hardware
from bench.quality import report as quality
from bench.quality.tasks import report as tasks
from bench.soak import report as soak
from bench.tiers import tables
from bench.traces import report as traces
from bench.traces import tables as trace_tables
from bench.transfers import report as transfers
from bench.verify import report as verify

DOCUMENTS = tuple(REPOSITORY / name for name in ("README.md", "docs/results.md", "docs/clients.md"))

_BLOCK = re.compile(
    r"<!-- results:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- /results:(?P=name) -->", re.DOTALL
)
_MARKER = re.compile(r"<!-- /?results:[\w-]+ -->")

Result = dict[str, Any]
Loader = Callable[[Path], str]


class ReadmeError(ValueError):
    """A document that cannot be filled; the text says where."""


def made(result: Result) -> str:
    """What made a result, by its own record: hardware, versions, commit and date."""
    setup = result.get("setup") or result.get("made_by") or result
    environment = setup.get("environment")
    if environment is None:
        versions = ", ".join(f"{name} {number}" for name, number in setup["versions"].items())
        card = setup.get("card")
        on = " on " + (card if isinstance(card, str) else "; ".join(card)) if card else ""
        return f"Measured{on} ({versions}). Its record names no commit."
    versions = environment["versions"]
    return (
        f"Measured on {hardware(environment)}, {environment['time'][:10]}, at commit "
        f"{environment['commit'] or '(none recorded)'} (SGLang {versions['sglang']}, torch "
        f"{versions['torch']})."
    )


def _one(file: str, render: Callable[[Result], str]) -> Loader:
    def block(results: Path) -> str:
        result = _load(results / file)
        return f"{render(result)}\n\n{made(result)}"

    return block


def _traces(results: Path) -> str:
    found = traces.simulations(results / "traces")
    if not found:
        raise ReadmeError(f"{results / 'traces'} holds no simulation")
    return f"{trace_tables.traces(found).markdown()}\n\n{made(found[0])}"


def _replays(results: Path) -> str:
    found = traces.replays(results / "traces")
    if not found:
        raise ReadmeError(f"{results / 'traces'} holds no replay")
    return f"{trace_tables.replays(found).markdown()}\n\n{made(found[0])}"


def _tasks(summary: Result) -> str:
    return "\n\n".join(
        f"{name}: {summary['items']} items, {task['prefixes']} prefixes of "
        f"{task['prefix_tokens']:.0f} tokens on average\n\n{tasks.table(task).markdown()}"
        for name, task in summary["tasks"].items()
    )


def _soaks(results: Path) -> str:
    """The soaks on a GPU, a file for each arm, which ran beside each other."""
    found = [_load(file) for file in sorted((results / "soak" / "h200").glob("*.json"))]
    if not found:
        raise ReadmeError(f"{results / 'soak' / 'h200'} holds no soak")
    every = {name: arm for document in found for name, arm in document["arms"].items()}
    return f"{soak.table({'arms': every}).markdown()}\n\n{made(found[0]['sessions'][-1])}"


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _verified(result: Result) -> str:
    return verify.table(result).markdown()


#: What can stand in a document, by name.
BLOCKS: Mapping[str, Loader] = MappingProxyType(
    {
        "setting": findings.setting,
        "headline": lambda results: (
            f"{findings.headline(results).markdown()}\n\n"
            f"{made(_load(results / 'h200' / 'same_bytes.json'))}"
        ),
        "findings": findings.findings,
        "plan": lambda _: _code(findings.planned()),
        "demo-large": _one(
            "demo/summary.json", lambda summary: _code(demo.tables(summary, "large"))
        ),
        "demo": _one("demo/summary.json", lambda summary: _code(demo.tables(summary))),
        "server": _one("h200/server.json", _verified),
        "server-smollm2": _one("h200/server_smollm2.json", _verified),
        "server-tp2": _one("h200/server_tp2.json", _verified),
        "transfers": _one("h200/transfers.json", transfers.summary),
        "beside": _one("h200/transfers.json", transfers.costs),
        "quality": _one(
            "quality/SmolLM2-135M-Instruct/summary.json", lambda s: quality.table(s).markdown()
        ),
        "quality-float16": _one(
            "quality/SmolLM2-135M-Instruct-float16/summary.json",
            lambda s: quality.table(s).markdown(),
        ),
        "quality-qwen": _one(
            "quality/Qwen2.5-Coder-0.5B-Instruct-float16/summary.json",
            lambda s: quality.table(s).markdown(),
        ),
        "tasks": _one("quality-tasks/Qwen2.5-Coder-0.5B-Instruct/summary.json", _tasks),
        "soak": _soaks,
        "same-tokens": _one("h200/same_tokens.json", lambda s: tables.same_tokens(s).markdown()),
        "same-bytes": _one("h200/same_bytes.json", lambda s: tables.same_bytes(s).markdown()),
        "pairs": _one("h200/same_bytes.json", lambda s: tables.pairs(s).markdown()),
        "l3": _one("l3/smollm2/l3.json", lambda s: tables.l3(s).markdown()),
        "l3-heads-of-128": _one("l3/heads-of-128/l3.json", lambda s: tables.l3(s).markdown()),
        "clients": _one("clients/cpu.json", lambda found: clients.table(found).markdown()),
        "sweep": _one("h200/sweep.json", lambda s: tables.sweep(s).markdown()),
        "traces": _traces,
        "replays": _replays,
    }
)


def fill(text: str, results: Path) -> str:
    """``text`` with every block filled. Raises ReadmeError for an unknown name or lost marker."""

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in BLOCKS:
            raise ReadmeError(f"results:{name} is unknown; known: {', '.join(BLOCKS)}")
        try:
            body = BLOCKS[name](results)
        except FileNotFoundError as error:
            raise ReadmeError(
                f"{error.filename} does not exist, so results:{name} cannot be filled"
            ) from error
        return f"<!-- results:{name} -->\n{body}\n<!-- /results:{name} -->"

    filled, blocks = _BLOCK.subn(replace, text)
    if 2 * blocks != len(_MARKER.findall(text)):
        raise ReadmeError(
            "a results marker has no partner: <!-- results:X --> … <!-- /results:X -->"
        )
    return filled


def _load(file: Path) -> Result:
    loaded: Result = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def bring_up_to_date(document: Path, results: Path, check: bool) -> bool:
    """Fill ``document``, or with ``check`` say how it differs; whether it is up to date now.

    Raises ReadmeError.
    """
    text = document.read_text(encoding="utf-8")
    filled = fill(text, results)
    if filled == text:
        return True
    if not check:
        document.write_text(filled, encoding="utf-8")
        return True
    sys.stderr.writelines(
        difflib.unified_diff(
            text.splitlines(True), filled.splitlines(True), document.name, "from results/"
        )
    )
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="fail where a block is out of date")
    parser.add_argument("documents", nargs="*", type=Path, metavar="DOCUMENT")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "results")
    options = parser.parse_args()
    good = True
    for document in options.documents or DOCUMENTS:
        try:
            good &= bring_up_to_date(document, options.results, options.check)
        except ReadmeError as error:
            print(f"{document}: {error}", file=sys.stderr)
            good = False
    if not good and options.check:
        print("run `python -m bench.readme`", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
