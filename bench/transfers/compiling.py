"""Compiles kernels on all of the host's cores before anything is measured."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from bench.transfers.contenders import OURS, DevicePool, ours
from hiqcache.record import CHUNK_TOKENS, Order

Job = TypeVar("Job")

#: Host memory of a pool that nothing is moved into.
HOST_BYTES = 1 << 26


def compile_all(jobs: Sequence[Job], build: Callable[[Job], object]) -> dict[Job, str | None]:
    """Has ``build`` put each job's kernels into Triton's cache; what went wrong with each, or None.

    ``build`` is a module's function: it is called in processes of their own.
    """
    unique = list(dict.fromkeys(jobs))
    context = multiprocessing.get_context("spawn")
    workers = min(len(unique), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return dict(zip(unique, pool.map(partial(_fault, build), unique), strict=True))


def _fault(build: Callable[[Job], object], job: Job) -> str | None:
    try:
        build(job)
    except Exception as error:  # Triton or the card refuses this shape
        return f"{type(error).__name__}: {error}"
    return None


def compile_contenders(pages: Sequence[int], orders: Sequence[Order]) -> None:
    """The Triton kernels of all contenders; who can't be built says so again when it is.

    A dma transfer has those of a fused one.
    """
    compile_all(
        [
            (codec, "dma" if page >= CHUNK_TOKENS else "fused", order, page)
            for codec, _ in OURS
            for order in orders
            for page in pages
        ],
        _contender,
    )


def _contender(job: tuple[str, str, Order, int]) -> None:
    host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    ours(*job, DevicePool(slots=16), host)
