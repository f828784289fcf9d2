"""The pool soak on the CPU: it passes for every codec, and finds what was done wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

from bench.lab.arms import arm_named
from bench.soak.pool import PoolSoak
from bench.soak.rows import EXACT, Judge, Rows
from bench.soak.subject import Shape
from hiqcache.codecs import CODEC_NAMES, TOKEN_CODECS, get_codec
from hiqcache.record import kv_parts

SHAPE = Shape(device_tokens=2048, host_tokens=4096, short_pages=2, long_pages=8)
#: For codecs that store whole pages, of 32 tokens or more.
WHOLE_PAGES = replace(SHAPE, page_size=32, device_tokens=4096, host_tokens=8192)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _some_memory_and_one_thread() -> Iterator[None]:
    """Threads of small tensors spend their time waiting for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with host_memory_budget_scope(10**9):
        yield
    torch.set_num_threads(threads)


def shape_of(codec: str) -> Shape:
    return SHAPE if codec in ("bf16", *TOKEN_CODECS) else WHOLE_PAGES


def soak(arm: str, checksum: bool = True, shape: Shape | None = None) -> PoolSoak:
    return PoolSoak(arm_named(arm), shape or shape_of(arm), CPU, seed=1, checksum=checksum)


@pytest.mark.parametrize("arm", ["bf16", *CODEC_NAMES])
def test_every_restore_is_right(arm: str) -> None:
    under = soak(arm)
    under.run(300)
    under._flush()
    under.run(100)
    under.close()
    counts = under.counts
    assert under.faults == []
    assert counts["mismatches"] == 0
    assert counts["checked_restores"] >= 400
    assert counts["checked_tokens"] > 5_000
    if arm != "bf16":
        # Aborted restores are summed and not compared.
        assert counts["checksum_records"] > counts["checked_tokens"] * SHAPE.layers
    for action in (
        *("evicted_tokens", "aborted_backups", "aborted_restores", "retracted_tokens"),
        *("backups", "loads", "flushes"),
    ):
        assert counts[action] > 0, action


@pytest.mark.parametrize(
    ("arm", "page_size", "layout"),
    [("int8", 1, "page_first"), ("int8", 64, "layer_first"), ("int4", 64, "layer_first")],
)
def test_other_pages(arm: str, page_size: int, layout: str) -> None:
    tokens = 4096 * max(1, page_size // 16)
    shape = Shape(
        page_size=page_size, layout=layout, device_tokens=tokens, host_tokens=2 * tokens,
        short_pages=2, long_pages=8,
    )  # fmt: skip
    under = soak(arm, shape=shape)
    under.run(200)
    under.close()
    assert under.faults == []


@pytest.mark.parametrize("arm", ["bf16", *CODEC_NAMES])
def test_a_corrupted_record_is_found_without_sums(arm: str) -> None:
    under = soak(arm, checksum=False)
    under.run(100)
    assert under.faults == []
    damage = under.pool.kv_buffer.view(torch.uint8)
    damage ^= 0x55
    under.run(5_000)
    assert under.counts["mismatches"] > 0
    fault = under.faults[0]
    assert fault["wrong_elements"] > 0
    assert fault["host_slots"]


def test_a_single_flipped_bit_is_found_by_its_sum() -> None:
    """In a code, it moves one element by one step: within what int8-rot's bound allows."""
    under = soak("int8-rot")
    under.run(100)
    chunk = next(c for c in under._chunks if not c.children and c.device is None)
    under.streams.wait()
    plane = under.pool.transfer.arena.planes[0].codes
    offset = plane.offset(int(chunk.host[0]), 1, SHAPE.page_size)
    under.pool.kv_buffer[offset] ^= 1
    under._load([[*_in_l1(under, chunk)]])
    under.look()
    assert under.counts["checksum_mismatches"] == 1
    assert under.faults == [{"records not as stored": 1}]


def _in_l1(under: PoolSoak, chunk: object) -> list:  # type: ignore[type-arg]
    chunk.device = under._slots.take(chunk.tokens)  # type: ignore[attr-defined]
    under.chance.random = lambda: 0.9  # type: ignore[method-assign]  # no abort
    return [chunk]


@pytest.mark.parametrize("arm", ["int8", "int4"])
def test_a_transfer_that_mixes_up_pages_is_found(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    under = soak(arm, checksum=False)
    restore = under.pool.transfer.restore

    def shifted(layer: int, host: torch.Tensor, rows: torch.Tensor) -> None:
        page = under.shape.page_size
        restore(layer, host.roll(page) if layer == 2 else host, rows)

    monkeypatch.setattr(under.pool.transfer, "restore", shifted)
    under.run(50)
    assert under.counts["mismatches"] > 0


def test_a_layer_restored_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    under = soak("int8", checksum=False)
    restore = under.pool.transfer.restore
    late: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def lazy(layer: int, host: torch.Tensor, rows: torch.Tensor) -> None:
        for each in late:
            restore(*each)
        late[:] = [(layer, host, rows)]

    monkeypatch.setattr(under.pool.transfer, "restore", lazy)
    under.run(50)
    assert under.counts["mismatches"] > 0


def test_rows_follow_from_their_numbers_and_differ() -> None:
    rows = Rows(2, 2, 64, CPU)
    first = rows.of(torch.arange(1, 101))
    assert torch.equal(first[:, :, 40:60], rows.of(torch.arange(41, 61)))
    flat = first.float().permute(2, 0, 1, 3, 4).flatten(1)
    assert len(torch.unique(flat, dim=0)) == 100
    plain = first[:, :, :, 0].float()
    assert abs(float(plain.mean())) < 0.1
    assert 0.8 < float(plain.std()) < 1.2
    assert first.isfinite().all()


@pytest.mark.parametrize("codec", ["bf16", *CODEC_NAMES])
def test_another_tokens_rows_are_wrong(codec: str) -> None:
    judge, rows = Judge(codec, 2, 64, 32), Rows(1, 2, 64, CPU)
    values = rows.of(torch.arange(1, 65))
    expected = judge.expected(values)
    for side, layers in enumerate(expected):
        stored = layers[0]
        if codec not in EXACT:
            store = get_codec(codec).stores(kv_parts(2, 64))[side]
            pages = stored.view(2, 32, 2, 64)
            stored = store.decode(*store.encode(pages), pages.dtype).view(stored.shape)
        assert int(judge.wrong(side, layers[0], stored).sum()) == 0
        assert (judge.wrong(side, layers[0], stored.roll(1, 0)) > 0).all()
