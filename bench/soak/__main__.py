"""Soaks L2: restores by the million under everything at once, each checked against its reference.

    python -m bench.soak pool   [--arms ...] [--restores N] [--minutes M] [--out FILE]
    python -m bench.soak server [--arms ...] [--restores N] [--minutes M] [--out FILE]

pool    drives each arm's host pool and transfer without a server: thousands of restores a second
        on a GPU, every element of every restored row checked. See bench/soak/pool.py.
server  drives real servers of a tiny model with random weights: every answer checked. See
        bench/soak/server.py.

An arm ends after N restores in all, or M minutes of this session. The file is written as it goes,
and a later session with the same --out goes on from it, with other random choices. With
--no-checksum records are not summed (HIQCACHE_CHECKSUM).

The exit status is 1 where any restore was wrong, now or in an earlier session.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from bench import REPOSITORY
from bench.lab.arms import NAMES, Arm, arms_argument
from bench.soak.pool import PoolSoak
from bench.soak.record import Record
from bench.soak.server import ServerSoak
from bench.soak.subject import Shape

#: Restores between two writings of the file.
STEP = {"pool": 5_000, "server": 500}
#: On a CPU a thousandth of what a GPU does.
CPU_STEP = {"pool": 200, "server": 50}


class Soak(Protocol):
    """One arm under soak."""

    counts: Counter[str]
    faults: list[dict[str, Any]]

    def run(self, restores: int) -> None: ...
    def close(self) -> None: ...


def follow(name: str, make: Callable[[], Soak], record: Record, until: int, seconds: float) -> None:
    """Run one arm in steps until its restores or its seconds are over, or something was wrong."""
    cuda = torch.cuda.is_available()
    step = (STEP if cuda else CPU_STEP)[record.mode]
    deadline = time.monotonic() + seconds
    if record.done(name) >= until:
        return
    soak = make()
    seen: Counter[str] = Counter()
    try:
        with tqdm(
            total=until, initial=record.done(name), desc=name, unit="restore", mininterval=2
        ) as bar:
            while record.done(name) < until and time.monotonic() < deadline:
                start, told = time.monotonic(), len(soak.faults)
                soak.run(min(step, until - record.done(name)))
                now = Counter(soak.counts)
                record.add(name, now - seen, time.monotonic() - start, soak.faults[told:])
                bar.update(now["checked_restores"] - seen["checked_restores"])
                bar.set_postfix(wrong=len(soak.faults))
                seen = now
                if soak.faults:
                    break
    finally:
        soak.close()


def main() -> int:
    """The exit status: 1 where a restore was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("pool", "server"))
    parser.add_argument("--arms", type=arms_argument, default="int8,int8-rot", help=NAMES)
    parser.add_argument("--restores", type=int, default=1_000_000, help="per arm, in all sessions")
    parser.add_argument("--minutes", type=float, default=1e6, help="per arm, in this session")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layout", default="page_first", choices=("page_first", "layer_first"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-checksum", action="store_true", help="do not sum records")
    parser.add_argument("--concurrency", type=int, default=48, help="of the server mode")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, with a GPU or without")
    parser.add_argument("--out", type=Path, help="default: results/soak/<mode>.json")
    parser.add_argument("sglang", nargs="*", help="arguments for SGLang (server mode), after --")
    arguments = parser.parse_args()
    out = arguments.out or REPOSITORY / "results" / "soak" / f"{arguments.mode}.json"
    command = " ".join(["python -m bench.soak", *sys.argv[1:]])
    try:
        record = Record(out, arguments.mode, command)
    except ValueError as error:
        parser.error(str(error))
    cuda = torch.cuda.is_available() and not arguments.cpu
    shape = Shape(page_size=arguments.page_size, layout=arguments.layout)
    if not cuda:
        # Threads of small tensors spend their time waiting for each other.
        torch.set_num_threads(1)
        shape = Shape(
            page_size=arguments.page_size,
            layout=arguments.layout,
            device_tokens=4096,
            host_tokens=8192,
            short_pages=2,
            long_pages=16,
        )
    for number, arm in enumerate(arguments.arms):
        seed = arguments.seed + 1_000_003 * record.session + 7919 * number

        def make(arm: Arm = arm, seed: int = seed) -> Soak:
            checksum = not arguments.no_checksum
            if arguments.mode == "pool":
                device = torch.device("cuda" if cuda else "cpu")
                return PoolSoak(arm, shape, device, seed, checksum)
            return ServerSoak(
                *(arm, seed, checksum, not cuda, arguments.concurrency, arguments.page_size),
                *(arguments.layout, tuple(arguments.sglang)),
            )

        name = f"{arm.name}, pages of {arguments.page_size}, {arguments.layout}"
        follow(name, make, record, arguments.restores, 60 * arguments.minutes)
    wrong = {arm: len(found["faults"]) for arm, found in record.arms.items() if found["faults"]}
    for arm, count in wrong.items():
        print(f"bench.soak: {arm}: {count} faults; see {out}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
