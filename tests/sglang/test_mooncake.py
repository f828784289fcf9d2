"""Pages of quantised pools in a real Mooncake store: a master and a store over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import get_parallel

from bench.lab.mooncake import Mooncake
from hiqcache.compatibility import UnsupportedError
from tests.sglang.builders import buffer_info, host_pool
from tests.sglang.stored import Stored

pytestmark = pytest.mark.storage

KEYS = ["aa", "bb", "cc"]


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with Mooncake(tmp_path_factory.mktemp("mooncake"), gigabytes=0.25) as running:
        yield running


@pytest.fixture(autouse=True)
def _codec(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    with get_parallel().override(attn_tp_size=1):
        yield


def test_replicas_share_pages_and_a_damaged_one_is_a_miss_that_leaves(
    mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Stored.of(mooncake), Stored.of(mooncake, layout="page_first_direct")
    slots = one.back_up(3)
    assert one.storage.batch_set_v1(KEYS, slots) == [True] * 3
    target = other.pool.alloc(3 * 16)
    assert other.storage.batch_exists([*KEYS, "dd"]) == 3
    assert other.storage.batch_get_v1(KEYS, target) == [True] * 3
    for found, expected in zip(other.rows(target), one.rows(slots), strict=True):
        assert torch.equal(found, expected)
    size = one.pool.layout_of_records.page_bytes
    assert other.count("read_bytes") == 3 * size

    # Another codec's pages are not there, nor another model's.
    monkeypatch.setenv("HIQCACHE_CODEC", "int8-rot")
    assert Stored.of(mooncake).storage.batch_exists(KEYS) == 0
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    assert Stored.of(mooncake, model="another").storage.batch_exists(KEYS) == 0

    # One byte of one half of the second page, in the store itself.
    store = one.storage.store
    name = f"{one.storage.config_prefix}_{KEYS[1]}_0_v"
    half = bytearray(store.get(name))
    assert len(half) == size // 2
    half[5] ^= 1
    assert store.remove(name, True) == 0
    assert store.put(name, bytes(half)) == 0
    assert other.storage.batch_get_v1(KEYS, target) == [True, False, False]
    assert other.count("corrupt_pages") == 1
    assert other.storage.batch_exists(KEYS) == 1
    # Stored anew, it is whole.
    assert one.storage.batch_set_v1(KEYS, slots) == [True] * 3
    assert other.storage.batch_get_v1(KEYS, target) == [True] * 3
    assert other.count("corrupt_pages") == 1


def test_a_second_quantised_pool_is_refused(mooncake: Mooncake) -> None:
    """Mooncake would ask it for its V buffer when its pages are written, and fail every write."""
    stored = Stored.of(mooncake)
    stored.storage.register_mem_host_pool_v2(stored.pool, PoolName.KV)
    beside = host_pool(buffer_info(), allocator_type="mooncake")
    with pytest.raises(UnsupportedError, match=r"second pool \(swa\).*file"):
        stored.storage.register_mem_host_pool_v2(beside, PoolName.SWA)
