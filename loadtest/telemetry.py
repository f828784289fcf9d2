"""The load generator's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from loadtest.streaming import OUTCOMES, Sample

PORT = 9646

# Steps of about 1.5 from a GPU's few milliseconds to what a two-core CPU needs, so that a
# quantile read off a bucket is within a quarter of the true one on either.
_TTFT = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10)
_LONG = (*_TTFT, 15, 20, 30, 60, 120)
_TOKEN = (0.002, 0.003, 0.005, 0.0075, *_TTFT[:15])


class Telemetry:
    """Metrics of every load that passes through this process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        labels = ("workload", "arm")
        self.running = Gauge(
            "hiqcache_load_running",
            "Whether a load runs: 1 from its start to its end.",
            ("workload",),
            registry=self.registry,
        )
        self.users = Gauge(
            "hiqcache_load_users",
            "Simulated users, each with at most one request in flight.",
            registry=self.registry,
        )
        self.requests = Counter(
            "hiqcache_load_requests",
            "Requests that ended, by outcome: ok, error, timeout or truncated (stream broke off).",
            (*labels, "outcome"),
            registry=self.registry,
        )
        self.ttft = Histogram(
            "hiqcache_load_ttft_seconds",
            "Time from sending a request to its first token, of requests that ended well.",
            labels,
            buckets=_LONG,
            registry=self.registry,
        )
        self.tpot = Histogram(
            "hiqcache_load_tpot_seconds",
            "Time per output token after the first, of requests that ended well.",
            labels,
            buckets=_TOKEN,
            registry=self.registry,
        )
        self.itl = Histogram(
            "hiqcache_load_itl_seconds",
            "Gaps between consecutive tokens, of requests that ended well.",
            labels,
            buckets=_TOKEN,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "hiqcache_load_e2e_seconds",
            "Time from sending a request to the end of its stream, of requests that ended well.",
            labels,
            buckets=_LONG,
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "hiqcache_load_output_tokens",
            "Tokens generated for requests that ended well.",
            labels,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "hiqcache_load_prompt_tokens",
            "Prompt tokens of requests that ended well.",
            labels,
            registry=self.registry,
        )

    def expect(self, workload: str, arm: str) -> None:
        """Make the series of a load appear at 0 before its first request ends."""
        for outcome in OUTCOMES:
            self.requests.labels(workload, arm, outcome)
        for metric in (self.ttft, self.tpot, self.itl, self.e2e):
            metric.labels(workload, arm)
        self.output_tokens.labels(workload, arm)
        self.prompt_tokens.labels(workload, arm)

    def observe(self, sample: Sample) -> None:
        """Take in a sample; only one whose outcome is ok enters histograms and token counts."""
        labels = (sample.workload, sample.arm)
        self.requests.labels(*labels, sample.outcome).inc()
        if sample.outcome != "ok":
            return
        self.ttft.labels(*labels).observe(sample.ttft)
        self.e2e.labels(*labels).observe(sample.e2e)
        if sample.tpot is not None:
            self.tpot.labels(*labels).observe(sample.tpot)
        for gap in sample.itl:
            self.itl.labels(*labels).observe(gap)
        self.output_tokens.labels(*labels).inc(sample.output_tokens)
        self.prompt_tokens.labels(*labels).inc(sample.prompt_tokens)

    def serve(self, address: str, port: int) -> None:
        """Serve /metrics in the background. Raises OSError where ``address:port`` is taken."""
        start_http_server(port, address, self.registry)
