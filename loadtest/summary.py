"""What a run saw: counts of every outcome, latencies of the requests that came to their end."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from loadtest.streaming import OUTCOMES, Sample

#: Latencies kept for each quantity and arm, the latest: a run may last for days.
KEPT = 50_000

#: The percentiles that are reported.
PERCENTILES = (50, 90, 95, 99)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Mean and PERCENTILES of ``values``, interpolated as numpy does; empty for no values."""
    values = sorted(values)
    if not values:
        return {}
    found = {"mean": statistics.fmean(values)}
    for percent in PERCENTILES:
        below, rest = divmod((len(values) - 1) * percent, 100)
        above = min(below + 1, len(values) - 1)
        found[f"p{percent}"] = values[below] + (values[above] - values[below]) * rest / 100
    return found


class ArmSummary:
    """The samples of one workload on one arm."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.seconds: dict[str, deque[float]] = {
            name: deque(maxlen=KEPT) for name in ("ttft", "tpot", "itl", "e2e")
        }

    def add(self, sample: Sample) -> None:
        """Count a sample; only one whose outcome is ok enters the latencies and token counts."""
        self.outcomes[sample.outcome] += 1
        if sample.outcome != "ok":
            return
        self.tokens["prompt"] += sample.prompt_tokens
        self.tokens["output"] += sample.output_tokens
        self.tokens["cached_l1"] += sample.cached_device
        self.tokens["cached_l2"] += sample.cached_host
        self.seconds["ttft"].append(sample.ttft)
        self.seconds["e2e"].append(sample.e2e)
        self.seconds["itl"].extend(sample.itl)
        if sample.tpot is not None:
            self.seconds["tpot"].append(sample.tpot)

    @property
    def failed(self) -> int:
        """Requests whose outcome is not ok."""
        return self.outcomes.total() - self.outcomes["ok"]

    def to_dict(self) -> dict[str, Any]:
        """Counts, token totals, and latencies in seconds."""
        return {
            "requests": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "tokens": dict(self.tokens),
            "seconds": {name: percentiles(values) for name, values in self.seconds.items()},
        }


class Summary:
    """The samples of a run, by workload and arm."""

    def __init__(self) -> None:
        self.arms: dict[tuple[str, str], ArmSummary] = {}

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        self.arms.setdefault((sample.workload, sample.arm), ArmSummary()).add(sample)

    def to_dict(self) -> dict[str, Any]:
        """``{workload: {arm: figures}}``."""
        tree: dict[str, Any] = {}
        for (workload, arm), figures in sorted(self.arms.items()):
            tree.setdefault(workload, {})[arm] = figures.to_dict()
        return tree

    def progress(self) -> str:
        """One line for a log."""
        parts = []
        for (_, arm), figures in sorted(self.arms.items()):
            ttft = percentiles(figures.seconds["ttft"])
            median = f", TTFT p50 {ttft['p50']:.3f} s" if ttft else ""
            parts.append(f"{arm}: {figures.outcomes['ok']} ok, {figures.failed} failed{median}")
        return "; ".join(parts) or "no request has ended yet"

    def table(self) -> list[dict[str, Any]]:
        """Rows for Locust's web page: latencies in milliseconds."""
        rows = []
        for (workload, arm), figures in sorted(self.arms.items()):
            row: dict[str, Any] = {"name": f"{workload} / {arm}", "method": arm}
            for name, values in figures.seconds.items():
                found = percentiles(values)
                for percent in (50, 95):
                    value = found.get(f"p{percent}")
                    row[f"{name}_p{percent}"] = None if value is None else round(value * 1000, 1)
            row["output_tokens"] = figures.tokens["output"]
            prompt = figures.tokens["prompt"]
            for tier in ("l1", "l2"):
                share = figures.tokens[f"cached_{tier}"] / prompt if prompt else 0.0
                row[f"{tier}_share"] = round(100 * share, 1)
            row["failed"] = figures.failed
            rows.append(row)
        return rows
