"""Codec int4: bounds, what is kept, what non-finite input does, drift, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiqcache.codecs import get_codec
from hiqcache.codecs.base import FP8_DTYPES, RowCodec
from hiqcache.codecs.int4 import Int4, Int4Keys, Int4Values, kept_slots, levels_of
from hiqcache.record import Part, RecordLayout, kv_parts
from tests.codecs.test_codecs import finite_values

KINDS: tuple[type[RowCodec], ...] = (Int4Keys, Int4Values)
DTYPES = Int4.dtypes


@st.composite
def pages(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """Pages of finite rows: any bit patterns, small ones, or near one magnitude, with outliers."""
    dim = draw(st.sampled_from([32, 64, 128]))
    shape = (draw(st.integers(1, 2)), draw(st.sampled_from([32, 64])), draw(st.integers(1, 3)), dim)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = finite_values(dtype).float()
    kind = draw(st.sampled_from(["any", "small", "near", "constant", "sinks"]))
    if kind == "small":
        values = values[values.abs() <= 4 * torch.finfo(dtype).smallest_normal]
    if kind in ("any", "small"):
        return values[torch.randint(len(values), shape, generator=generator)].to(dtype)
    rows = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-20, 10))
    if kind == "constant":
        rows += 100 * torch.randn(dim, generator=generator) * rows.abs().amax()
    if kind == "sinks":
        rows[:, :3] /= 100
        rows[..., 0] *= 50
    largest = torch.finfo(dtype).max
    return rows.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bound_holds_for_every_finite_page(
    kind: type[RowCodec], dtype: torch.dtype, data: st.DataObject
) -> None:
    codec, rows = kind(), data.draw(pages(dtype))
    restored = codec.decode(*codec.encode(rows), dtype)
    assert torch.isfinite(restored.float()).all()
    assert codec.excess(rows, restored).max() <= 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_rows_stay_finite(kind: type[RowCodec], dtype: torch.dtype) -> None:
    """What overflows on the way, in fp32, must not."""
    largest = torch.finfo(dtype).max
    signed = some_rows(torch.float32).sign() * largest
    signed[0, 3:] = largest
    rows = signed.to(dtype)
    restored = kind().decode(*kind().encode(rows), dtype)
    assert torch.isfinite(restored.float()).all()
    assert kind().excess(rows, restored).max() <= 0


def some_rows(dtype: torch.dtype = torch.bfloat16, magnitude: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 64, 3, 64, generator=generator) * magnitude).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_no_wider_than_what_it_must_hold(
    kind: type[RowCodec], dtype: torch.dtype
) -> None:
    """A code that is one step off is seen in a third of K, two steps in all of V."""
    codec, rows = kind(), some_rows(dtype)
    codes, scales = codec.encode(rows)
    if kind is Int4Keys:
        fast = torch.where((codes & 7) > 3, codes - 1, codes + 1)
        seen = codec.excess(rows, codec.decode(fast, scales, dtype)).unflatten(-1, (4, -1))
        slow = torch.where((codes >> 3) > 15, codes - 8, codes + 8)
        late = codec.excess(rows, codec.decode(slow, scales, dtype)).unflatten(-1, (4, -1))
        assert (seen[..., 0::2, :] > 0).float().mean() > 0.4
        assert (late[..., 1::2, :] > 0).float().mean() > 0.4
        return
    low, high = codes & 15, codes >> 4
    low = torch.where(low > 7, low - 4, low + 4)
    high = torch.where(high > 7, high - 4, high + 4)
    restored = codec.decode(low | high << 4, scales, dtype)
    assert (codec.excess(rows, restored) > 0).all()


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    # What is small to FP8 has lost its values before a codec sees it.
    [
        (dtype, size)
        for dtype in DTYPES
        for size in (1.0, 1e-3, 1e-4)[: 3 if dtype.itemsize > 1 else 1]
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_small_rows_lose_no_more_than_others(
    kind: type[RowCodec], dtype: torch.dtype, magnitude: float
) -> None:
    rows = some_rows(dtype, magnitude)
    restored = kind().decode(*kind().encode(rows), dtype)
    error = (restored.double() - rows.double()).norm() / rows.double().norm()
    assert error < {Int4Keys: 0.17, Int4Values: 0.11}[kind]
    # Cut to zeros, it would be seen.
    assert (kind().excess(rows, torch.zeros_like(rows)) > 0).float().mean() > 0.7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_restore_as_exact_zeros(
    kind: type[RowCodec], dtype: torch.dtype, device: torch.device
) -> None:
    zeros = torch.zeros(1, 32, 2, 64, dtype=dtype, device=device)
    assert not kind().decode(*kind().encode(zeros), dtype).float().any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_non_finite_key_element_makes_its_channel_nan_and_touches_nothing_else(
    dtype: torch.dtype, poison: float, device: torch.device
) -> None:
    if dtype == torch.float8_e4m3fn:
        poison = float("nan")  # it has no infinities
    clean, codec = some_rows(dtype).float().to(device), Int4Keys()
    slot = int((~is_kept(clean)[0, :, 1]).nonzero()[0])
    dirty = clean.clone()
    dirty[0, slot, 1, 17] = poison
    wanted, got = (
        codec.decode(*codec.encode(each.to(dtype)), dtype).float() for each in (clean, dirty)
    )
    others = ~is_kept(clean)[0, :, 1]
    assert got[0, others, 1, 17].isnan().all()
    wanted[0, others, 1, 17], got[0, others, 1, 17] = 0, 0
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_value_head_restores_as_nan_and_touches_no_neighbour(poison: float) -> None:
    clean, codec = some_rows(), Int4Values()
    dirty = clean.clone()
    dirty[0, 5, 1, 17] = poison
    wanted, got = (codec.decode(*codec.encode(each), clean.dtype) for each in (clean, dirty))
    assert got[0, 5, 1].isnan().all()
    got[0, 5, 1] = wanted[0, 5, 1]
    assert torch.equal(got, wanted)


def is_kept(rows: torch.Tensor) -> torch.Tensor:
    """bool ``[pages, tokens, heads]``."""
    slots = torch.arange(rows.shape[1], device=rows.device)
    return (kept_slots(rows)[..., None] == slots).any(dim=-2).transpose(-1, -2)


def test_the_tokens_of_the_smallest_norm_are_kept_as_int8_and_widen_no_channel() -> None:
    rows = some_rows(torch.float16) + 20
    sinks = torch.tensor([0, 9, 30, 63])
    rows[:, sinks] = some_rows(torch.float16)[:, sinks] * 0.1
    codec, int8 = (
        Int4Keys(),
        get_codec("int8").of(get_codec("int8").row_formats(kv_parts(1, 64))[0]),
    )
    restored = codec.decode(*codec.encode(rows), torch.float16)
    assert is_kept(rows)[:, sinks].all()
    assert torch.equal(restored[:, sinks], int8.decode(*int8.encode(rows[:, sinks]), torch.float16))
    rest = ~is_kept(rows)
    # Steps of the others' range of some 6, not of one that reaches down to the sinks' 0.
    steps = (restored.double() - rows.double()).abs()[rest].unflatten(-1, (4, -1))
    assert steps[..., 0::2, :].max() < 8 / 7 / 2
    assert steps[..., 1::2, :].max() < 8 / 31 / 2


def test_levels_follow_the_rotary_frequencies() -> None:
    assert levels_of(8, torch.device("cpu")).tolist() == [8, 8, 32, 32, 8, 8, 32, 32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_cycles_lose_little_more_than_one(kind: type[RowCodec], dtype: torch.dtype) -> None:
    wide, codec = some_rows(torch.float32), kind()
    wide[..., 7] += 30
    rows = wide.to(dtype)
    cycles = [rows]
    for _ in range(20):
        cycles.append(codec.decode(*codec.encode(cycles[-1]), dtype))
    errors = [(each.double() - rows.double()).norm().item() for each in cycles]
    if dtype in FP8_DTYPES and kind is Int4Values:
        # Each cycle puts the rows on their own coarse grid, and with them what was rotated.
        assert 1.2 * errors[1] < errors[20] < 2.1 * errors[1]
    else:
        assert errors[20] < 1.05 * errors[1]


def test_it_says_what_it_takes() -> None:
    codec = get_codec("int4")
    assert RecordLayout(36, 64, codec.row_formats(kv_parts(8, 128))).bytes_per_token == 41_526
    with pytest.raises(ValueError, match=r"32, 64, 128, 256.*v heads have 80.*HIQCACHE_CODEC=int8"):
        codec.row_formats(kv_parts(8, 128, 80))
    with pytest.raises(ValueError, match="rows are latent and rope"):
        codec.row_formats((Part("latent", 1, 512), Part("rope", 1, 64)))


def test_a_damaged_record_decodes_to_something(device: torch.device) -> None:
    """As the kernels do: a slot beyond the page would end the server, or touch other memory."""
    for store in get_codec("int4").stores(kv_parts(2, 64)):
        rows = torch.randn(3, 32, 2, 64, dtype=torch.bfloat16, device=device)
        codes, scales = store.encode(rows)
        damaged = (codes ^ 0xFF, (scales.view(torch.uint8) ^ 0x55).view(scales.dtype))
        assert store.decode(*damaged, rows.dtype).shape == rows.shape
