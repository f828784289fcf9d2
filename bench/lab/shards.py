"""How a measurement's servers cut KV: tokens per page, tensor-parallel ranks.

A measurement computes with both, so they are its own options and no arguments for SGLang.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hiqcache.plan import PAGE_SIZE

#: Tokens per page: on a GPU what SGLang's documentation recommends for HiCache, on a CPU SGLang's
#: own default.
GPU_PAGE_SIZE, CPU_PAGE_SIZE = PAGE_SIZE, 1

#: SGLang's names for what a measurement is told itself, and what to do instead.
_TOLD = {
    "--page-size": "give --page-size to the measurement itself: it computes what L2 holds",
    **dict.fromkeys(
        ("--tp-size", "--tp", "--tensor-parallel-size"),
        "give --tp-size to the measurement itself: it computes what a rank holds",
    ),
    **dict.fromkeys(
        ("--dp-size", "--dp", "--data-parallel-size", "--pp-size", "--pp"),
        "a measurement compares single servers whose ranks each hold all layers: leave it out",
    ),
}


class Shards(NamedTuple):
    """Tokens per page and tensor-parallel ranks of every server."""

    page_size: int
    tp_size: int = 1

    @property
    def args(self) -> tuple[str, ...]:
        """As SGLang takes them."""
        ranks = ("--tp-size", str(self.tp_size)) if self.tp_size > 1 else ()
        return ("--page-size", str(self.page_size), *ranks)


def add_arguments(parser: argparse.ArgumentParser, env: Mapping[str, str] | None = None) -> None:
    """Add --page-size and --tp-size; PAGE_SIZE and TP_SIZE of ``env`` are their defaults."""
    env = env or {}
    parser.add_argument(
        "--page-size",
        type=_positive,
        default=env.get("PAGE_SIZE") or None,
        help=f"tokens per page; default: {GPU_PAGE_SIZE}, on a CPU {CPU_PAGE_SIZE}",
    )
    parser.add_argument(
        "--tp-size",
        type=_positive,
        default=env.get("TP_SIZE") or 1,
        help="tensor-parallel ranks of each server; sizes of L2 are those of a rank (default: 1)",
    )


def chosen(options: argparse.Namespace, cpu: bool) -> Shards:
    """What ``options`` ask for, on a CPU or a GPU."""
    page_size = options.page_size or (CPU_PAGE_SIZE if cpu else GPU_PAGE_SIZE)
    return Shards(page_size, options.tp_size)


def further_arguments(given: str | Sequence[str]) -> tuple[str, ...]:
    """Arguments for SGLang besides, as a tuple.

    Raises ValueError for one that the measurement is told itself.
    """
    arguments = tuple(shlex.split(given) if isinstance(given, str) else given)
    for argument in arguments:
        if told := _TOLD.get(argument.split("=")[0]):
            raise ValueError(f"{argument}: {told}.")
    return arguments


def described(setup: Mapping[str, object]) -> str:
    """Page size and ranks of a result's ``setup`` for a caption, after a comma.

    Empty for results of before December 2026, which name neither: pages of one token, one rank.
    """
    pages = f", pages of {setup['page_size']}" if "page_size" in setup else ""
    ranks = setup.get("tp_size", 1)
    return pages + (f", {ranks} ranks (tokens of all, bytes of each)" if ranks != 1 else "")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, not {number}")
    return number
