"""No module named like the standard library's where Python would take it for that one.

A module is found by its bare name in the folders of sys.path: the repository's root, and the folder
of a file that is run by its path. Inside a package, names are free: every import is absolute
(test_imports), so `hiqcache.codecs` never answers to `codecs`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Parts of packages that share a name with the standard library all the same, and why.
SHARED = {
    "hiqcache.codecs": "what they are is called codecs in the field",
    "tests.codecs": "its tests",
}


def tracked(pattern: str) -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [Path(line) for line in found.stdout.splitlines() if (ROOT / line).exists()]


def like_the_standard_librarys(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.rpartition(".")[2] in sys.stdlib_module_names}


def modules_in(folder: Path) -> set[str]:
    """What can be imported by its bare name where ``folder`` is on sys.path."""
    inside = [file.relative_to(folder) for file in tracked("*.py") if file.is_relative_to(folder)]
    return {file.parts[0].removesuffix(".py") for file in inside}


def scripts() -> set[Path]:
    """Files that are run by their path, as whatever starts something says."""
    starters = ["Makefile", ".ci/run", "compose.yaml", *tracked("docker/*.Dockerfile")]
    text = "\n".join((ROOT / file).read_text() for file in starters)
    run = set(re.findall(r"(?:python3?|PYTHON\)|/python|LOCUSTFILE=)\W+(?:-I\W+)?(\S+\.py)", text))
    files = tracked("*.py")
    return {file for file in files for path in run if path.endswith((f"/{file.name}", file.name))}


def test_no_bare_name_is_the_standard_librarys() -> None:
    assert like_the_standard_librarys(modules_in(Path())) == set()


def test_no_neighbour_of_a_script_has_a_name_of_the_standard_librarys() -> None:
    started = scripts()
    assert {Path("docker/entrypoint.py"), Path("docker/healthcheck.py")} <= started
    assert Path("loadtest/locustfile.py") in started
    for script in started:
        assert like_the_standard_librarys(modules_in(script.parent)) == set(), script


def test_inside_packages_the_exceptions_are_these() -> None:
    paths = (file.with_suffix("") for file in tracked("*.py"))
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    assert like_the_standard_librarys(modules) == SHARED.keys()


@pytest.mark.parametrize("name", ["queue", "bench.lab.statistics", "loadtest.types"])
def test_such_a_name_is_seen(name: str) -> None:
    assert like_the_standard_librarys([name, "bench.lab.arms"]) == {name}
