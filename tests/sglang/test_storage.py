"""Pages of quantised pools in SGLang's own file backend, and in a zero-copy one."""

from __future__ import annotations

import itertools
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer
from sglang.srt.runtime_context import get_parallel

from hiqcache.compatibility import UnsupportedError
from hiqcache.sglang.copying_pool import MHATokenToKVPoolHostCopy
from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost
from hiqcache.sglang.storage import require_storage
from hiqcache.sglang.storage_backend import guarded
from hiqcache.storage.backends import REFUSED
from hiqcache.storage.metrics import StorageMetrics
from tests.sglang.builders import buffer_info, host_pool
from tests.sglang.stored import LABELS, SLOTS, Stored, config

KEYS = ["aa", "bb", "cc"]


@pytest.fixture(autouse=True)
def _codec(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    with get_parallel().override(attn_tp_size=1):
        yield


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("writes", "reads"),
    list(itertools.product(["page_first", "page_first_direct", "layer_first"], repeat=2)),
)
def test_a_restart_finds_the_pages_under_any_layout(
    writes: str, reads: str, page_size: int, tmp_path: Path
) -> None:
    before = Stored.of(tmp_path, layout=writes, page_size=page_size)
    slots = before.back_up(3)
    assert before.write(KEYS, slots)
    expected = before.rows(slots)

    after = Stored.of(tmp_path, layout=reads, page_size=page_size)
    assert after.storage.batch_exists([*KEYS, "dd"]) == 3
    came, slots = after.read(KEYS)
    assert came == 3
    found = after.rows(slots)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    size = after.pool.layout_of_records.page_bytes
    assert (before.count("written_pages"), before.count("written_bytes")) == (3, 3 * size)
    assert (after.count("read_pages"), after.count("read_bytes")) == (3, 3 * size)
    assert after.count("corrupt_pages") == 0


def test_a_file_is_half_of_bf16s(tmp_path: Path) -> None:
    """What SGLang's own pool writes and what ours does: heads of 128, eight layers, pages of 64."""
    files: dict[str, int] = {}
    for cls in (MHATokenToKVPoolHostCopy, QuantisedMHATokenToKVPoolHost):
        folder = tmp_path / cls.__name__
        folder.mkdir()
        stored = Stored.of(
            folder, head_dim=128, layers=8, page_size=64, slots=4 * 64, pool_class=cls
        )
        assert stored.write(KEYS, stored.back_up(3))
        assert len(list(folder.glob("*.bin"))) == 3
        (files[cls.__name__],) = {file.stat().st_size for file in folder.glob("*.bin")}
    plain, ours = files.values()
    assert round(ours / plain, 3) == 0.508


def test_another_codecs_pages_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored.of(tmp_path)
    stored.write(KEYS, stored.back_up(3))
    monkeypatch.setenv("HIQCACHE_CODEC", "int8-rot")
    other = Stored.of(tmp_path)
    assert other.storage.batch_exists(KEYS) == 0
    assert other.read(KEYS)[0] == 0
    assert other.count("corrupt_pages") == 0
    assert Stored.of(tmp_path, page_size=32).storage.batch_exists(KEYS) == 0
    assert Stored.of(tmp_path, model="another").storage.batch_exists(KEYS) == 0


def file_of(folder: Path, key: str) -> Path:
    (found,) = folder.glob(f"{key}_*.bin")
    return found


