"""Fixtures that several folders of tests share."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
import torch

from bench.lab import models, random_model

# SGLang chooses its platform when it is first imported.
if not torch.cuda.is_available():
    os.environ["SGLANG_PLATFORM"] = "hiqcache_cpu"
    # Triton's own functions run in its interpreter if this is set when Triton is first imported,
    # which SGLang does too. Taken back, so that servers under test don't inherit it.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton")
    del os.environ["TRITON_INTERPRET"]

_DEVICES = ["cpu"]
if torch.cuda.is_available():
    _DEVICES.append("cuda")
if torch.backends.mps.is_available():
    _DEVICES.append("mps")


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that torch has here."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokens, in two layers of random weights: for servers whose answers nobody reads."""
    out = tmp_path_factory.mktemp("quick") / "model"
    return random_model.write(models.prepare(), out, num_hidden_layers=2)


def pytest_configure() -> None:
    # Beside each other (pytest -n), tests leave the other cores to the servers under test.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Servers of several workers would run short of memory, now and then: groups must be obeyed."""
    if not session.config.getoption("loadgroup", default=False):
        return
    lost = [
        item.nodeid
        for item in session.items
        if item.get_closest_marker("e2e") and not item.nodeid.endswith("@servers")
    ]
    if lost:
        pytest.exit(f"pytest-xdist does not see the group of {lost[0]}: see requirements/dev.in", 3)


#: A proxy that reaches nothing, and no exceptions from it; what the caller has.
_DEAD_PROXY: dict[str, str | None] = {
    **dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"),
    **dict.fromkeys(("no_proxy", "NO_PROXY")),
}
_CALLERS = {name: os.environ.get(name) for name in _DEAD_PROXY}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Every test runs behind a proxy that reaches nothing, as on many a company's machine: what asks
    # a server on loopback by way of it fails. Docker's tests fetch base images by the caller's own.
    docker = item.get_closest_marker("docker") is not None
    for name, value in (_CALLERS if docker else _DEAD_PROXY).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests name the settings they want; the caller's shell has no say."""
    for name in list(os.environ):
        if name.startswith("HIQCACHE_"):
            monkeypatch.delenv(name)


# Before pytest-xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # One worker (pytest -n) runs them all: each server takes 4 GB and wants 10 GiB left free.
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("servers"))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; run on one by `pytest -m gpu`")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
