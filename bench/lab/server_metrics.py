"""What an SGLang server says of its host tier at /metrics, read by prometheus_client's parser."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from bench.lab.servers import Server
from hiqcache import direct_http

CAPACITY = "sglang:hicache_host_total_tokens"
RESTORED_TOKENS = "sglang:load_back_tokens_total"
RESTORED_BYTES = "sglang:load_back_bytes_total"
STORED_TOKENS = "sglang:hicache_backup_tokens_total"
STORED_BYTES = "sglang:hicache_backup_bytes_total"


def totals(page: str) -> dict[str, float]:
    """The values of a /metrics ``page`` by sample name, summed over labels; no buckets.

    Raises ValueError for a page that is not in Prometheus's text format.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[sample.name] += sample.value
    return dict(found)


def by_label(page: str, label: str, prefix: str) -> dict[str, dict[str, float]]:
    """Values of the samples whose name starts with ``prefix``, by ``label`` and rest of the name.

    Samples of one name and label are summed. Raises ValueError as ``totals`` does.
    """
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(prefix) and label in sample.labels:
                found[sample.labels[label]][sample.name.removeprefix(prefix)] += sample.value
    return {value: dict(rest) for value, rest in found.items()}


def page_of(server: Server) -> str:
    """The server's /metrics. Raises HttpError."""
    return direct_http.get(f"{server.url}/metrics", timeout=60).text


def scrape(server: Server) -> dict[str, float]:
    """The server's ``totals``. Raises HttpError."""
    return totals(page_of(server))
