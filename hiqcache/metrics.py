"""The metrics of a host pool, for SGLang's own /metrics page. Pure prometheus_client.

SGLang runs prometheus_client in its multiprocess mode: each process writes its values to files of
the folder PROMETHEUS_MULTIPROC_DIR, and the HTTP server adds them up. prometheus_client decides for
that mode when it is first imported, so import this module only once SGLang has set the variable
(in the scheduler it has).
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from hiqcache import __version__

#: A restore of 2,048 tokens of an 8B model takes 3 to 7 ms, a short prefix well under one, a large
#: merged one tens: the steps are finest there. The last ones are for CPUs.
TRANSFER_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0065, 0.008, 0.01),
    *(0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

#: int8 errs by about 0.006 of a Gaussian row, and by 0.036 (head_dim 64) to 0.068 (256) in the
#: worst case that its bound allows. Zero stands alone: it is what an exact copy shows.
ERROR_BUCKETS = (
    *(0.0, 0.0001, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.01, 0.0125, 0.015),
    *(0.02, 0.03, 0.05, 0.07, 0.1, 0.5, 1.0),
)

#: The newest value of a label set wins, and a dead process's values can be dropped.
_GAUGE_MODE: Literal["livemostrecent"] = "livemostrecent"


class PoolLabels(NamedTuple):
    """What names a host pool. Ranks and model are called as in SGLang's own metrics."""

    codec: str
    transfer: str
    pool: str
    tp_rank: str
    pp_rank: str
    dp_rank: str
    model_name: str


