"""What targets need is said before anything is built, with the one command that installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.needs import NEEDS, is_library

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The folder of a PATH with what make itself takes, and nothing else."""
    for name in ("make", "bash", "sh", "touch"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    return tmp_path


def install(machine: Path, name: str, status: int = 0) -> None:
    program = machine / name
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)


def make(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", f"PYTHON={sys.executable}", f"VENV={machine / 'venv'}", *arguments],
        cwd=REPOSITORY,
        env={"PATH": str(machine)},
        capture_output=True,
        text=True,
    )


#: A library is not hidden by a PATH.
OF_PROGRAMS = sorted(target for target, names in NEEDS.items() if not any(map(is_library, names)))


@pytest.mark.parametrize("target", OF_PROGRAMS)
def test_a_target_that_lacks_something_builds_nothing_and_says_one_command(
    target: str, machine: Path
) -> None:
    done = make(machine, target)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert not (machine / "venv").exists()
    (line,) = [line for line in done.stderr.splitlines() if "apt-get install" in line]
    assert set(line.split("--no-install-recommends ")[1].split()) == set(NEEDS[target].values())


@pytest.mark.parametrize("target", ["monitoring-test", "dashboards-preview"])
def test_only_what_is_missing_is_named(target: str, machine: Path) -> None:
    install(machine, "node")
    done = make(machine, f"needs-{target}")
    assert "nodejs" not in done.stderr
    assert "prometheus" in done.stderr
    for name in NEEDS[target]:
        install(machine, name)
    assert make(machine, f"needs-{target}").returncode == 0


def test_an_engine_that_answers_is_all_that_the_compose_test_needs(machine: Path) -> None:
    install(machine, "docker", status=0)
    assert make(machine, "needs-compose-test").returncode == 0
    install(machine, "docker", status=1)
    assert "iptables" in make(machine, "needs-compose-test").stderr


def test_ci_installs_what_the_monitoring_test_needs(machine: Path) -> None:
    command = [sys.executable, "-m", "tests.needs", "--packages", "monitoring-test"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PATH": str(machine)}, stdout=subprocess.PIPE
    )
    assert done.stdout.decode().split() == ["nodejs", "npm", "prometheus"]
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert " ".join(command[1:]) in ci
    for target in ("monitoring-test", "storage-test"):
        assert f"-m tests.needs --packages {target}\n" in ci
        assert f"\nmake {target}\n" in ci


def test_a_library_that_is_missing_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDS, "storage-test", {"libc.so.6": "libc6", "libnone.so.9": "libnone9"})
    text = needs.complaint("storage-test")
    assert text is not None
    assert "needs libnone.so.9," in text
    assert text.endswith(" libnone9")
