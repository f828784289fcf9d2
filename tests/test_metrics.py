"""The metric families: names, help texts, and what a restart leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from hiqcache.metrics import HostTierMetrics, PoolLabels, drop_dead_gauges

LABELS = PoolLabels("int8", "torch", "kv", "0", "0", "0", "m")

#: A process that exports one pool with the capacity given, and keeps running until told to end.
_EXPORT = """
import sys
from hiqcache.metrics import PoolLabels, process_metrics
pool = process_metrics().of(PoolLabels(sys.argv[1], "torch", "kv", "0", "0", "0", "m"), "0.5.23")
pool.capacity_tokens.set(float(sys.argv[2]))
pool.backup_tokens.inc(10)
print("ready", flush=True)
sys.stdin.read()
"""


def page(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_every_series_exists_before_anything_happened() -> None:
    registry = CollectorRegistry()
    HostTierMetrics(registry).of(LABELS, "0.5.23")
    labels = LABELS._asdict()
    values = {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels == labels
    }
    for name in (
        "hiqcache_l2_capacity_tokens",
        "hiqcache_l2_capacity_bytes",
        "hiqcache_l2_used_tokens",
        "hiqcache_l2_bytes_per_token",
        "hiqcache_l2_evicted_tokens_total",
        "hiqcache_backup_tokens_total",
        "hiqcache_backup_bytes_total",
        "hiqcache_backup_seconds_count",
        "hiqcache_restore_tokens_total",
        "hiqcache_restore_bytes_total",
        "hiqcache_restore_seconds_count",
        "hiqcache_staging_bytes",
        "hiqcache_codec_relative_error_count",
        "hiqcache_codec_excess_rows_total",
        "hiqcache_checksum_records_total",
        "hiqcache_checksum_mismatches_total",
        "hiqcache_host_memory_available_bytes",
    ):
        assert values[name] == 0
    assert 'sglang_version="0.5.23"' in page(registry)


@pytest.mark.monitoring
def test_promtool_accepts_the_page() -> None:
    registry = CollectorRegistry()
    HostTierMetrics(registry).of(LABELS, "0.5.23")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page(registry), capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_restart_leaves_no_stale_gauge_and_keeps_counters(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def start(codec: str, capacity: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _EXPORT, codec, str(capacity)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def served() -> str:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]
        return page(registry)

    first = start("bf16", 100)
    assert 'hiqcache_l2_capacity_tokens{codec="bf16"' in served()
    first.communicate()
    second = start("int8", 200)
    try:
        text = served()
    finally:
        second.communicate()
    assert 'hiqcache_l2_capacity_tokens{codec="bf16"' not in text
    assert 'hiqcache_l2_capacity_tokens{codec="int8"' in text
    assert 'hiqcache_backup_tokens_total{codec="bf16"' in text


def test_gauges_of_running_processes_and_of_others_stay(tmp_path: Path) -> None:
    kept = [
        tmp_path / f"gauge_livemostrecent_{os.getppid()}.db",
        tmp_path / f"gauge_mostrecent_{os.getpid()}.db",
        tmp_path / f"counter_{os.getpid()}.db",
    ]
    own = tmp_path / f"gauge_livemostrecent_{os.getpid()}.db"
    for file in (*kept, own):
        file.touch()
    assert drop_dead_gauges(tmp_path) == [own]
    assert all(file.exists() for file in kept)
