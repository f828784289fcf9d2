"""A release: one version everywhere, and a wheel that works in an environment of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import prometheus_client
import pytest

from hiqcache import __version__
from tests.model_folders import QWEN3_8B, write

REPOSITORY = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == __version__
    files = [REPOSITORY / "compose.yaml", *(REPOSITORY / "docker").iterdir()]
    found = [
        version
        for file in files
        if file.suffix in (".yaml", ".Dockerfile", ".md")
        for version in re.findall(
            r"(?:hiqcache/[a-z-]+:|ARG VERSION=)(\d[\w.]*\w)", file.read_text()
        )
    ]
    assert len(found) > 10
    assert set(found) == {__version__}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built beside it: building leaves files behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    for name in ("hiqcache", "tests", "bench", "docs"):
        shutil.copytree(
            REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tree / "dist"), str(tree)], check=True)
    (file,) = (tree / "dist").iterdir()
    return file


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"hiqcache-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"hiqcache-{__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{about}/METADATA").decode())
        points = archive.read(f"{about}/entry_points.txt").decode()
    package = {
        str(file.relative_to(REPOSITORY))
        for file in (REPOSITORY / "hiqcache").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in names if not name.startswith(about)} == package
    assert f"{about}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.13,>=3.11"
    assert {"torch", "prometheus-client>=0.20"} <= set(metadata.get_all("Requires-Dist", []))
    assert "hiqcache = hiqcache.sglang.plugin:register" in points
    assert "hiqcache_cpu = hiqcache.sglang.plugin:cpu_platform" in points


def test_it_works_where_nothing_else_of_the_repository_is(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, with the one dependency that a plan needs."""
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"

    def run(*command: str | Path) -> str:
        return subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={"PATH": str(home / "bin")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "prometheus_client").symlink_to(Path(prometheus_client.__file__).parent)

    command = home / "bin" / "hiqcache"
    assert run(command, "--version") == f"hiqcache {__version__}\n"
    planned = run(command, "plan", "--model", write(tmp_path, QWEN3_8B), "--host-gb", "8")
    assert "1.969x" in planned
    assert "note: This Python has no SGLang" in planned
    seen = "import importlib.metadata as m; print(*m.entry_points(group='sglang.srt.plugins'))"
    assert "hiqcache.sglang.plugin:register" in run(python, "-c", seen)
    where = run(python, "-c", "import hiqcache; print(hiqcache.__file__)")
    assert Path(where.strip()).is_relative_to(home)
