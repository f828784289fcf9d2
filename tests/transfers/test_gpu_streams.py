"""Transfers beside other streams, as SGLang runs them: delayed, interleaved, growing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from hiqcache.transfers.base import Transfer
from hiqcache.transfers.mover import MoverTransfer
from tests.transfers.pools import Pool, Shape, fused, same

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")

Make = Callable[[Pool], Transfer]


def mover(pool: Pool) -> Transfer:
    from hiqcache.sglang.jit_mover import JitMover

    return MoverTransfer(pool.codec, pool.arena, (pool.k, pool.v), JitMover())


needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="needs SGLang's JIT mover"
)
TRANSFERS = [
    pytest.param(fused, "packed", id="fused"),
    pytest.param(mover, "padded", id="mover", marks=needs_sglang),
]


@pytest.mark.parametrize(("make", "form"), TRANSFERS)
def test_a_layer_that_is_marked_done_can_be_read(make: Make, form: str) -> None:
    """A slow restore, and a forward stream that reads each layer at its event."""
    shape = Shape(
        layers=12, heads=8, dim=128, host_slots=1024, device_slots=1024, format=form
    )  # type: ignore[arg-type]  # fmt: skip
    pool = Pool(shape, CUDA).fill()
    reference, expected = pool.reference()
    transfer = make(pool)
    host, rows = pool.indices(1024)
    transfer.backup(host, rows)
    reference.backup(host.cpu(), rows.cpu())
    for buffer in (*expected.k, *expected.v):
        buffer.fill_(torch.nan)
    expected.restore_all(reference, host.cpu(), rows.cpu())
    load, forward = torch.cuda.Stream(), torch.cuda.Stream()

    def read(wait: bool) -> torch.Tensor:
        for buffer in (*pool.k, *pool.v):
            buffer.fill_(torch.nan)
        seen = torch.zeros(2, shape.layers, 1024, 8, 128, dtype=shape.dtype, device=CUDA)
        torch.cuda.synchronize()
        for layer in range(shape.layers):
            with torch.cuda.stream(load):
                torch.cuda._sleep(2_000_000)  # as SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES
                transfer.restore(layer, host, rows)
                done = torch.cuda.Event()
                done.record()
            with torch.cuda.stream(forward):
                if wait:
                    done.wait()
                seen[0, layer].copy_(pool.k[layer])
                seen[1, layer].copy_(pool.v[layer])
        torch.cuda.synchronize()
        return seen

    for _ in range(5):
        assert same(read(wait=True), expected.rows())
    # The test can fail: a reader that does not wait sees rows that are not there yet.
    assert not same(read(wait=False), expected.rows())


class Model:
    """What a pool must hold after each round, in plain torch on one stream."""

    def __init__(self, pool: Pool) -> None:
        self.codec = pool.codec
        self.rows = torch.stack([torch.stack(pool.k), torch.stack(pool.v)])
        shape = pool.shape
        size = (2, shape.layers, shape.host_slots, shape.heads)
        self.codes = torch.zeros(*size, shape.dim, dtype=torch.int8, device=CUDA)
        self.scales = torch.zeros(size, dtype=torch.bfloat16, device=CUDA)

    def backup(self, host: torch.Tensor, rows: torch.Tensor) -> None:
        codes, scales = self.codec.encode(self.rows[:, :, rows])
        self.codes[:, :, host], self.scales[:, :, host] = codes, scales

    def restore(self, host: torch.Tensor, rows: torch.Tensor) -> None:
        codes, scales = self.codes[:, :, host], self.scales[:, :, host]
        self.rows[:, :, rows] = self.codec.decode(codes, scales, self.rows.dtype)


@pytest.mark.parametrize(("make", "form"), TRANSFERS)
def test_backups_and_restores_interleave(make: Make, form: str) -> None:
    """3,000 rounds of a backup, a restore and a forward's writes at once, on three streams.

    In a round the three name different rows and slots, so they may overlap; which ones they name
    is drawn anew, so that rounds depend on each other. Every 100 rounds all rows are compared with
    the model's. Sizes vary, so the mover's staging grows in the middle; half of the rounds pass
    their indices on the CPU.
    """
    rounds, batch, slots, layers = 3000, 100, 512, 5
    shape = Shape(
        layers=layers, heads=4, dim=64, host_slots=slots, device_slots=slots, format=form
    )  # type: ignore[arg-type]  # fmt: skip
    pool = Pool(shape, CUDA).fill()
    transfer = make(pool)
    every = torch.arange(slots, device=CUDA)
    transfer.backup(every, every)
    model = Model(pool)
    model.backup(every, every)
    torch.cuda.synchronize()
    names = ("backup", "restore", "forward")
    streams = {name: torch.cuda.Stream() for name in names}
    random = torch.Generator().manual_seed(1)
    ended: list[torch.cuda.Event] = []
    for start in range(0, rounds, batch):
        bank = torch.randn(batch, 2, layers, 64, 4, 64, device=CUDA, dtype=torch.bfloat16)
        device_order = torch.stack([torch.randperm(slots, generator=random) for _ in range(batch)])
        host_order = torch.stack([torch.randperm(slots, generator=random) for _ in range(batch)])
        on_device = device_order.to(CUDA), host_order.to(CUDA)
        largest = 8 + (slots // 3) * start // rounds  # grows, and staging with it
        torch.cuda.synchronize()
        for index in range(batch):
            sizes = torch.randint(1, largest, (2,), generator=random).tolist()
            down, up = slice(0, sizes[0]), slice(sizes[0], sum(sizes))
            write = slice(sum(sizes), sum(sizes) + 64)
            rows, hosts = on_device[0][index], on_device[1][index]
            given_rows, given_hosts = (
                (rows, hosts) if index % 2 else (device_order[index], host_order[index])
            )
            for stream in streams.values():
                for event in ended:
                    stream.wait_event(event)
            with torch.cuda.stream(streams["backup"]):
                transfer.backup(given_hosts[down], given_rows[down])
            with torch.cuda.stream(streams["restore"]):
                up_hosts, up_rows = given_hosts[up], given_rows[up]
                for layer in range(shape.layers):
                    transfer.restore(layer, up_hosts, up_rows)
            with torch.cuda.stream(streams["forward"]):
                for layer in range(shape.layers):
                    pool.k[layer][rows[write]] = bank[index, 0, layer]
                    pool.v[layer][rows[write]] = bank[index, 1, layer]
            ended = [stream.record_event() for stream in streams.values()]
            model.backup(hosts[down], rows[down])
            model.restore(hosts[up], rows[up])
            model.rows[:, :, rows[write]] = bank[index]
        torch.cuda.synchronize()
        assert same(pool.rows(), model.rows), f"rows differ after {start + batch} rounds"


@needs_sglang
def test_staging_grows_while_it_is_in_use() -> None:
    """Backups of growing size behind a sleeping stream: each outgrows the one that still waits."""
    shape = Shape(layers=2, heads=4, dim=64, host_slots=4096, device_slots=4096, format="padded")
    pool = Pool(shape, CUDA).fill()
    reference, expected = pool.reference()
    transfer = mover(pool)
    host, rows = pool.indices(4096)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    start = 0
    for tokens in (5, 11, 40, 170, 900, 2048, 922):
        part = slice(start, start + tokens)
        transfer.backup(host[part], rows[part])
        # Memory that was given back too early would be filled with this.
        torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=CUDA)
        start += tokens
    reference.backup(host.cpu(), rows.cpu())
    pool.restore_all(transfer, host, rows.flip(0))
    expected.restore_all(reference, host.cpu(), rows.flip(0).cpu())
    assert same(pool.rows(), expected.rows())
    assert torch.equal(pool.arena.buffer, _records(pool, expected))


def _records(pool: Pool, expected: Pool) -> torch.Tensor:
    """The expected arena, with the padding that the mover copied along."""
    record = pool.shape.layout.page_bytes // (2 * pool.shape.layers)
    row = pool.shape.layout.rows[0]
    merged = pool.arena.buffer.clone().view(-1, record)
    merged[:, : row.codes + row.scales] = expected.arena.buffer.view(-1, record)[
        :, : row.codes + row.scales
    ]
    return merged.view(-1)
