"""The fused transfer against the torch reference; on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiqcache.codecs import get_codec
from hiqcache.codecs.int8_rot import Int8Rot
from hiqcache.record import RecordLayout, RowFormat
from hiqcache.transfers.base import Arena
from hiqcache.transfers.codec_kernels import check_gpu
from hiqcache.transfers.fused import FusedTransfer
from hiqcache.transfers.launch import Launch
from tests.transfers.pools import POISON, Pool, Shape, fused, same

# The interpreter's numpy warns where a GPU computes on: infinities are among the inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BASE = Shape()

SHAPES = {
    "qwen3": BASE.but(heads=8, dim=128),
    "smollm2": BASE.but(heads=3, dim=64, layers=3),
    "forty heads": BASE.but(heads=40, dim=128, layers=1),
    "one head": BASE.but(heads=1, dim=128, page_size=16),
    "dim 80": BASE.but(dim=80),
    "dim 96": BASE.but(dim=96, heads=5, page_size=64, order="layer_first"),
    "dim 256": BASE.but(dim=256, layers=1, dtype=torch.float16),
    "fp16": BASE.but(heads=3, dtype=torch.float16, page_size=16),
    "layer first": BASE.but(heads=3, order="layer_first"),
    "layer first pages": BASE.but(order="layer_first", page_size=16),
    "page first pages": BASE.but(heads=8, page_size=64),
    "padded": BASE.but(format="padded"),
    "padded layer first": BASE.but(format="padded", order="layer_first", page_size=16),
    "strided rows": BASE.but(row_stride=3),
    "latent and rope": BASE.but(heads=4, dim=128, heads_1=1, dim_1=64, joint=True),
    "latent and rope, pages": BASE.but(
        heads=4, dim=128, heads_1=1, dim_1=64, joint=True, page_size=64, order="layer_first"
    ),
    "narrow and wide": BASE.but(heads=3, dim=64, dim_1=80, page_size=16),
    "other strides": BASE.but(heads=2, dim=128, heads_1=3, dim_1=64, row_stride=2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_backup_writes_the_reference_bytes_and_no_others(
    shape: Shape, device: torch.device
) -> None:
    pool = Pool(shape, device).fill()
    reference, expected = pool.reference()
    host, rows = pool.indices(37)
    fused(pool).backup(host, rows)
    reference.backup(host.cpu(), rows.cpu())
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(pool.arena.buffer, expected.arena.buffer)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_restore_writes_the_reference_rows_and_no_others(
    shape: Shape, device: torch.device
) -> None:
    pool = Pool(shape, device).fill(1)
    reference, expected = pool.reference()
    host, rows = pool.indices(37)
    reference.backup(host.cpu(), rows.cpu())
    pool.arena.buffer.copy_(expected.arena.buffer)
    turned = rows.flip(0)
    pool.restore_all(fused(pool), host, turned)
    expected.restore_all(reference, host.cpu(), turned.cpu())
    assert same(pool.rows(), expected.rows())


#: Equal widths, and a part that is narrower than the other.
WIDTHS = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "rope": (128, 64), "v": (64, 128)}


@pytest.mark.parametrize("dims", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotated_codes_differ_by_one_step_in_one_of_a_thousand_at_most(
    dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    shape = BASE.but(
        codec="int8-rot", heads=3, dim=dims[0], dim_1=dims[1], dtype=dtype, page_size=16
    )
    pool = Pool(shape, device).fill(2)
    reference, expected = pool.reference()
    host, rows = pool.indices(48)
    fused(pool).backup(host, rows)
    reference.backup(host.cpu(), rows.cpu())
    if device.type == "cuda":
        torch.cuda.synchronize()
    # Arenas are compared through their codes and scales, since a scale may differ too: by one step
    # of bf16, where its quotient lies at a rounding boundary.
    codes, scales = _stored(pool)
    want_codes, want_scales = _stored(expected)
    steps = (codes.int() - want_codes.int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= 1e-3
    finite = ~want_scales.isnan()
    assert torch.equal(finite, ~scales.isnan())
    scale_steps = scales.view(torch.int16).int() - want_scales.view(torch.int16).int()
    assert scale_steps[finite].abs().max() <= 1


@pytest.mark.parametrize("dims", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotated_records_decode_to_the_reference_rows(
    dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    shape = BASE.but(codec="int8-rot", dim=dims[0], dim_1=dims[1], dtype=dtype, order="layer_first")
    pool = Pool(shape, device).fill(3)
    reference, expected = pool.reference()
    host, rows = pool.indices(48)
    reference.backup(host.cpu(), rows.cpu())
    pool.arena.buffer.copy_(expected.arena.buffer)
    pool.restore_all(fused(pool), host, rows)
    expected.restore_all(reference, host.cpu(), rows.cpu())
    # Zeros may differ in sign: the reference flips the sign of a sum, the kernel that of its terms.
    torch.testing.assert_close(pool.rows(), expected.rows(), rtol=0, atol=0, equal_nan=True)


def test_every_bf16_quotient_rounds_as_the_reference(device: torch.device) -> None:
    """Every significand of a maximum, with every bf16 value from 2^-9 of it up in its head."""
    dim, span = 256, 10
    values = (
        (torch.arange(span * 128) + (127 - span + 1) * 128).to(torch.int16).view(torch.bfloat16)
    )
    blocks = values.view(-1, 128)
    maxima = torch.arange(127 * 128, 128 * 128).to(torch.int16).view(torch.bfloat16)
    heads = torch.zeros(len(maxima), len(blocks), dim, dtype=torch.bfloat16)
    heads[:, :, :128] = torch.where(blocks <= maxima[:, None, None], blocks, 0)
    heads[:, :, 128:] = -heads[:, :, :128]
    heads[:, :, 0] = maxima[:, None]
    slots = len(maxima)
    shape = BASE.but(
        heads=len(blocks), dim=dim, layers=1, host_slots=slots, device_slots=slots
    )  # fmt: skip
    pool = Pool(shape, device)
    pool.k[0].copy_(heads)
    pool.v[0].copy_(heads * 2.0**-100)
    reference, expected = pool.reference()
    host, rows = pool.indices(slots)
    fused(pool).backup(host, rows)
    reference.backup(host.cpu(), rows.cpu())
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(pool.arena.buffer, expected.arena.buffer)


@settings(deadline=None, max_examples=25)
@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_any_bits_round_trip_as_the_reference(data: st.DataObject, dtype: torch.dtype) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = BASE.but(layers=1, heads=1, dim=16, dtype=dtype, host_slots=8, device_slots=8)
    pool = Pool(shape, device)
    # Exponents close to each other, so that codes other than zero occur.
    exponent = data.draw(st.integers(0, 255 if dtype == torch.bfloat16 else 31))
    width = 7 if dtype == torch.bfloat16 else 10
    bits = st.tuples(
        st.integers(0, 1), st.integers(max(exponent - 6, 0), exponent), st.integers(0, 2**width - 1)
    ).map(lambda part: (part[0] << 15 | part[1] << width | part[2]) - (part[0] << 16))
    for buffer in (*pool.k, *pool.v):
        drawn = data.draw(st.lists(bits, min_size=8 * 16, max_size=8 * 16))
        buffer.copy_(torch.tensor(drawn, dtype=torch.int16).view(dtype).view(8, 1, 16))
    reference, expected = pool.reference()
    host, rows = pool.indices(8)
    transfer = fused(pool)
    transfer.backup(host, rows)
    reference.backup(host.cpu(), rows.cpu())
    pool.restore_all(transfer, host, rows)
    expected.restore_all(reference, host.cpu(), rows.cpu())
    assert same(pool.rows(), expected.rows())
    assert torch.equal(pool.arena.buffer, expected.arena.buffer)


def test_a_fault_in_one_head_stays_there(device: torch.device) -> None:
    pool = Pool(BASE.but(heads=3), device)
    for buffer in (*pool.k, *pool.v):
        buffer.copy_(torch.randn(buffer.shape))
    pool.k[1][5, 2, 17] = torch.inf
    host, rows = pool.indices(48)
    transfer = fused(pool)
    transfer.backup(host, rows)
    pool.restore_all(transfer, host, rows)
    faulty = pool.rows().isnan().nonzero()
    assert faulty[:, :4].unique(dim=0).tolist() == [[0, 1, 5, 2]]
    assert len(faulty) == pool.shape.dim


@pytest.mark.parametrize("codec", ["int8", "int8-rot"])
def test_no_tokens_is_no_work(codec: str, device: torch.device) -> None:
    pool = Pool(BASE.but(codec=codec), device)
    host, rows = pool.indices(0)
    transfer = fused(pool)
    transfer.backup(host, rows)
    pool.restore_all(transfer, host, rows)
    assert bool((pool.arena.buffer == POISON).all())
    assert bool(pool.rows().isnan().all())


@pytest.mark.parametrize("tokens", [1, 7, 48])
@pytest.mark.parametrize(
    "launch",
    [Launch(1024, 3, 4), Launch(1024, 5, 4, 2), Launch(2048, 3, 8, 7), Launch(2048, 64, 8, 5)],
)
@pytest.mark.parametrize("layers", [1, 8])
def test_any_launch_moves_the_same(
    launch: Launch, tokens: int, layers: int, device: torch.device
) -> None:
    pool = Pool(BASE.but(heads=3, layers=layers), device).fill(4)
    reference, expected = pool.reference()
    host, rows = pool.indices(tokens)
    transfer = fused(pool, backup=launch, restore=launch)
    transfer.backup(host, rows)
    pool.restore_all(transfer, host, rows.flip(0))
    reference.backup(host.cpu(), rows.cpu())
    expected.restore_all(reference, host.cpu(), rows.flip(0).cpu())
    assert same(pool.rows(), expected.rows())
    assert torch.equal(pool.arena.buffer, expected.arena.buffer)


def test_it_holds_no_staging_memory(device: torch.device) -> None:
    assert fused(Pool(BASE, device)).staging_bytes == 0


class UnknownCodec(Int8Rot):
    name = "int7"


def test_it_says_what_it_cannot_serve(device: torch.device) -> None:
    pool = Pool(BASE, device)
    with pytest.raises(ValueError, match=r"not int7: use HIQCACHE_TRANSFER=torch"):
        FusedTransfer(UnknownCodec(), pool.arena, (pool.k, pool.v))
    with pytest.raises(ValueError, match=r"int8 on rows of torch\.bfloat16.*not torch\.float32"):
        FusedTransfer(
            pool.codec,
            pool.arena,
            ([k.float() for k in pool.k], [v.float() for v in pool.v]),
        )
    turned = [k.transpose(1, 2).contiguous().transpose(1, 2) for k in pool.k]
    with pytest.raises(ValueError, match=r"found rows \(2, 64\) with strides \(128, 1, 2\)"):
        FusedTransfer(pool.codec, pool.arena, (pool.k, turned))
    wide = Pool(BASE.but(row_stride=2), device).v
    with pytest.raises(ValueError, match=r"256 elements apart; found rows .* \(128, 64, 1\)"):
        FusedTransfer(pool.codec, pool.arena, (pool.k, [wide[0], *pool.v[1:]]))
    with pytest.raises(ValueError, match=r"records of 2 parts, not 1"):
        FusedTransfer(pool.codec, pool.arena, (pool.k,))


def test_it_refuses_a_head_dim_that_is_no_multiple_of_16(device: torch.device) -> None:
    codec = get_codec("int8")
    rows = [torch.zeros(4, 2, 24, dtype=torch.bfloat16, device=device)]
    layout = RecordLayout(1, 1, (RowFormat(48, 4), RowFormat(48, 4)))
    memory = torch.zeros(layout.arena_bytes(4), dtype=torch.uint8)
    arena = Arena(memory.pin_memory() if device.type == "cuda" else memory, layout, 4)
    with pytest.raises(ValueError, match=r"multiple of 16; this model's is 24"):
        FusedTransfer(codec, arena, (rows, rows))


def test_it_refuses_an_arena_that_sixteen_bytes_cannot_be_read_from(device: torch.device) -> None:
    pool = Pool(BASE, device)
    layout, pages = pool.arena.layout, pool.arena.pages
    buffer = torch.empty(layout.arena_bytes(pages) + 8, dtype=torch.uint8)
    if device.type == "cuda":
        buffer = buffer.pin_memory()
    with pytest.raises(ValueError, match=r"no multiple of 16: allocate it at one"):
        FusedTransfer(pool.codec, Arena(buffer[8:], layout, pages), (pool.k, pool.v))


@pytest.mark.parametrize(
    ("capability", "hip", "found"),
    [((7, 5), None, "compute capability 7.5"), ((9, 4), "7.1", "ROCm")],
)
def test_it_refuses_a_gpu_without_its_instructions(
    capability: tuple[int, int], hip: str | None, found: str
) -> None:
    with pytest.raises(ValueError, match=rf"this is {found}: use HIQCACHE_TRANSFER=torch"):
        check_gpu("fused", capability, hip)
    for served in ((8, 0), (8, 9), (9, 0), (12, 0)):
        check_gpu("fused", served, None)


def _stored(pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes and all scales of the arena."""
    codes, scales = [], []
    for part, planes in zip(pool.shape.parts, pool.arena.planes, strict=True):
        codes.append(pool.arena.view(planes.codes, torch.int8, part.heads, part.width).flatten())
        scales.append(pool.arena.view(planes.scales, torch.bfloat16, part.heads).flatten())
    return torch.cat(codes), torch.cat(scales)
