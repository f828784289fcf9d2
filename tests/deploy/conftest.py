"""The engine and the images of the tests that need Docker, which run when asked for by marker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hiqcache import __version__
from tests.deploy import engine as docker_engine
from tests.deploy import images
from tests.deploy.engine import Engine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "docker: builds images and runs the Compose stack")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "docker" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="builds 7 GB of images; run by `make compose-test`")
    for item in items:
        if item.get_closest_marker("docker"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    before = set(docker_engine.traces())
    with docker_engine.engine() as found:
        yield found
    if found.own:
        assert set(docker_engine.traces()) == before, "the engine left traces in the network"
        print("engine: ended; no bridge, chain or process of it is left", flush=True)


@pytest.fixture(scope="session")
def missing_images(engine: Engine) -> list[str]:
    """Images that cannot be had here; all others are there, the stack's own built."""
    with images.pip_configuration() as pip_conf:
        missing = images.provide_base_images(engine, pip_conf)
        images.build(engine, __version__)
    return missing
