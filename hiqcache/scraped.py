"""Reads a server's /metrics for those who want a few of its many series."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(page: str, names: Collection[str]) -> Iterator[Sample]:
    """The samples of ``page`` (Prometheus's text format) that are called one of ``names``.

    Most of an SGLang server's page is histograms; reading them all takes ten times as long. Raises
    ValueError for a line of these names that is none.
    """
    lines = [line for line in page.splitlines() if line.startswith(tuple(names))]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        yield from (sample for sample in family.samples if sample.name in names)
