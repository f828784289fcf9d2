"""Observed pools on a GPU: nothing waits for the stream, and what is reported is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from bench.metrics_overhead import LAYERS, device_rows, host_pool
from hiqcache.metrics import HostTierMetrics, PoolLabels
from hiqcache.sglang import observed as module
from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost

pytestmark = pytest.mark.gpu

TOKENS = 256


@pytest.fixture(params=[QuantisedMHATokenToKVPoolHost, MHATokenToKVPoolHost], ids=["int8", "stock"])
def pool(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, CollectorRegistry]]:
    registry = CollectorRegistry()
    families = HostTierMetrics(registry)
    labels = PoolLabels("x", "y", "kv", "0", "0", "0", "m")
    monkeypatch.setattr(module, "process_metrics", lambda: families)
    monkeypatch.setattr(module, "labels_of", lambda _: labels)
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    info = device_rows(2 * TOKENS, torch.device("cuda"))
    built = host_pool(info, module.observed(request.param), 2 * TOKENS)
    yield built, registry
    built.destroy()


def value(registry: CollectorRegistry, name: str) -> float:
    (found,) = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"hiqcache_{name}"
    ]
    return found


def backup_slots(host: Any, slots: torch.Tensor) -> torch.Tensor:
    """As SGLang gives them: its own staged write-back reads them on the CPU."""
    return slots if host.can_use_write_back_jit else slots.to("cuda")


def test_transfers_are_measured_without_waiting(pool: tuple[Any, CollectorRegistry]) -> None:
    host, registry = pool
    rows = torch.arange(TOKENS, device="cuda")
    slots = host.alloc(TOKENS)
    on_gpu = slots.to("cuda")
    given = backup_slots(host, slots)

    def both() -> None:
        host.backup_from_device_all_layer(None, given, rows, "kernel")
        for layer in range(LAYERS):
            host.load_to_device_per_layer(None, on_gpu, rows, layer, "kernel")

    both()  # compiles kernels, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # 0.1 s of other work first: nothing that waits for the stream could stay unnoticed.
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        both()
        assert value(registry, "backup_seconds_count") == 1
        assert value(registry, "restore_seconds_count") == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    host.free(slots)
    assert value(registry, "backup_tokens_total") == 2 * TOKENS
    assert value(registry, "backup_seconds_count") == 2
    assert value(registry, "restore_seconds_count") == 2
    # The sleep ran before the transfers began, so their own events do not hold it.
    assert 0 < value(registry, "restore_seconds_sum") < 0.1


def test_sampled_rows_are_judged_once_the_backup_has_completed(
    pool: tuple[Any, CollectorRegistry],
) -> None:
    host, registry = pool
    rows = torch.arange(TOKENS, device="cuda")
    slots = host.alloc(TOKENS)
    host.backup_from_device_all_layer(None, backup_slots(host, slots), rows, "kernel")
    torch.cuda.synchronize()
    host.alloc(1)
    assert value(registry, "codec_relative_error_count") == 2
    assert value(registry, "codec_relative_error_sum") < 0.04
    assert value(registry, "codec_excess_rows_total") == 0
