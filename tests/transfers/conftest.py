"""Runs the kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

GPU = torch.cuda.is_available()

if not GPU:
    # Triton looks when a kernel is defined; another test may have imported the kernels before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in (
            "kernel_codec",
            "kernels",
            "page_tiles",
            "page_kernel_code",
            "checksum_kernel",
        ):
            importlib.reload(importlib.import_module(f"hiqcache.transfers.{name}"))


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again when a kernel runs."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if GPU else "cpu")
