"""The command `hiqcache canary`."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import statistics
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from hiqcache import direct_http, metrics_page
from hiqcache.canary.metrics import CanaryMetrics
from hiqcache.canary.prompts import texts
from hiqcache.canary.server import Client
from hiqcache.canary.watch import Plan, Watch

logger = logging.getLogger(__name__)

PORT = 9647

_ARMS = ("bf16=http://sglang-bf16:30000", "int8=http://sglang-int8:30000")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument(
        "--arm",
        action="append",
        help="a server to watch, by name and address; again for another (default "
        f"{' and '.join(_ARMS)})",
        metavar="NAME=URL",
    )

    def number(name: str, kind: type, default: float, text: str, unit: str) -> None:
        parser.add_argument(
            name, type=kind, default=default, help=f"{text} (default %(default)s)", metavar=unit
        )

    number("--interval", float, 60.0, "seconds from one asking of an arm to the next", "S")
    number("--l2-share", float, 0.01, "share of L2's tokens that prompts may take", "SHARE")
    number("--prefix-tokens", int, 256, "tokens of a prompt that are stored and restored", "N")
    number("--scored-tokens", int, 32, "tokens of a prompt that are scored after them", "N")
    number("--slo-kl-nats", float, 0.01, "KL per token above which the alert fires", "NATS")
    number(
        "--push-tokens-per-hour",
        int,
        0,
        "tokens that may be computed in an hour to push prompts out of L1 where the server's own "
        "load does not; they take a share of L2 as large as L1",
        "N",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="a JSON list of texts in the place of the canary's own",
        metavar="FILE",
    )
    parser.add_argument(
        "--restored",
        type=int,
        default=0,
        help="stop after this many comparisons of each arm and print a summary as JSON (default: "
        "never)",
        metavar="N",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("CANARY_API_KEY", ""),
        help="the servers' key, if they ask for one (default: the variable CANARY_API_KEY)",
        metavar="KEY",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default %(default)s)"
    )
    number("--port", int, PORT, "port to serve /metrics on; 0: any", "PORT")


def run(arguments: argparse.Namespace) -> int:
    """Watch the arms until SIGTERM, SIGINT or enough comparisons. Raises ValueError."""
    plan = _plan(arguments)
    registry = CollectorRegistry()
    families = CanaryMetrics(registry)
    watches = [_watch(text, arguments, plan, families) for text in arguments.arm or _ARMS]
    names = [watch.arm for watch in watches]
    if len(set(names)) < len(names):
        raise ValueError(f"--arm {', '.join(names)}: name them apart.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with metrics_page.serving(
        arguments.host, arguments.port, registry, lambda: {"arms": names}
    ) as port:
        logger.info("serving http://%s:%d/metrics", arguments.host, port)
        with ThreadPoolExecutor(len(watches)) as pool:
            running = [
                pool.submit(follow, watch, arguments.interval, arguments.restored, stop)
                for watch in watches
            ]
            # One that ends by an error ends all: a canary that watches less than it was told to is
            # worse than none.
            wait(running, return_when=FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in running):
                stop.set()
        for task in running:
            task.result()
    if arguments.restored:
        print(json.dumps({watch.arm: summary(watch) for watch in watches}, indent=2))
    return 0


def follow(watch: Watch, interval: float, enough: int, stop: threading.Event) -> None:
    """Visit an arm every ``interval`` seconds until ``stop``, or ``enough`` comparisons."""
    while not stop.is_set() and not (enough and len(watch.comparisons) >= enough):
        watch.visit()
        stop.wait(interval)


def summary(watch: Watch) -> dict[str, Any]:
    """An arm's comparisons as figures. KL in nats per token; its standard error is over prompts."""
    found = watch.comparisons
    if not found:
        return {"restored": 0}
    means = [statistics.fmean(one.divergences) for one in found]
    every = sorted(value for one in found for value in one.divergences)
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return {
        "restored": len(found),
        "identical": sum(one.identical for one in found),
        "scored_tokens": len(every),
        "kl_nats_mean": statistics.fmean(means),
        "kl_nats_standard_error": error,
        "kl_nats_p99": every[min(len(every) - 1, int(0.99 * len(every)))],
        "kl_nats_max": every[-1],
        "top1_agreement": sum(one.agreeing for one in found) / len(every),
    }


def _plan(arguments: argparse.Namespace) -> Plan:
    if not 0 < arguments.l2_share <= 1:
        raise ValueError(f"--l2-share {arguments.l2_share:g}: it must be above 0, and at most 1.")
    for name, least in (("prefix_tokens", 16), ("scored_tokens", 2), ("push_tokens_per_hour", 0)):
        if getattr(arguments, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(arguments, name)}: it must be {least} or more.")
    for name in ("interval", "slo_kl_nats"):
        if not getattr(arguments, name) > 0:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(arguments, name):g}: it must be above 0.")
    try:
        given = texts(arguments.prompts)
    except OSError as error:
        raise ValueError(f"--prompts {arguments.prompts}: {error}.") from error
    return Plan(
        arguments.l2_share,
        arguments.prefix_tokens,
        arguments.scored_tokens,
        arguments.push_tokens_per_hour,
        arguments.slo_kl_nats,
        given,
    )


def _watch(text: str, arguments: argparse.Namespace, plan: Plan, families: CanaryMetrics) -> Watch:
    name, found, url = text.partition("=")
    if not (name and found):
        raise ValueError(
            f"--arm {text}: give a name and an address, such as int8=http://127.0.0.1:30000."
        )
    try:
        client = Client(direct_http.checked(url), api_key=arguments.api_key)
    except ValueError as error:
        raise ValueError(f"--arm {text}: {error}") from error
    return Watch(name, client, plan, families)
