"""The dma transfer against the torch reference, and against fused: the same bytes in the arena."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiqcache.codecs import CODEC_NAMES
from hiqcache.transfers.base import Transfer
from hiqcache.transfers.copy_engine import CopyEngine, Way
from hiqcache.transfers.dma import DmaTransfer
from tests.transfers.pools import Pool, Shape, fused, same

GPU = torch.cuda.is_available()
BASE = Shape(layers=5, page_size=16, host_slots=160, device_slots=160)


class CpuEngine:
    """Copies at once, where there is no copy engine; what order they need is proven on a GPU."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def event(self) -> None:
        return None

    def record(self, event: None, stream: int | None) -> None:
        pass

    def wait(self, event: None, stream: int | None) -> None:
        pass

    def hold(self, way: Way, event: None) -> None:
        pass

    def copy(
        self,
        way: Way,  # noqa: ARG002
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        done: None,  # noqa: ARG002
    ) -> None:
        self.batches.append(list(sizes))
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)


def dma(pool: Pool, **options: Any) -> DmaTransfer:
    """Of pools as small as these the default edge would make one batch."""
    engine: CopyEngine | None = None if GPU else CpuEngine()
    options = {"engine": engine, "edge_bytes": 0} | options
    return DmaTransfer(pool.codec, pool.arena, (pool.k, pool.v), **options)