@pytest.mark.parametrize("fault", ["cut", "empty", "altered", "swapped", "another rank's"])
def test_a_page_that_is_not_the_page_is_a_miss_and_leaves(fault: str, tmp_path: Path) -> None:
    stored = Stored.of(tmp_path)
    slots = stored.back_up(3)
    stored.write(KEYS, slots)
    good, bad = (file_of(tmp_path, key) for key in KEYS[:2])
    content = bad.read_bytes()
    if fault == "cut":
        bad.write_bytes(content[:-1])
    elif fault == "empty":
        bad.write_bytes(b"")
    elif fault == "altered":
        bad.write_bytes(content[:7] + bytes([content[7] ^ 1]) + content[8:])
    elif fault == "swapped":
        bad.write_bytes(good.read_bytes())
    else:
        (tmp_path / "other").mkdir()  # which rank 0 would make
        other = Stored.of(tmp_path / "other", tp_rank=1, tp_size=2)
        other.write(KEYS, other.back_up(3))
        bad.write_bytes(file_of(tmp_path / "other", KEYS[1]).read_bytes())

    after = Stored.of(tmp_path)
    came, _ = after.read(KEYS)
    assert came == 1
    assert after.count("corrupt_pages") == 1
    assert after.count("failed_operations") == 0
    assert after.count("read_pages") == 1
    # Gone, so that it can be stored anew; and then it is as before.
    assert after.storage.batch_exists(KEYS) == 1
    stored.write(KEYS, slots)
    assert bad.read_bytes() == content
    assert after.read(KEYS)[0] == 3


def test_what_follows_a_page_in_its_file_is_no_part_of_it(tmp_path: Path) -> None:
    """HiCacheFile.get reads a larger file into a page and calls it a success."""
    stored = Stored.of(tmp_path)
    slots = stored.back_up(3)
    stored.write(KEYS, slots)
    with file_of(tmp_path, KEYS[1]).open("ab") as file:
        file.write(b"more")
    assert stored.read(KEYS)[0] == 3
    # A page of another format, larger than ours: stock calls it a success, the guard a miss.
    file_of(tmp_path, KEYS[1]).write_bytes(random.Random(1).randbytes(2**20))
    image = stored.pool.get_dummy_flat_data_page()
    assert stored.storage._backend.get(KEYS[1], image) is image
    assert stored.read(KEYS)[0] == 1
    assert stored.count("corrupt_pages") == 1


