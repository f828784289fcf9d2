"""Observed host pools: real pools of SGLang's classes, what they do and what is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hiqcache.metrics import HostTierMetrics
from hiqcache.sglang import observed as module
from hiqcache.sglang import row_sample
from hiqcache.sglang.copying_pool import (
    CopyingPool,
    MHATokenToKVPoolHostCopy,
    MLATokenToKVPoolHostCopy,
)
from hiqcache.sglang.host_pool import (
    QuantisedMHATokenToKVPoolHost,
    QuantisedMLATokenToKVPoolHost,
    QuantisedPool,
)
from hiqcache.sglang.observed import mark_eviction, observed
from hiqcache.sglang.rows import device_buffers
from tests.sglang.builders import (
    LAYERS,
    buffer_info,
    host_pool,
    latent_info,
    needs_accounts,
    needs_latent_rows,
)

#: Kinds of row that a sample compares: K and V, latent and rope, or latent rows whole.
KINDS = {
    QuantisedMHATokenToKVPoolHost: 2,
    MHATokenToKVPoolHostCopy: 2,
    QuantisedMLATokenToKVPoolHost: 2,
    MLATokenToKVPoolHostCopy: 1,
}
POOLS = list(KINDS)
LATENT_POOLS = POOLS[2:]


class Watched:
    """An observed pool and its metrics."""

    def __init__(self, pool: Any, registry: CollectorRegistry) -> None:
        self.pool = pool
        self.registry = registry
        self.rows = [rows for kind in device_buffers(pool) for rows in kind]
        self.kinds = KINDS[type(pool).__bases__[1]]

    def value(self, name: str) -> float:
        samples = [
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"hiqcache_{name}"
        ]
        assert len(samples) == 1, name
        return samples[0]

    def backup(self, tokens: int) -> torch.Tensor:
        slots: torch.Tensor = self.pool.alloc(tokens)
        self.pool.backup_from_device_all_layer(None, slots, torch.arange(tokens), "kernel")
        return slots

    def restore(self, slots: torch.Tensor) -> None:
        for layer in range(LAYERS):
            self.pool.load_to_device_per_layer(
                None, slots, torch.arange(len(slots)), layer, "kernel"
            )


@pytest.fixture(
    params=[*POOLS[:2], *(pytest.param(pool, marks=needs_latent_rows) for pool in LATENT_POOLS)],
    ids=["int8", "copy", "latent int8", "latent copy"],
)
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watched:
    registry = CollectorRegistry()
    families = HostTierMetrics(registry)
    monkeypatch.setattr(module, "process_metrics", lambda: families)
    # What a scheduler process has published by the time it builds pools.
    ranks = SimpleNamespace(tp_rank=1, pp_rank=0, dp_rank=None)
    monkeypatch.setattr(module, "get_parallel", lambda: ranks)
    serving = SimpleNamespace(served_model_name="m")
    monkeypatch.setattr(module, "get_serving", lambda: serving)
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    if request.param in LATENT_POOLS:
        pool = host_pool(latent_info(), cls=observed(request.param), target_layer_num=LAYERS)
    else:
        pool = host_pool(buffer_info(), cls=observed(request.param))
    return Watched(pool, registry)


def test_the_class_is_the_pool_s_own_and_made_once() -> None:
    for pool in (*POOLS, MHATokenToKVPoolHost):
        assert issubclass(observed(pool), pool)
        assert observed(pool) is observed(pool)
        assert observed(pool).__name__ == pool.__name__


def test_capacity_and_occupancy(watched: Watched) -> None:
    pool = watched.pool
    assert watched.value("l2_capacity_tokens") == pool.size
    assert watched.value("l2_bytes_per_token") == pool.get_size_per_token()
    assert watched.value("l2_capacity_bytes") == pool.size * pool.get_size_per_token()
    assert watched.value("l2_used_tokens") == 0
    slots = watched.backup(10)
    assert watched.value("l2_used_tokens") == 10
    pool.free(slots[:4])
    assert watched.value("l2_used_tokens") == 6
    pool.clear()
    assert watched.value("l2_used_tokens") == 0


def test_transfers_are_counted_in_stored_bytes_and_timed(watched: Watched) -> None:
    per_token = watched.pool.get_size_per_token()
    slots = watched.backup(10)
    assert watched.value("backup_tokens_total") == 10
    assert watched.value("backup_bytes_total") == 10 * per_token
    assert watched.value("backup_seconds_count") == 1
    assert watched.value("backup_seconds_sum") > 0
    watched.restore(slots[:4])
    assert watched.value("restore_tokens_total") == 4
    assert watched.value("restore_bytes_total") == 4 * per_token
    assert watched.value("restore_seconds_count") == 1
    assert watched.value("restore_seconds_sum") > 0


def test_a_transfer_is_counted_once_it_is_enqueued(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = type(watched.pool).__mro__[2]
    assert plain in POOLS
    order: list[str] = []
    for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
        method = getattr(plain, name)

        def moved(*args: Any, method: Any = method, **kwargs: Any) -> None:
            order.append("moved")
            method(*args, **kwargs)

        monkeypatch.setattr(plain, name, moved)
    monkeypatch.setattr(watched.pool._observer, "settle", lambda: order.append("counted"))
    slots = watched.pool.alloc(4)
    order.clear()
    watched.pool.backup_from_device_all_layer(None, slots, torch.arange(4), "kernel")
    watched.restore(slots)
    assert order == ["moved", "counted", *["moved"] * LAYERS, "counted"]


def test_a_backup_takes_as_long_with_a_sample(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = watched.pool._observer
    now = [0.0]
    take = observer.sampler.take

    def slow(*indices: torch.Tensor) -> int | None:
        now[0] += 100
        found: int | None = take(*indices)
        return found

    monkeypatch.setattr(observer.clock, "mark", lambda: now[0])
    monkeypatch.setattr(observer.sampler, "take", slow)
    watched.backup(4)
    assert watched.value("codec_relative_error_count") == watched.kinds
    assert watched.value("backup_seconds_count") == 1
    assert watched.value("backup_seconds_sum") == 0


def test_draft_layers_are_no_restores_of_their_own(watched: Watched) -> None:
    slots = watched.backup(2)
    for layer in range(LAYERS):
        watched.pool.load_to_device_per_layer(
            None, slots, torch.arange(2), layer, "kernel", is_draft=True
        )
    assert watched.value("restore_tokens_total") == 0


def test_restored_rows_are_what_the_plain_pool_restores(watched: Watched) -> None:
    before = [rows.clone() for rows in watched.rows]
    slots = watched.backup(10)
    for rows in watched.rows:
        rows[:10] = 0
    watched.restore(slots)
    for old, new in zip(before, watched.rows, strict=True):
        torch.testing.assert_close(new, old, atol=0.05, rtol=0.05)


def test_only_what_evict_host_frees_is_an_eviction(watched: Watched) -> None:
    slots = watched.backup(10)
    watched.pool.free(slots[:3])
    assert watched.value("l2_evicted_tokens_total") == 0

    def evict_host(cache: Any, tokens: int) -> int:
        freed: int = cache.free(slots[3 : 3 + tokens])
        return freed

    assert mark_eviction(evict_host, watched.pool, 5) == 5
    watched.pool.free(slots[8:])
    assert watched.value("l2_evicted_tokens_total") == 5


def test_a_failing_eviction_leaves_no_mark(watched: Watched) -> None:
    slots = watched.backup(4)

    def evict_host(cache: Any) -> None:
        raise RuntimeError(f"no such node in {cache}")

    with pytest.raises(RuntimeError, match="no such node"):
        mark_eviction(evict_host, watched.pool)
    watched.pool.free(slots)
    assert watched.value("l2_evicted_tokens_total") == 0


def test_sampled_rows_show_the_codec_s_error(watched: Watched) -> None:
    watched.backup(10)
    assert watched.value("codec_relative_error_count") == watched.kinds  # of one layer
    error = watched.value("codec_relative_error_sum") / watched.kinds
    if isinstance(watched.pool, CopyingPool):
        assert error == 0
    else:
        assert 0.002 < error < 0.02
    assert watched.value("codec_excess_rows_total") == 0


def test_one_row_in_so_many_tokens_is_sampled(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sample, "SAMPLE_EVERY_TOKENS", 20)
    for _ in range(8):
        watched.pool.free(watched.backup(10))
    assert watched.value("codec_relative_error_count") == watched.kinds * 4


def test_a_damaged_row_is_found(watched: Watched) -> None:
    sampler = watched.pool._observer.sampler
    slots = watched.pool.alloc(1)
    sample = sampler.take(slots, torch.tensor([5]))
    watched.pool.backup_from_device_all_layer(None, slots, torch.tensor([6]), "kernel")
    sampler.settle(sample)
    assert watched.value("codec_excess_rows_total") == watched.kinds


def test_rows_that_hold_nan_are_not_judged(watched: Watched) -> None:
    for rows in watched.rows:
        rows[:10] = torch.nan
    watched.backup(10)
    assert watched.value("codec_relative_error_count") == 0
    assert watched.value("codec_excess_rows_total") == 0


def test_a_slot_freed_before_its_sample_is_settled_is_not_judged(watched: Watched) -> None:
    sampler = watched.pool._observer.sampler
    slots = watched.pool.alloc(1)
    sample = sampler.take(slots, torch.tensor([5]))
    watched.pool.free(slots)
    sampler.settle(sample)
    assert watched.value("codec_relative_error_count") == 0


def test_labels_name_codec_transfer_pool_model_and_rank(watched: Watched) -> None:
    labels = module.labels_of(watched.pool)
    quantised = isinstance(watched.pool, QuantisedPool)
    assert labels[:2] == (("int8", "torch") if quantised else ("bf16", "copy"))
    assert labels[2:] == ("kv", "1", "0", "0", "m")


@needs_accounts
def test_staging_that_sglang_set_aside_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a 0 on a GPU says that the plug-in's hook has left it out."""
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    given = (torch.zeros(8, 16), torch.zeros(8, 16))
    assert module.staging_bytes(host_pool(buffer_info(), write_back_staging=given)) == 1024
    assert module.staging_bytes(host_pool(buffer_info())) == 0


@pytest.mark.parametrize("watched", [QuantisedMHATokenToKVPoolHost], indirect=True)
def test_a_record_that_changed_is_counted(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the checksum mode."""
    monkeypatch.setenv("HIQCACHE_CHECKSUM", "1")
    watched.pool = host_pool(buffer_info(), cls=observed(QuantisedMHATokenToKVPoolHost))
    slots = watched.backup(10)
    watched.restore(slots)
    assert watched.value("checksum_records_total") == 10 * LAYERS
    assert watched.value("checksum_mismatches_total") == 0
    watched.pool.kv_buffer[0] += 1
    watched.restore(slots)
    assert watched.value("checksum_mismatches_total") == 1


def test_without_the_checksum_mode_nothing_is_summed(watched: Watched) -> None:
    watched.restore(watched.backup(10))
    assert watched.value("checksum_records_total") == 0
