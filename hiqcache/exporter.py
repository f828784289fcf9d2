"""`hiqcache exporter`: what no single server knows. Compares two arms by their own /metrics.

It scrapes both servers every few seconds, keeps a window of what their counters said, and serves
ratios of the two windows on /metrics; /healthz answers as long as the process works. An arm that
cannot be scraped, for whatever reason, is a metric (hiqcache_arm_up 0), and its comparisons are
left out until it is back. Needs neither torch nor SGLang. Hit ratios are not its business: their
one definition is in monitoring/rules/recording.yml.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hiqcache import direct_http, metrics_page
from hiqcache.scraped import samples

logger = logging.getLogger(__name__)

PORT = 9645

#: Counters that comparisons are made of. Their labels (ranks) are added up on both sides of every
#: ratio.
_COUNTERS = (
    "hiqcache_restore_seconds_sum",
    "hiqcache_restore_tokens_total",
    "hiqcache_backup_seconds_sum",
    "hiqcache_backup_tokens_total",
)
_GAUGES = ("hiqcache_l2_capacity_tokens", "hiqcache_l2_bytes_per_token")

#: What the lines of an SGLang server's page begin with. A page without any is another server's.
_SERVED = ("sglang:", "hiqcache_")

#: Bytes of a page. SGLang's take under 1 MB.
_PAGE_LIMIT = 32 * 2**20


@dataclass(frozen=True)
class Reading:
    """One scrape of an arm: counters and gauges by name."""

    at: float
    counters: Mapping[str, float]
    gauges: Mapping[str, float]


def read_page(page: str, at: float) -> Reading:
    """What ``page``, a server's /metrics in text form, says at time ``at`` (seconds).

    Raises ValueError where it is no such page.
    """
    if not any(line.startswith(_SERVED) for line in page.splitlines()):
        raise ValueError(f"no metric of SGLang's on a page that begins with {page[:60]!r}")
    counters: dict[str, float] = defaultdict(float)
    gauges: dict[str, float] = defaultdict(float)
    for sample in samples(page, (*_COUNTERS, *_GAUGES)):
        found = counters if sample.name in _COUNTERS else gauges
        found[sample.name] += sample.value
    return Reading(at, counters, gauges)


@dataclass
class Arm:
    """One server, and what it said within the last ``window`` seconds."""

    name: str
    url: str
    window: float
    readings: deque[Reading] = field(default_factory=deque)
    up: bool = False
    failures: int = 0

    def fetch(self, timeout: float) -> None:
        """Scrape once, within ``timeout`` seconds. A failure is noted, not raised."""
        try:
            page = direct_http.get(self.url, timeout=timeout, limit=_PAGE_LIMIT).text
            reading = read_page(page, time.monotonic())
        except Exception as error:
            # Whatever a target does and whatever a parser makes of it, the next scrape comes.
            if self.up or not self.failures:
                logger.warning("arm %s is down: %s: %r", self.name, self.url, error)
            self.up = False
            self.failures += 1
            return
        if not self.up:
            logger.info("arm %s is up: %s", self.name, self.url)
        self.up = True
        self.take(reading)

    def poll(self, interval: float, stop: threading.Event) -> None:
        """Scrape every ``interval`` seconds until ``stop``."""
        while not stop.is_set():
            started = time.monotonic()
            self.fetch(interval)
            stop.wait(max(0.0, started + interval - time.monotonic()))

    def take(self, reading: Reading) -> None:
        """Add ``reading``; a counter that fell means a restart, which begins a new window."""
        last = self.readings[-1].counters if self.readings else {}
        if any(reading.counters.get(key, 0.0) < value for key, value in last.items()):
            self.readings.clear()
        self.readings.append(reading)
        while len(self.readings) > 2 and self.readings[1].at <= reading.at - self.window:
            self.readings.popleft()

    def growth(self, name: str) -> float:
        """How much a counter grew within the window."""
        first, last = self.readings[0].counters, self.readings[-1].counters
        return last.get(name, 0.0) - first.get(name, 0.0)

    def gauge(self, name: str) -> float | None:
        """A gauge's last value, summed over ranks; None where the server has none."""
        return self.readings[-1].gauges.get(name) or None

    def seconds_per_token(self, transfer: str) -> float | None:
        """Mean seconds per token of ``restore`` or ``backup``; None without any in the window."""
        tokens = self.growth(f"hiqcache_{transfer}_tokens_total")
        return self.growth(f"hiqcache_{transfer}_seconds_sum") / tokens if tokens else None


