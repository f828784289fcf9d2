"""What a figure was made with: versions, hardware, commit. Never names, addresses or paths."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import REPOSITORY

_PACKAGES = ("hiqcache", "sglang", "torch", "triton", "transformers", "numpy")


def describe() -> dict[str, Any]:
    """Versions, hardware, commit and time, for JSON."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Versions of what a kernel's time depends on."""
    return {
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        **{name: _version(name) or "none" for name in ("torch", "triton", "sglang")},
    }


def config_digest(model: Path) -> str:
    """Tells models apart whose folders have the same name: of SHA-256 of config.json, a part."""
    return hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:12]


def hardware(environment: dict[str, Any]) -> str:
    """One line for a table's caption."""
    if environment["gpus"]:
        return f"{len(environment['gpus'])} x {environment['gpus'][0]}"
    return f"{environment['cores']} cores of {environment['cpu']}, no GPU"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, with ``+changes`` where the tree is not what it was.

    BENCH_COMMIT names it on a host that was handed a copy of the tree without its history.
    """
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+changes"],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        # A copy of the tree without its history, as on a host that was handed an archive.
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
