"""The metrics of a host pool's pages in storage. Pure prometheus_client: see hiqcache.metrics."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from hiqcache.metrics import PoolLabels


class StorageMetrics:
    """The metric families of one process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, PoolLabels._fields, registry=registry)

        self.written_pages = counter(
            "hiqcache_l3_written_pages_total",
            "Pages that L3 storage took from this rank's host pool. Pages that it held already "
            "count too: backends pass over those themselves.",
        )
        self.written_bytes = counter(
            "hiqcache_l3_written_bytes_total",
            "Bytes of the pages that L3 storage took, as stored: codes, scales and checksums.",
        )
        self.read_pages = counter(
            "hiqcache_l3_read_pages_total",
            "Pages read from L3 storage into this rank's host pool, their checksums verified.",
        )
        self.read_bytes = counter(
            "hiqcache_l3_read_bytes_total", "Bytes of the pages read from L3 storage, as stored."
        )
        self.corrupt_pages = counter(
            "hiqcache_l3_corrupt_pages_total",
            "Pages from L3 storage that failed their checksum or came cut short. None is served; "
            "each counts as a miss. Anything but 0 means that what stores the pages damages them.",
        )
        self.failed_operations = counter(
            "hiqcache_l3_failed_operations_total",
            "Reads and writes of batches of pages that L3 storage refused or failed (a full disk, "
            "a store that is gone). Their pages are misses, or are not stored.",
        )

    def of(self, labels: PoolLabels) -> PoolStorageMetrics:
        """The metrics of one pool; every series exists from here on, at zero."""
        return PoolStorageMetrics(self, labels)


class PoolStorageMetrics:
    """The families of StorageMetrics, bound to one pool's labels."""

    def __init__(self, families: StorageMetrics, labels: PoolLabels) -> None:
        self.written_pages = families.written_pages.labels(*labels)
        self.written_bytes = families.written_bytes.labels(*labels)
        self.read_pages = families.read_pages.labels(*labels)
        self.read_bytes = families.read_bytes.labels(*labels)
        self.corrupt_pages = families.corrupt_pages.labels(*labels)
        self.failed_operations = families.failed_operations.labels(*labels)


@lru_cache(maxsize=1)
def process_storage_metrics() -> StorageMetrics:
    """This process's metric families, made at the first call."""
    return StorageMetrics()