class Comparison(Collector):
    """Serves the arms' states and, where both are up, the treatment against the control."""

    def __init__(self, control: Arm, treatment: Arm) -> None:
        self.control, self.treatment = control, treatment

    def collect(self) -> Iterable[Metric]:
        arms = (self.control, self.treatment)
        yield _family(
            "hiqcache_arm_up",
            "Whether the exporter's last scrape of the arm worked.",
            {(arm.name,): float(arm.up) for arm in arms},
            ("arm",),
        )
        failures = CounterMetricFamily(
            "hiqcache_arm_scrape_failures", "Scrapes of the arm that failed.", labels=("arm",)
        )
        for arm in arms:
            failures.add_metric((arm.name,), arm.failures)
        yield failures
        live = [arm for arm in arms if arm.up and arm.readings]
        if len(live) == 2:
            yield from self._compared()

    def _compared(self) -> Iterator[Metric]:
        control, treatment = self.control, self.treatment

        def divided(read: Callable[[Arm], float | None], inverse: bool = False) -> float | None:
            above, below = read(treatment), read(control)
            if inverse:
                above, below = below, above
            return above / below if above is not None and below else None

        values: list[tuple[str, str, float | None]] = [
            (
                "hiqcache_capacity_ratio",
                "Tokens that the treatment's L2 holds over those that the control's holds.",
                divided(lambda arm: arm.gauge("hiqcache_l2_capacity_tokens")),
            ),
            (
                "hiqcache_density_ratio",
                "Tokens the treatment holds in the bytes in which the control holds one.",
                divided(lambda arm: arm.gauge("hiqcache_l2_bytes_per_token"), inverse=True),
            ),
            (
                "hiqcache_restore_time_ratio",
                "Treatment's seconds per restored token over the control's, within the window.",
                divided(lambda arm: arm.seconds_per_token("restore")),
            ),
            (
                "hiqcache_backup_time_ratio",
                "Treatment's seconds per backed-up token over the control's, within the window.",
                divided(lambda arm: arm.seconds_per_token("backup")),
            ),
        ]
        labels = ("control", "treatment")
        for name, text, value in values:
            if value is not None:
                yield _family(name, text, {(control.name, treatment.name): value}, labels)


def _family(
    name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    for role, name in (("control", "bf16"), ("treatment", "int8")):
        parser.add_argument(
            f"--{role}",
            default=f"{name}=http://sglang-{name}:30000/metrics",
            help=f"the {role} arm: its name and the address of its metrics (default %(default)s)",
            metavar="NAME=URL",
        )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="port to serve on (default %(default)s; 0: any)"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=5.0,
        help="seconds between scrapes (default %(default)s)",
        metavar="S",
    )
    parser.add_argument(
        "--window",
        type=float,
        default=300.0,
        help="seconds that ratios look back on (default %(default)s)",
        metavar="S",
    )


def run(arguments: argparse.Namespace) -> int:
    """Scrape and serve until SIGTERM or SIGINT. Raises ValueError for bad arguments."""
    if not 0 < arguments.interval < arguments.window:
        raise ValueError(
            f"--interval {arguments.interval:g} --window {arguments.window:g}: the interval must "
            "be positive and shorter than the window."
        )
    control, treatment = (
        _arm(role, getattr(arguments, role), arguments.window) for role in ("control", "treatment")
    )
    if control.name == treatment.name:
        raise ValueError(
            f"--control and --treatment are both called {control.name}: name them apart."
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    registry = CollectorRegistry()
    registry.register(Comparison(control, treatment))
    # A thread an arm: one that stalls does not hold up the other.
    pollers = [
        threading.Thread(target=arm.poll, args=(arguments.interval, stop))
        for arm in (control, treatment)
    ]
    with metrics_page.serving(
        arguments.host, arguments.port, registry, lambda: health(control, treatment)
    ) as port:
        logger.info("serving http://%s:%d/metrics", arguments.host, port)
        for poller in pollers:
            poller.start()
        for poller in pollers:
            poller.join()
    return 0


def health(*arms: Arm) -> dict[str, dict[str, bool]]:
    """What /healthz says of the arms."""
    return {"arms": {arm.name: arm.up for arm in arms}}


def _arm(role: str, text: str, window: float) -> Arm:
    name, found, url = text.partition("=")
    if not (name and found):
        raise ValueError(
            f"--{role} {text}: give a name and an address, such as "
            "int8=http://127.0.0.1:30000/metrics."
        )
    try:
        return Arm(name, direct_http.checked(url), window)
    except ValueError as error:
        raise ValueError(f"--{role} {text}: {error}") from error
