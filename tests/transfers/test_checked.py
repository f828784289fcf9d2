"""Records are summed when stored and checked when restored; a changed one is seen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import REPOSITORY
from hiqcache.transfers import checksum_kernel
from hiqcache.transfers.checked import MASK, WEIGHT, CheckedTransfer, _planes, record_sums
from hiqcache.transfers.torch import TorchTransfer
from tests.transfers.pools import Pool, Shape

CPU = torch.device("cpu")
SHAPES = {
    "slots": Shape(),
    "pages": Shape(page_size=16, heads=3, codec="int8-rot"),
    "layer first": Shape(page_size=16, order="layer_first", dim=80),
    "padded": Shape(format="padded"),
    "latent and rope": Shape(heads=4, dim=128, heads_1=1, dim_1=64, joint=True),
}


def checked(pool: Pool) -> CheckedTransfer:
    return CheckedTransfer(TorchTransfer(pool.codec, pool.arena, (pool.k, pool.v)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_was_stored_restores_as_ever_and_passes(shape: Shape) -> None:
    pool = Pool(shape, CPU).fill()
    reference, expected = pool.reference()
    transfer = checked(pool)
    host, rows = pool.indices(37)
    for each in (transfer, reference):
        each.backup(host, rows)
    pool.restore_all(transfer, host, rows.flip(0))
    expected.restore_all(reference, host, rows.flip(0))
    assert torch.equal(pool.rows().view(torch.int16), expected.rows().view(torch.int16))
    assert torch.equal(pool.arena.buffer, expected.arena.buffer)
    assert transfer.checked == 37 * shape.layers
    assert transfer.mismatches == 0
    assert transfer.name == "torch"


@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    place=st.floats(0, 1, exclude_max=True),
    token=st.integers(0, 36),
    layer=st.integers(0, 1),
    flip=st.integers(1, 255),
)
def test_any_changed_byte_of_a_record_is_seen(
    shape: Shape, place: float, token: int, layer: int, flip: int
) -> None:
    pool = Pool(shape, CPU).fill()
    transfer = checked(pool)
    host, rows = pool.indices(37)
    transfer.backup(host, rows)
    planes = [plane for plane, _ in _planes(pool.arena)]
    plane = planes[int(place * len(planes))]
    offset = plane.offset(int(host[token]), layer, shape.page_size)
    pool.arena.buffer[offset + int(place * plane.row_bytes)] ^= flip
    pool.restore_all(transfer, host, rows)
    assert transfer.mismatches == 1


def test_a_record_in_anothers_place_is_seen_and_named(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(Shape(page_size=16), CPU).fill()
    transfer = checked(pool)
    host, rows = pool.indices(37)
    transfer.backup(host, rows)
    one, other = int(host[3]), int(host[4])
    for plane, _ in _planes(pool.arena):
        to, source = (plane.offset(slot, 1, 16) for slot in (one, other))
        buffer, size = pool.arena.buffer, plane.row_bytes
        buffer[to : to + size] = buffer[source : source + size].clone()
    with caplog.at_level(logging.ERROR):
        pool.restore_all(transfer, host, rows)
        transfer.report()
        transfer.report()
    assert transfer.mismatches == 1
    (line,) = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert "1 records restored" in line
    assert f"layer 1 of slot {one} in page {one // 16}" in line


def test_what_was_never_stored_is_seen() -> None:
    pool = Pool(Shape(), CPU).fill()
    transfer = checked(pool)
    host, rows = pool.indices(5)
    pool.restore_all(transfer, host, rows)
    assert transfer.mismatches == 5 * pool.shape.layers


def test_no_tokens() -> None:
    pool = Pool(Shape(), CPU)
    transfer = checked(pool)
    none = torch.empty(0, dtype=torch.int64)
    transfer.backup(none, none)
    pool.restore_all(transfer, none, none)
    assert transfer.checked == transfer.mismatches == 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_gives_the_same_sums(shape: Shape, device: torch.device) -> None:
    pool = Pool(shape, device)
    random = torch.Generator().manual_seed(1)
    size = pool.arena.buffer.shape
    pool.arena.buffer.copy_(torch.randint(0, 256, size, dtype=torch.uint8, generator=random))
    slots, _ = pool.indices(37)
    sums = torch.zeros(1, 37, dtype=torch.int64, device=device)
    for plane, place in _planes(pool.arena):
        checksum_kernel.add_sums(sums, pool.arena, plane, place, WEIGHT, MASK, slots, 1)
    assert torch.equal(sums.to(torch.int32).cpu(), record_sums(pool.arena, slots.cpu(), 1, 1))


def test_the_kernel_compiles_for_a_gpu() -> None:
    """Without one: in a process where kernels are not the interpreter's."""
    program = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from hiqcache.transfers.checked import MASK, WEIGHT
from hiqcache.transfers.checksum_kernel import _add_sums as kernel
names = kernel.arg_names
constants = dict(zip(("WEIGHT", "MASK", "BLOCK"), (WEIGHT, MASK, 1024)))
pointers = {"sums": "*i64", "buffer": "*u8", "slots": "*i64"}
kinds = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
source = ASTSource(kernel, signature=kinds, constexprs=values)
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 1000
