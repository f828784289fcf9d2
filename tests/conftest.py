"""Fixtures that several folders of tests share."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; run on one by `pytest -m gpu`")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
