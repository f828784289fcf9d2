"""Registers the marker of the tests that need a Docker engine; they run when asked for by name."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "docker: builds images and runs the Compose stack")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "docker" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="builds 7 GB of images; run by `make compose-test`")
    for item in items:
        if item.get_closest_marker("docker"):
            item.add_marker(skip)
