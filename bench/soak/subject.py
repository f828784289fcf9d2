"""What is under soak: a host pool as a server builds it for an arm, small enough to be quick."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.lab.arms import Arm
from hiqcache.settings import PREFIX


@dataclass(frozen=True)
class Shape:
    """A pool so small that a restore takes microseconds. Tokens and pages are slots of them."""

    layers: int = 3
    heads: int = 2
    dim: int = 64
    page_size: int = 16
    layout: str = "page_first"
    device_tokens: int = 16_384
    host_tokens: int = 65_536
    #: Pages of a chunk of a prefix: mostly short, now and then the longest.
    short_pages: int = 4
    long_pages: int = 64


@contextlib.contextmanager
def settings(arm: Arm, checksum: bool) -> Iterator[None]:
    """The HIQCACHE_ variables of an arm, as a server's environment holds them."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    given = {**arm.env, **({"HIQCACHE_CHECKSUM": "1"} if checksum and arm.quantises else {})}
    for name in kept:
        del os.environ[name]
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
        os.environ.update(kept)


def build(arm: Arm, shape: Shape, checksum: bool, k: list[Any], v: list[Any]) -> Any:
    """The arm's host pool over the device rows ``k`` and ``v``. Raises UnsupportedError."""
    from bench.transfers.stock import describe_rows, stock_pool
    from hiqcache.sglang.copying_pool import MHATokenToKVPoolHostCopy
    from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost

    cuda = k[0].is_cuda
    chosen: Callable[..., Any] = QuantisedMHATokenToKVPoolHost
    if not arm.quantises:
        chosen = stock_pool if cuda else MHATokenToKVPoolHostCopy
    with settings(arm, checksum):
        return chosen(
            describe_rows(k, v, shape.page_size),
            2.0,
            0,
            shape.page_size,
            shape.layout,
            pin_memory=cuda,
            device_capacity_tokens=shape.device_tokens,
            start_layer=0,
            end_layer=shape.layers,
            host_token_capacity=shape.host_tokens,
        )
