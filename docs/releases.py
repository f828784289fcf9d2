"""Keeps what passed on one release of SGLang, for docs/compatibility.md (make releases).

    python -m docs.releases JUNIT_XML ...

To be run by the Python that ran the tests: the release is the one that is installed there.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "results" / "releases"


class Count(NamedTuple):
    """Cases of one test: how many passed, and how many did otherwise (skipped ones are neither)."""

    passed: int = 0
    failed: int = 0


class Release(NamedTuple):
    """What passed on a release. tests: by file::function."""

    sglang: str
    tests: dict[str, Count]

    def of(self, where: str) -> Count:
        """The cases of a test (file::function), or of all in a file."""
        found = [
            count for name, count in self.tests.items() if f"{name}::".startswith(f"{where}::")
        ]
        return Count(sum(count.passed for count in found), sum(count.failed for count in found))


def read_all(folder: Path = RESULTS) -> list[Release]:
    """Every release that results are kept of, the newest first."""
    kept = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    releases = [
        Release(each["sglang"], {name: Count(*count) for name, count in each["tests"].items()})
        for each in kept
    ]
    return sorted(releases, key=lambda release: _number(release.sglang), reverse=True)


def counts(reports: Iterable[Path]) -> dict[str, Count]:
    """Cases by test, from pytest's JUnit files."""
    found: dict[str, Count] = defaultdict(Count)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            function = case.attrib["name"].partition("[")[0]
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{function}"
            outcomes = {child.tag for child in case} - {"properties", "system-out", "system-err"}
            passed, failed = found[name]
            if not outcomes:
                found[name] = Count(passed + 1, failed)
            elif outcomes != {"skipped"}:
                found[name] = Count(passed, failed + 1)
    return dict(sorted(found.items()))


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the results; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.releases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="JUNIT_XML")
    release = version("sglang")
    kept = {
        "sglang": release,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "cpu": platform.machine(),
        "command": "make releases",
        "tests": counts(parser.parse_args(argv).reports),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"sglang-{release}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