class HostTierMetrics:
    """The metric families of one process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(
                name,
                text,
                (*PoolLabels._fields, *more),
                multiprocess_mode=_GAUGE_MODE,
                registry=registry,
            )

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, PoolLabels._fields, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, PoolLabels._fields, buckets=buckets, registry=registry)

        self.capacity_tokens = gauge(
            "hiqcache_l2_capacity_tokens",
            "Tokens that the host pool (L2) holds when full. Each TP rank holds its share of the "
            "same tokens.",
        )
        self.capacity_bytes = gauge(
            "hiqcache_l2_capacity_bytes", "Bytes of host memory that the host pool (L2) takes."
        )
        self.used_tokens = gauge(
            "hiqcache_l2_used_tokens", "Token slots of the host pool (L2) that are in use."
        )
        self.bytes_per_token = gauge(
            "hiqcache_l2_bytes_per_token",
            "Bytes of host memory that a token takes on this rank: codes, scales and rounding.",
        )
        self.staging_bytes = gauge(
            "hiqcache_staging_bytes",
            "Bytes of GPU memory that the pool's transfers hold for staging.",
        )
        self.host_memory_available = gauge(
            "hiqcache_host_memory_available_bytes",
            "Bytes that the server may still take before its cgroup's or the machine's limit, page "
            "cache counted as free; read every 10 s while the server works.",
        )
        self.build_info = gauge(
            "hiqcache_build_info",
            "1, labelled with the HiQCache and SGLang versions that serve the pool.",
            "version",
            "sglang_version",
        )
        self.evicted_tokens = counter(
            "hiqcache_l2_evicted_tokens_total",
            "Tokens evicted from the host pool (L2) to make room. SGLang has no such metric.",
        )
        self.backup_tokens = counter(
            "hiqcache_backup_tokens_total", "Tokens copied from the GPU to the host pool."
        )
        self.backup_bytes = counter(
            "hiqcache_backup_bytes_total",
            "Bytes written to the host pool by this rank, as stored: codes and scales.",
        )
        self.restore_tokens = counter(
            "hiqcache_restore_tokens_total", "Tokens copied from the host pool to the GPU."
        )
        self.restore_bytes = counter(
            "hiqcache_restore_bytes_total",
            "Bytes read from the host pool by this rank, as stored: codes and scales.",
        )
        self.backup_seconds = histogram(
            "hiqcache_backup_seconds",
            "Time a backup (GPU to host, all layers) took on the transfer stream.",
            TRANSFER_BUCKETS,
        )
        self.restore_seconds = histogram(
            "hiqcache_restore_seconds",
            "Time a restore (host to GPU, first to last layer) took on the transfer stream.",
            TRANSFER_BUCKETS,
        )
        self.relative_error = histogram(
            "hiqcache_codec_relative_error",
            "L2 norm of a stored row's error over the row's own norm, of sampled K and V rows as "
            "they lie in the host pool.",
            ERROR_BUCKETS,
        )
        self.excess_rows = counter(
            "hiqcache_codec_excess_rows_total",
            "Sampled rows that differ from the GPU's by more than the codec's bound allows. "
            "Anything but 0 means damaged rows.",
        )
        self.checksum_records = counter(
            "hiqcache_checksum_records_total",
            "Records (one per token and layer) whose sum was checked at their restore: 0 without "
            "HIQCACHE_CHECKSUM=1.",
        )
        self.checksum_mismatches = counter(
            "hiqcache_checksum_mismatches_total",
            "Records that were restored otherwise than they were stored. Anything but 0 means "
            "faulty memory, or a write where none may be.",
        )

    def of(self, labels: PoolLabels, sglang_version: str) -> PoolMetrics:
        """The metrics of one pool; every series exists from here on, counters at zero."""
        return PoolMetrics(self, labels, sglang_version)


class PoolMetrics:
    """The families of HostTierMetrics, bound to one pool's labels."""

    def __init__(self, families: HostTierMetrics, labels: PoolLabels, sglang_version: str) -> None:
        self.capacity_tokens = families.capacity_tokens.labels(*labels)
        self.capacity_bytes = families.capacity_bytes.labels(*labels)
        self.used_tokens = families.used_tokens.labels(*labels)
        self.bytes_per_token = families.bytes_per_token.labels(*labels)
        self.staging_bytes = families.staging_bytes.labels(*labels)
        self.host_memory_available = families.host_memory_available.labels(*labels)
        self.evicted_tokens = families.evicted_tokens.labels(*labels)
        self.backup_tokens = families.backup_tokens.labels(*labels)
        self.backup_bytes = families.backup_bytes.labels(*labels)
        self.restore_tokens = families.restore_tokens.labels(*labels)
        self.restore_bytes = families.restore_bytes.labels(*labels)
        self.backup_seconds = families.backup_seconds.labels(*labels)
        self.restore_seconds = families.restore_seconds.labels(*labels)
        self.relative_error = families.relative_error.labels(*labels)
        self.excess_rows = families.excess_rows.labels(*labels)
        self.checksum_records = families.checksum_records.labels(*labels)
        self.checksum_mismatches = families.checksum_mismatches.labels(*labels)
        families.build_info.labels(*labels, __version__, sglang_version).set(1)


@lru_cache(maxsize=1)
def process_metrics() -> HostTierMetrics:
    """This process's metric families, made at the first call, dead processes' gauges dropped."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder:
        drop_dead_gauges(Path(folder))
    return HostTierMetrics()


def drop_dead_gauges(folder: Path) -> list[Path]:
    """Remove the gauge files of ours in ``folder`` whose process has ended; returns them.

    An operator may point PROMETHEUS_MULTIPROC_DIR at a folder that outlives the server: counters
    there go on, as they should, but a gauge of the last run would be served as if it were now's.
    Only files of this module's gauge mode are touched, and call it before this process makes
    gauges: a file under its own number is then an earlier process's, as in a restarted container.
    """
    dropped = []
    for file in sorted(folder.glob(f"gauge_{_GAUGE_MODE}_*.db")):
        number = file.stem.rpartition("_")[2]
        if number.isdigit() and (int(number) == os.getpid() or not _alive(int(number))):
            file.unlink(missing_ok=True)
            dropped.append(file)
    return dropped


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
