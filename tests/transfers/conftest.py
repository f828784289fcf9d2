"""Runs the kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib

import pytest
import torch
import triton

GPU = torch.cuda.is_available()

if not GPU:
    # Triton looks when a kernel is defined. Not by TRITON_INTERPRET: servers that other tests
    # start would inherit that. Reloaded, for another test may have imported the kernels before.
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        importlib.reload(importlib.import_module("hiqcache.transfers.kernels"))


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if GPU else "cpu")
