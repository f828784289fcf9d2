"""What an SGLang server says of its host tier at /metrics, read by prometheus_client's parser."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from bench.lab.servers import Server
from hiqcache import direct_http

CAPACITY = "sglang:hicache_host_total_tokens"
RESTORED_TOKENS = "sglang:load_back_tokens_total"
RESTORED_BYTES = "sglang:load_back_bytes_total"
STORED_TOKENS = "sglang:hicache_backup_tokens_total"
STORED_BYTES = "sglang:hicache_backup_bytes_total"

#: Of L3, where there is one.
WRITTEN_TOKENS = "sglang:backuped_tokens_total"
FETCHED_TOKENS = "sglang:prefetched_tokens_total"


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


def by_labels(
    page: str, labels: Sequence[str], prefix: str
) -> dict[tuple[str, ...], dict[str, float]]:
    """Samples whose name starts with ``prefix``, by their ``labels``' values: rest of name, value.

    Samples of one name and the same labels are summed. Raises ValueError as ``totals`` does.
    """
    found: defaultdict[tuple[str, ...], defaultdict[str, float]]
    found = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(prefix) and sample.labels.keys() >= set(labels):
                key = tuple(sample.labels[label] for label in labels)
                found[key][sample.name.removeprefix(prefix)] += sample.value
    return {key: dict(values) for key, values in found.items()}


def page_of(server: Server) -> str:
    """The server's /metrics. Raises HttpError."""
    return direct_http.get(f"{server.url}/metrics", timeout=60).text


def scrape(server: Server) -> dict[str, float]:
    """The server's ``totals``. Raises HttpError."""
    return totals(page_of(server))
