"""Runs the kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()

if not GPU:
    # Read when the kernels' module is imported, so before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if GPU else "cpu")