def page_indices(pool: Pool, pages: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Host slots of whole pages in random order, on the CPU, and device rows in random order."""
    random, size = torch.Generator().manual_seed(seed), pool.shape.page_size
    chosen = torch.randperm(pool.shape.host_slots // size, generator=random)[:pages]
    host = (chosen[:, None] * size + torch.arange(size)).flatten()
    rows = torch.randperm(pool.shape.device_slots, generator=random)[: len(host)]
    return host, rows.to(pool.device)


def records(pool: Pool) -> list[torch.Tensor]:
    """All rows of all planes: what a chunk is rounded up by is nobody's."""
    planes = [plane for part in pool.arena.planes for plane in part]
    return [pool.arena.view(plane, torch.uint8, plane.row_bytes).clone() for plane in planes]


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


SHAPES = {
    "int8": BASE,
    "layer first": BASE.but(order="layer_first"),
    "rot": BASE.but(codec="int8-rot"),
    "fp16, odd heads": BASE.but(heads=3, dtype=torch.float16),
    "pages of 64": BASE.but(page_size=64, host_slots=256, device_slots=256),
    "strided rows": BASE.but(row_stride=2),
    "int4": BASE.but(codec="int4", page_size=32, host_slots=256, device_slots=256),
    "int4, pages of 64, fp16, layer first": BASE.but(
        codec="int4", page_size=64, heads=1, heads_1=3, dim=128, dim_1=32, dtype=torch.float16,
        order="layer_first", row_stride=2, host_slots=256, device_slots=256,
    ),
    "int4, fp8 e4m3": BASE.but(
        codec="int4", page_size=32, host_slots=256, device_slots=256, dtype=torch.float8_e4m3fn,
    ),
    "int4, fp8 e5m2, pages of 64": BASE.but(
        codec="int4", page_size=64, heads=2, dim=32, dtype=torch.float8_e5m2,
        host_slots=256, device_slots=256,
    ),
    "latent and rope": BASE.but(heads=4, dim=128, heads_1=1, dim_1=64, joint=True),
}  # fmt: skip
#: Room for everything; for two layers of a page; for less than a layer of all pages.
ROOMS = {"all": 1 << 22, "little": 40_000, "least": 9_000}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_stores_and_restores_what_the_reference_does_and_nothing_else(
    shape: Shape, room: int, device: torch.device
) -> None:
    pool = Pool(shape, device).fill(7)
    reference, expected = pool.reference()
    host, rows = page_indices(pool, 3 if shape.page_size > 16 else 7)
    transfer = dma(pool, slot_bytes=room)
    transfer.backup(host, rows)
    reference.backup(host, rows.cpu())
    synchronize()
    if shape.codec == "int8":
        assert torch.equal(pool.arena.buffer, expected.arena.buffer)
    else:
        # A code step here and there: the next comparison is of decoding alone.
        assert (pool.arena.buffer != expected.arena.buffer).float().mean() < 2e-3
        pool.arena.buffer.copy_(expected.arena.buffer)
    turned = rows.flip(0)
    pool.restore_all(transfer, host, turned)
    expected.restore_all(reference, host, turned.cpu())
    synchronize()
    torch.testing.assert_close(pool.rows(), expected.rows(), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=20 if not GPU else 60, deadline=None)
@given(data=st.data())
def test_each_transfer_restores_what_the_other_stored(data: st.DataObject) -> None:
    """Random geometries; stored by one, restored by the other, both ways."""
    draw = data.draw
    pages = draw(st.integers(1, 4))
    shape = Shape(
        codec=(codec := draw(st.sampled_from(CODEC_NAMES))),
        layers=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from(dims := [32, 64, 128] if codec == "int4" else [16, 64, 128])),
        heads_1=draw(st.integers(1, 3)),
        dim_1=draw(st.sampled_from(dims)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        page_size=(size := draw(st.sampled_from([32] if codec == "int4" else [16, 24, 32]))),
        order=draw(st.sampled_from(["page_first", "layer_first"])),
        host_slots=size * (pages + 2),
        device_slots=size * (pages + 1),
    )
    pool = Pool(shape, torch.device("cuda" if GPU else "cpu")).fill(draw(st.integers(0, 99)))
    host, rows = page_indices(pool, pages, draw(st.integers(0, 99)))
    chunk = shape.layout.chunk_bytes
    transfers = [fused(pool), dma(pool, slot_bytes=draw(st.integers(chunk, 4 * chunk)))]
    stored = []
    for transfer in transfers:
        pool.arena.buffer.fill_(0xAB)
        transfer.backup(host, rows)
        synchronize()
        stored.append(records(pool))
    assert all(torch.equal(one, other) for one, other in zip(*stored, strict=True))
    restored = []
    for transfer in transfers:
        for buffer in (*pool.k, *pool.v):
            buffer.fill_(torch.nan)
        pool.restore_all(transfer, host, rows)
        synchronize()
        restored.append(pool.rows().clone())
    assert same(restored[0], restored[1])


def test_a_layer_is_there_when_its_call_returns(device: torch.device) -> None:
    pool = Pool(BASE.but(layers=6), device).fill()
    host, rows = page_indices(pool, 5)
    transfer = dma(pool, slot_bytes=30_000)
    transfer.backup(host, rows)
    synchronize()
    for buffer in (*pool.k, *pool.v):
        buffer.fill_(torch.nan)
    for layer in range(6):
        transfer.restore(layer, host, rows)
        synchronize()
        found = [not buffer[rows].isnan().all() for buffer in pool.k]
        assert all(found[: layer + 1])


def test_restores_that_are_given_up_or_begin_anywhere(device: torch.device) -> None:
    pool = Pool(BASE.but(layers=6), device).fill()
    reference, expected = pool.reference()
    host, rows = page_indices(pool, 5)
    other, other_rows = page_indices(pool, 4, seed=1)
    transfer = dma(pool, slot_bytes=30_000)
    transfer.backup(host, rows)
    reference.backup(host, rows.cpu())
    synchronize()
    pool.arena.buffer.copy_(expected.arena.buffer)
    calls = [(0, host, rows), (1, host, rows), (0, other, other_rows), (3, host, rows)]
    calls += [(4, host, rows), (2, other, other_rows)]
    calls += [(layer, host, rows) for layer in range(6)]
    for layer, slots, targets in calls:
        transfer.restore(layer, slots, targets)
        reference.restore(layer, slots, targets.cpu())
    synchronize()
    # What was copied ahead of a given-up restore went no further than the ring.
    assert same(pool.rows(), expected.rows())


def test_a_backup_amid_a_restore_takes_nothing_from_it(device: torch.device) -> None:
    pool = Pool(BASE.but(layers=6), device).fill()
    reference, expected = pool.reference()
    host, rows = page_indices(pool, 5)
    transfer = dma(pool, slot_bytes=30_000)
    for each, targets in ((transfer, rows), (reference, rows.cpu())):
        each.backup(host, targets)
        for layer in range(6):
            if layer in (1, 3):
                each.backup(host.flip(0).view(5, 16).flip(1).flatten(), targets)
            each.restore(layer, host, targets)
    synchronize()
    assert torch.equal(pool.arena.buffer, expected.arena.buffer)
    assert same(pool.rows(), expected.rows())


def test_what_names_no_whole_pages_on_the_cpu_goes_by_kernels(device: torch.device) -> None:
    pool = Pool(BASE, device).fill()
    reference, expected = pool.reference()
    host, rows = page_indices(pool, 4)
    transfer = dma(pool)
    awkward = [(host[:-1], rows[:-1]), (host.flip(0), rows), (host[3:35], rows[3:35])]
    if GPU:
        awkward.append((host.cuda(), rows))
    for slots, targets in awkward:
        pool.arena.buffer.fill_(0xAB)
        expected.arena.buffer.fill_(0xAB)
        transfer.backup(slots, targets)
        reference.backup(slots, targets.cpu())
        synchronize()
        assert torch.equal(pool.arena.buffer, expected.arena.buffer)
        pool.restore_all(transfer, slots, targets)
        expected.restore_all(reference, slots, targets.cpu())
        synchronize()
        assert same(pool.rows(), expected.rows())


@pytest.mark.parametrize("build", [fused, dma])
def test_what_is_no_whole_page_is_refused_where_records_are(
    build: Callable[[Pool], Transfer], device: torch.device
) -> None:
    """Kernels look at the first slot of a page alone: the others' rows would go astray."""
    pool = Pool(SHAPES["int4"], device).fill()
    transfer, before = build(pool), pool.arena.buffer.clone()
    host, rows = page_indices(pool, 2)
    for wrong in (host[:-1], host.flip(0), host[1:33]):
        with pytest.raises(ValueError, match="whole pages of 32 tokens, and these are not"):
            transfer.backup(wrong, rows[: len(wrong)])
        with pytest.raises(ValueError, match="whole pages of 32 tokens, and these are not"):
            transfer.restore(0, wrong, rows[: len(wrong)])
    assert torch.equal(pool.arena.buffer, before)


def test_transfers_of_no_token(device: torch.device) -> None:
    pool = Pool(BASE, device).fill()
    before = pool.rows()
    none = torch.empty(0, dtype=torch.int64)
    transfer = dma(pool)
    transfer.backup(none, none.to(device))
    pool.restore_all(transfer, none, none.to(device))
    synchronize()
    assert bool((pool.arena.buffer == 0xAB).all())
    assert same(pool.rows(), before)


def test_a_page_first_run_of_layers_is_one_piece(device: torch.device) -> None:
    if GPU:
        pytest.skip("the engine that counts is the CPU's")
    engine = CpuEngine()
    pool = Pool(BASE.but(layers=8), device).fill()
    transfer = dma(pool, engine=engine)
    host, rows = page_indices(pool, 3)
    transfer.backup(host, rows)
    chunk = pool.shape.layout.chunk_bytes
    # Backups go page by page.
    assert engine.batches == [[8 * chunk], [8 * chunk] * 2]
    engine.batches.clear()
    pool.restore_all(transfer, host, rows)
    assert engine.batches == [[chunk] * 3, [4 * chunk] * 3, [2 * chunk] * 3, [chunk] * 3]
    engine.batches.clear()
    want = pool.rows()
    pool.restore_all(
        DmaTransfer(pool.codec, pool.arena, (pool.k, pool.v), engine=engine), host, rows
    )
    assert engine.batches == [[8 * chunk] * 3]
    assert same(pool.rows(), want)


def test_it_says_what_it_cannot_serve(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"are packed, of 1\. Use --page-size 16 or more"):
        dma(Pool(Shape(), device))
    with pytest.raises(ValueError, match=r"are padded, of 16"):
        dma(Pool(BASE.but(format="padded"), device))
