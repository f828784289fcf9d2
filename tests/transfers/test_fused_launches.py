"""How the fused transfer shares out its launches: layers, streams, programs, stages."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources

from hiqcache.transfers import kernels
from hiqcache.transfers.launch import Launch
from hiqcache.transfers.torch import TorchTransfer
from tests.transfers.pools import Pool, Shape, fused, same

# The interpreter's numpy warns where a GPU computes on: infinities are among the inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BASE = Shape()


def _restored(pool: Pool) -> list[int]:
    """The layers that hold anything."""
    rows = pool.rows()
    return [layer for layer in range(pool.shape.layers) if not rows[:, layer].isnan().all()]


def _stored_pool(shape: Shape, device: torch.device) -> tuple[Pool, Pool]:
    """A pool whose arena is full and whose rows are NaN, and what it must hold when restored."""
    pool = Pool(shape, device)
    for buffer in (*pool.k, *pool.v):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
    reference, expected = pool.reference()
    every = torch.arange(shape.device_slots)
    reference.backup(every, every)
    pool.arena.buffer.copy_(expected.arena.buffer)
    for buffer in (*pool.k, *pool.v, *expected.k, *expected.v):
        buffer.fill_(torch.nan)
    return pool, expected


@pytest.mark.parametrize("codec", ["int8", "int8-rot"])
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_launch_of_a_restore_serves_one_layer_then_two_then_four(
    tokens: int, codec: str, device: torch.device
) -> None:
    pool, expected = _stored_pool(BASE.but(codec=codec, heads=3, layers=13), device)
    transfer = fused(pool)
    host, rows = pool.indices(tokens)
    held = []
    for layer in range(13):
        transfer.restore(layer, host, rows)
        held.append(len(_restored(pool)))
    assert held == [1, 3, 3, 7, 7, 7, 7, 13, 13, 13, 13, 13, 13]
    reference = TorchTransfer(expected.codec, expected.arena, (expected.k, expected.v))
    expected.restore_all(reference, host.cpu(), rows.cpu())
    torch.testing.assert_close(pool.rows(), expected.rows(), rtol=0, atol=0, equal_nan=True)


def test_layers_asked_for_in_another_way_are_restored_alone(device: torch.device) -> None:
    shape = BASE.but(layers=8)
    pool, _ = _stored_pool(shape, device)
    transfer = fused(pool)
    host, rows = pool.indices(9)
    for layer in range(0, 8, 2):  # not one after the other
        transfer.restore(layer, host, rows)
    assert _restored(pool) == [0, 2, 4, 6]
    pool, _ = _stored_pool(shape, device)
    transfer = fused(pool)
    for layer in range(4):  # never the same tensors
        transfer.restore(layer, host.clone(), rows)
        assert _restored(pool) == list(range(layer + 1))


def test_a_restore_that_begins_again_reads_again(device: torch.device) -> None:
    """Given up after its second layer, with two enqueued; then asked for anew, from other rows."""
    pool, expected = _stored_pool(BASE.but(layers=5), device)
    transfer = fused(pool)
    host, rows = pool.indices(20)
    for layer in range(2):
        transfer.restore(layer, host, rows)
    if device.type == "cuda":
        torch.cuda.synchronize()
    shuffled = expected.arena.buffer.view(expected.arena.pages, -1).flip(0).reshape(-1)
    for arena in (pool.arena, expected.arena):
        arena.buffer.copy_(shuffled)
    for _ in range(2):  # and once more when complete
        for buffer in (*pool.k, *pool.v):
            buffer.fill_(torch.nan)
        pool.restore_all(transfer, host, rows)
    reference = TorchTransfer(expected.codec, expected.arena, (expected.k, expected.v))
    expected.restore_all(reference, host.cpu(), rows.cpu())
    assert same(pool.rows(), expected.rows())


def test_a_launch_that_fails_leaves_no_layer_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a caller who goes on all the same, every layer whose call returned is there."""
    pool, _ = _stored_pool(BASE.but(layers=6), device)
    transfer = fused(pool)
    host, rows = pool.indices(8)
    transfer.restore(0, host, rows)
    with monkeypatch.context() as patch:
        patch.setattr(transfer._decode, "_kernel", {})
        with pytest.raises(KeyError):
            transfer.restore(1, host, rows)
    for layer in range(2, 6):
        transfer.restore(layer, host, rows)
    assert _restored(pool) == [0, 2, 3, 4, 5]


def test_a_launch_serves_the_stream_that_it_was_enqueued_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another stream, a layer that an earlier launch is still to bring is asked for anew."""
    pool, _ = _stored_pool(BASE.but(layers=3), device)
    transfer = fused(pool)
    host, rows = pool.indices(9)
    for stream, layer in ((1, 0), (1, 1), (2, 2)):
        monkeypatch.setattr(transfer._decode, "stream", lambda stream=stream: stream)
        transfer.restore(layer, host, rows)
        if layer == 1:
            assert _restored(pool) == [0, 1, 2]
            for buffer in (*pool.k, *pool.v):
                buffer.fill_(torch.nan)
    assert _restored(pool) == [2]


def test_the_shortest_restores_keep_all_programs_busy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a layer is one tile, programs that have no tile have a layer."""
    pool, _ = _stored_pool(BASE.but(layers=16), device)
    launch = Launch(8192, 6, 4, 5)
    transfer = fused(pool, restore=launch)
    grids: list[tuple[int, ...]] = []
    kernel = transfer._decode._kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(transfer._decode, "_kernel", Watched())
    host, rows = pool.indices(9)
    pool.restore_all(transfer, host, rows)
    assert grids == [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 6, 1), (1, 1, 1)]
    assert _restored(pool) == list(range(16))


def test_long_restores_are_launched_layer_by_layer(device: torch.device) -> None:
    """Where a layer takes long by itself, none waits for another."""
    pool, _ = _stored_pool(BASE.but(layers=6), device)
    transfer = fused(pool, launch_tokens=50)
    for tokens, want in ((26, [1, 2, 3]), (25, [1, 3, 3])):
        for buffer in (*pool.k, *pool.v):
            buffer.fill_(torch.nan)
        host, rows = pool.indices(tokens)
        held = []
        for layer in range(3):
            transfer.restore(layer, host, rows)
            held.append(len(_restored(pool)))
        assert held == want


def test_a_launch_has_the_stages_that_the_gpu_has_room_for(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Triton compiles before it knows the GPU's limits, and says so when a kernel is loaded."""
    tried: list[int] = []
    room = 3

    def compiled(kernel: object, launch: Launch, _: object) -> object:
        if kernel is kernels.restore:
            tried.append(launch.stages)
            if launch.stages > room:
                raise OutOfResources(262_144, 232_448, "shared memory")
        return kernel

    pool, launch = Pool(BASE, device), Launch(1024, 1, 4, stages=6)
    monkeypatch.setattr("hiqcache.transfers.codec_kernels._compile", compiled)
    transfer = fused(pool, restore=launch)
    assert tried == [6, 5, 4, 3]
    assert transfer.launches["restore"] == Launch(1024, 1, 4, stages=3)
    tried.clear()
    room = 0
    with pytest.raises(ValueError, match=r"262144.*use HIQCACHE_TRANSFER=torch"):
        fused(pool, restore=launch)
    assert tried == [6, 5, 4, 3, 2, 1]