@pytest.mark.parametrize("way", ["generic", "zero-copy"])
def test_of_1000_corrupted_pages_none_is_served(way: str, tmp_path: Path) -> None:
    keys = [f"{number:04}" for number in range(1000)]
    held: dict[str, list[bytes]] = {}
    stored = Stored.of(tmp_path if way == "generic" else held, page_size=1, slots=1000)
    slots = stored.back_up(1000)
    chance = random.Random(2)
    if way == "generic":
        assert stored.write(keys, slots)
        for file in tmp_path.glob("*.bin"):
            content = bytearray(file.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        served = sum(stored.read([key])[0] for key in keys)
    else:
        assert all(stored.storage.batch_set_v1(keys, slots))
        for key, pieces in held.items():
            piece = chance.randrange(2)
            content = bytearray(pieces[piece])
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            held[key][piece] = bytes(content)
        target = stored.pool.alloc(1)
        served = sum(stored.storage.batch_get_v1([key], target)[0] for key in keys)
    assert served == 0
    assert stored.count("corrupt_pages") == 1000
    assert stored.count("read_pages") == 0


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_zero_copy_pages_come_back_and_damaged_ones_do_not(layout: str) -> None:
    held: dict[str, list[bytes]] = {}
    before = Stored.of(held, layout=layout)
    slots = before.back_up(3)
    assert before.storage.batch_set_v1(KEYS, slots) == [True] * 3
    page = before.pool.layout_of_records.page_bytes
    assert {tuple(map(len, pieces)) for pieces in held.values()} == {(page // 2, page // 2)}
    assert before.pool.get_ksize_per_token() * before.page_size == page // 2
    after = Stored.of(held, layout=layout)
    target = after.pool.alloc(3 * 16)
    assert after.storage.batch_get_v1(KEYS, target) == [True] * 3
    for found, expected in zip(after.rows(target), before.rows(slots), strict=True):
        assert torch.equal(found, expected)
    # Halves of two pages, each whole.
    names = list(held)
    held[names[1]][1] = held[names[2]][1]
    assert after.storage.batch_get_v1(KEYS, target) == [True, False, False]
    assert after.count("corrupt_pages") == 1
    assert after.count("read_pages") == 4


@pytest.mark.parametrize(
    ("layout", "way"),
    [("page_first", "generic"), ("layer_first", "generic"), ("page_first", "zero-copy")],
)
def test_pools_beside_the_first_are_sealed_too(layout: str, way: str, tmp_path: Path) -> None:
    held: dict[str, list[bytes]] = {}
    stored = Stored.of(tmp_path if way == "generic" else held, layout=layout)
    beside = host_pool(
        buffer_info(SLOTS, page_size=16),
        page_size=16,
        layout=layout,
        tokens=SLOTS,
        allocator_type="file",
    )
    for pool, name in ((stored.pool, PoolName.KV), (beside, PoolName.SWA)):
        stored.storage.register_mem_host_pool_v2(pool, name)
    slots = beside.alloc(48)
    beside.backup_from_device_all_layer(None, slots, torch.arange(48), "kernel")
    transfer = PoolTransfer(PoolName.SWA, host_indices=slots, keys=KEYS)
    assert stored.storage.batch_set_v2([transfer]) == {PoolName.SWA: [True] * 3}
    assert stored.storage.batch_get_v2([transfer]) == {PoolName.SWA: [True] * 3}
    assert stored.count("read_pages") == 3
    if way == "generic":
        one, two = (file_of(tmp_path, f"{key}.swa") for key in KEYS[:2])
        one.write_bytes(two.read_bytes())
    else:
        names = list(held)
        held[names[0]] = held[names[1]]
    # A window may end anywhere: later pages stand on their own.
    assert stored.storage.batch_get_v2([transfer]) == {PoolName.SWA: [False, True, True]}
    assert stored.count("corrupt_pages") == 1


def test_a_full_disk_stores_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    """No file may grow beyond half a page: what the kernel refuses then is what a full disk is."""
    stored = Stored.of(tmp_path)
    slots = stored.back_up(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = stored.pool.layout_of_records.page_bytes // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, hard))
    try:
        assert not stored.write(KEYS, slots)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stored.count("failed_operations") == 1
    assert stored.count("written_pages") == 0
    assert stored.storage.batch_exists(KEYS) == 0
    assert stored.read(KEYS)[0] == 0
    assert stored.count("corrupt_pages") == 0
    assert list(tmp_path.iterdir()) == []
    assert stored.write(KEYS, slots)
    assert stored.read(KEYS)[0] == 3


def test_a_backend_that_dies_and_comes_back(tmp_path: Path) -> None:
    stored = Stored.of(tmp_path / "disk")
    slots = stored.back_up(3)
    stored.write(KEYS, slots)
    (tmp_path / "disk").rename(tmp_path / "gone")
    (tmp_path / "disk").touch()  # a file: reading below it fails, as a mount that is gone does
    assert stored.read(KEYS)[0] == 0
    assert not stored.write(["dd"], slots[:16])
    assert stored.count("corrupt_pages") == 0
    assert stored.count("failed_operations") == 2
    (tmp_path / "disk").unlink()
    (tmp_path / "gone").rename(tmp_path / "disk")
    assert stored.read(KEYS)[0] == 3


def test_sizes_that_backends_ask_for_are_the_arenas(tmp_path: Path) -> None:
    stored = Stored.of(tmp_path)
    pool = stored.pool
    assert pool.get_hybrid_pool_buffer()[0] is pool.kv_buffer
    pointers, sizes = pool.get_page_buffer_meta(pool.alloc(48))
    spans = sorted(zip(pointers, sizes, strict=True))
    base, end = pool.kv_buffer.data_ptr(), pool.kv_buffer.data_ptr() + pool.kv_buffer.numel()
    assert all(base <= start and start + size <= end for start, size in spans)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert pool.get_page_buffer_element_size() == sizes[0]
    assert sum(sizes) == 3 * pool.layout_of_records.page_bytes
    assert pool.get_data_page(0, flat=False).shape == (2, sizes[0])
    assert pool.get_dummy_flat_data_page().numel() == 2 * sizes[0]
    aligned = sizes[0] % 64 == 0 and base % 64 == 0
    assert pool.is_stride_page_aligned(64) == aligned
    assert not pool.is_stride_page_aligned(2 * sizes[0])


def test_a_seal_costs_at_most_a_group_per_page_and_only_behind_storage() -> None:
    info = buffer_info(SLOTS, page_size=16)
    plain = host_pool(info, page_size=16, tokens=SLOTS).layout_of_records
    stored = host_pool(info, page_size=16, tokens=SLOTS, allocator_type="file").layout_of_records
    assert plain.trailer_bytes == 0
    assert plain.page_bytes <= stored.page_bytes <= plain.page_bytes + 128
    assert stored.rows == plain.rows


@pytest.mark.parametrize("backend", [*REFUSED, "unheard-of"])
def test_backends_that_cannot_be_served_are_refused_by_name(backend: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--hicache-storage-backend {backend}: "):
        host_pool(buffer_info(), allocator_type=backend)


def test_layouts_a_backend_cannot_use_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="page_first, page_first_direct; it is layer_first"):
        host_pool(buffer_info(), layout="layer_first", allocator_type="mooncake")
    pool = host_pool(buffer_info(), layout="layer_first", allocator_type="file")
    with pytest.raises(UnsupportedError, match="--hicache-mem-layout page_first"):
        pool.get_page_buffer_meta(torch.arange(1))


def test_the_mover_and_sums_of_records_are_refused_beside_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedError, match="HIQCACHE_TRANSFER=mover pads its records"):
        require_storage("file", "page_first", "padded")
    monkeypatch.setenv("HIQCACHE_CHECKSUM", "1")
    with pytest.raises(UnsupportedError, match="HIQCACHE_CHECKSUM=1 knows no sums"):
        host_pool(buffer_info(), allocator_type="file")


def test_storage_that_is_attached_later_is_refused() -> None:
    pool = host_pool(buffer_info())
    with pytest.raises(UnsupportedError, match="without room for its pages' checksums"):
        pool.require_stored("file")


def test_sglangs_own_pool_is_measured_and_nothing_else(tmp_path: Path) -> None:
    info = buffer_info(SLOTS, page_size=16)
    pool = host_pool(info, page_size=16, tokens=SLOTS, cls=MHATokenToKVPoolHostCopy)
    facts = config(pool, "some/model")
    assert facts.model_name == "some/model"
    facts.extra_config = {"file_storage_path": str(tmp_path)}
    metrics = StorageMetrics(CollectorRegistry()).of(LABELS)
    storage = guarded(HiCacheFile(facts), facts, pool, lambda _: metrics)
    assert isinstance(storage, HiCacheFile)
    assert type(storage).__name__ == "HiCacheFile"
    storage.register_mem_pool_host(pool)
    page = torch.randn_like(pool.get_data_page(0).float()).to(torch.bfloat16)
    assert storage.batch_set(["aa"], [page])
    (file,) = tmp_path.glob("*.bin")
    assert file.name == "aa_some-model_0_1.bin"
    assert file.read_bytes() == page.view(torch.uint8).numpy().tobytes()
    (found,) = storage.batch_get(["aa"], [pool.get_dummy_flat_data_page()])
    assert found is not None
    assert torch.equal(found, page)
    # As without HiQCache: a damaged page is served. It is not ours to judge.
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    (found,) = storage.batch_get(["aa"], [pool.get_dummy_flat_data_page()])
    assert found is not None
    assert metrics.read_pages._value.get() == 2
    assert metrics.read_bytes._value.get() == 2 * page.nbytes
    assert metrics.corrupt_pages._value.get() == 0
