"""The mover transfer: its records and its staging, with a mover in plain torch on the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hiqcache.codecs import get_codec
from hiqcache.transfers import mover
from hiqcache.transfers.mover import MoverTransfer, Staging
from tests.transfers.pools import Pool, Shape, same

BASE = Shape(format="padded", heads=3)
CPU = torch.device("cpu")
Pair = tuple[torch.Tensor, torch.Tensor]


class TorchMover:
    """A RecordMover that indexes CPU memory, also behind tables of addresses."""

    def can_move(self, record_bytes: int, page_size: int) -> bool:
        return record_bytes % 128 == 0 and page_size >= 1

    def move_layer(
        self,
        destination: Pair,
        destination_indices: torch.Tensor,
        source: Pair,
        source_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        assert page_size >= 1
        for to, of in zip(destination, source, strict=True):
            to[destination_indices] = of[source_indices]

    def move_all_layers(
        self,
        destination: Pair,
        destination_indices: torch.Tensor,
        destination_stride: int,
        source: Pair,
        source_indices: torch.Tensor,
        source_stride: int,
        record_bytes: int,
        page_size: int,
    ) -> None:
        assert page_size >= 1
        pairs = list(zip(destination_indices.tolist(), source_indices.tolist(), strict=True))
        for to, of in zip(destination, source, strict=True):
            for to_base, of_base in zip(to.tolist(), of.tolist(), strict=True):
                for to_index, of_index in pairs:
                    ctypes.memmove(
                        to_base + to_index * destination_stride,
                        of_base + of_index * source_stride,
                        record_bytes,
                    )


class RefusingMover(TorchMover):
    def can_move(self, record_bytes: int, page_size: int) -> bool:
        return record_bytes < 0 and page_size < 0


def transfer_of(pool: Pool) -> MoverTransfer:
    return MoverTransfer(pool.codec, pool.arena, (pool.k, pool.v), TorchMover())


@pytest.mark.parametrize("staged", [8, 2048], ids=["in slices", "at once"])
@pytest.mark.parametrize(
    "shape",
    [BASE, BASE.but(order="layer_first", page_size=16), BASE.but(page_size=16, heads=8, dim=128)],
)
def test_it_moves_what_the_reference_moves(
    shape: Shape, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "STAGED_TOKENS", staged)
    pool = Pool(shape, CPU).fill()
    reference, expected = pool.reference()
    transfer = transfer_of(pool)
    host, rows = pool.indices(37)
    transfer.backup(host, rows)
    reference.backup(host, rows)
    again, expected_again = pool.reference()
    expected.restore_all(reference, host, rows.flip(0))
    expected_again.restore_all(again, host, rows.flip(0))
    pool.restore_all(transfer, host, rows.flip(0))
    assert same(pool.rows(), expected.rows())
    assert same(expected_again.rows(), expected.rows())


def test_a_backup_touches_no_other_record() -> None:
    pool = Pool(BASE, CPU).fill()
    record = pool.shape.layout.page_bytes // (2 * pool.shape.layers)
    before = pool.arena.buffer.clone()
    host, rows = pool.indices(20)
    transfer_of(pool).backup(host, rows)
    changed = (pool.arena.buffer != before).nonzero().flatten() // (record * pool.shape.layers)
    assert set(changed.tolist()) <= {
        side * pool.shape.host_slots + slot for side in (0, 1) for slot in host.tolist()
    }


def test_no_tokens_is_no_work() -> None:
    pool = Pool(BASE, CPU).fill()
    before = pool.arena.buffer.clone()
    transfer = transfer_of(pool)
    host, rows = pool.indices(0)
    transfer.backup(host, rows)
    transfer.restore(0, host, rows)
    assert torch.equal(pool.arena.buffer, before)
    assert transfer.staging_bytes == 0


def test_staging_grows_geometrically_and_never_shrinks() -> None:
    staging = Staging(CPU, layers=2, record_bytes=128)
    sizes = []
    for tokens in (10, 4, 12, 100, 21):
        with staging.use(tokens) as buffer:
            assert buffer.shape == (2, 2, tokens, 128)
        sizes.append(staging.nbytes // (2 * 2 * 128))
    assert sizes == [10, 10, 20, 100, 100]


def test_staging_is_bounded() -> None:
    staging = Staging(CPU, layers=1, record_bytes=128)
    for tokens in (mover.STAGED_TOKENS - 1, mover.STAGED_TOKENS):
        with staging.use(tokens):
            pass
    assert staging.nbytes == 2 * 128 * mover.STAGED_TOKENS


def test_it_says_what_it_cannot_serve() -> None:
    pool = Pool(BASE, CPU)
    with pytest.raises(ValueError, match="codec int8, not int8-rot: use HIQCACHE_TRANSFER=fused"):
        MoverTransfer(get_codec("int8-rot"), pool.arena, (pool.k, pool.v), TorchMover())
    with pytest.raises(ValueError, match="must be padded; they are packed"):
        transfer_of(Pool(BASE.but(format="packed"), CPU))

    with pytest.raises(ValueError, match=r"records of 256 B \(3 KV heads of 64\)"):
        MoverTransfer(pool.codec, pool.arena, (pool.k, pool.v), RefusingMover())
