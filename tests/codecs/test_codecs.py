"""Error bounds, zeros, non-finite inputs and drift of codecs of single tokens, on every device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiqcache.codecs import CODEC_NAMES, FP8_CODECS, TOKEN_CODECS, get_codec
from hiqcache.codecs.base import DTYPES, FP8_DTYPES
from hiqcache.codecs.int8_rot import signs
from hiqcache.record import kv_parts

HEAD_DIMS = {"int8": (1, 3, 64, 80, 96, 128, 256), "int8-rot": (1, 2, 64, 128, 256)}


def test_codecs_of_fp8_rows_are_named() -> None:
    assert {name for name in CODEC_NAMES if FP8_DTYPES[0] in get_codec(name).dtypes} == set(
        FP8_CODECS
    )


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a dtype of 8 or 16 bits."""
    bits, raw = 8 * dtype.itemsize, {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    patterns = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int32).to(raw)
    return patterns[torch.isfinite(patterns.view(dtype).float())].view(dtype)


@st.composite
def rows(draw: st.DrawFn, codec: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows of any finite bit patterns: spread over all exponents, or near one of them."""
    dim = draw(st.sampled_from(HEAD_DIMS[codec]))
    heads = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = finite_values(dtype)
    kind = draw(st.sampled_from(["any", "small", "near", "outlier", "largest"]))
    shape = (draw(st.integers(1, 5)), heads, dim)
    if kind == "any":
        return values[torch.randint(len(values), shape, generator=generator)]
    if kind == "small":  # subnormals, zeros and the smallest normals
        small = values[values.abs() <= 4 * torch.finfo(dtype).smallest_normal]
        return small[torch.randint(len(small), shape, generator=generator)]
    if kind == "largest":
        large = values[values.abs() >= torch.finfo(dtype).max / 2]
        return large[torch.randint(len(large), shape, generator=generator)]
    scale = 2.0 ** draw(st.integers(-20, 10))
    normal = torch.randn(shape, generator=generator) * scale
    if kind == "outlier":
        normal[..., 0] *= 300
    largest = torch.finfo(dtype).max
    return normal.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOKEN_CODECS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bound_holds_for_every_finite_row(
    name: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    codec = get_codec(name)
    given_rows = data.draw(rows(name, dtype))
    codes, scales = codec.encode(given_rows)
    restored = codec.decode(codes, scales, dtype)
    assert codes.dtype is torch.int8
    assert codes.shape == given_rows.shape
    assert scales.dtype is torch.bfloat16
    assert scales.shape == given_rows.shape[:-1]
    assert restored.dtype is dtype
    assert torch.isfinite(restored).all()
    assert codec.excess(given_rows, restored).max() <= 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOKEN_CODECS)
def test_the_bound_is_no_wider_than_what_it_must_hold(name: str, dtype: torch.dtype) -> None:
    """An error of a whole code step is seen: the bound would catch a wrong code."""
    codec = get_codec(name)
    given_rows = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scales = codec.encode(given_rows)
    wrong = torch.where(codes > 0, codes - 2, codes + 2)
    restored = codec.decode(wrong, scales, dtype)
    assert (codec.excess(given_rows, restored) > 0).float().mean() > 0.9


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e-4, 3e-5, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOKEN_CODECS)
def test_heads_of_small_magnitude_lose_no_more_than_others(
    name: str, dtype: torch.dtype, magnitude: float
) -> None:
    """A smallest scale that is too large would cut them; fp16's own steps cost some at 1e-5."""
    codec = get_codec(name)
    given_rows = torch.randn(64, 4, 128, generator=torch.Generator().manual_seed(3)) * magnitude
    given_rows = given_rows.to(dtype)
    restored = codec.decode(*codec.encode(given_rows), dtype)
    error = (restored.double() - given_rows.double()).norm() / given_rows.double().norm()
    assert error < (0.011 if (dtype, magnitude) == (torch.float16, 1e-5) else 0.008)


@pytest.mark.parametrize("name", TOKEN_CODECS)
def test_the_bound_sees_a_head_that_was_cut_to_zeros(name: str) -> None:
    """It is made of the rows, not of the scale that cut them."""
    codec = get_codec(name)
    for dtype, magnitude in ((torch.float16, 3e-5), (torch.bfloat16, 1e-30)):
        given_rows = torch.randn(8, 2, 128, generator=torch.Generator().manual_seed(4)) * magnitude
        given_rows = given_rows.to(dtype)
        excess = codec.excess(given_rows, torch.zeros_like(given_rows))
        # Of int8's elements, the small ones may be zeros.
        assert (excess > 0).float().mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOKEN_CODECS)
def test_zeros_restore_as_exact_zeros(name: str, dtype: torch.dtype, device: torch.device) -> None:
    codec = get_codec(name)
    zeros = torch.zeros(2, 3, 64, dtype=dtype, device=device)
    codes, scales = codec.encode(zeros)
    assert not codes.any()
    assert torch.equal(codec.decode(codes, scales, dtype), zeros)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOKEN_CODECS)
def test_a_non_finite_head_restores_as_nan_and_touches_no_neighbour(
    name: str, dtype: torch.dtype, poison: float, device: torch.device
) -> None:
    codec = get_codec(name)
    clean = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    dirty = clean.clone()
    dirty[2, 1, 17] = poison
    codes, scales = codec.encode(dirty)
    clean_codes, clean_scales = codec.encode(clean)
    assert scales[2, 1].isnan()
    assert not codes[2, 1].any()
    assert codec.decode(codes, scales, dtype)[2, 1].isnan().all()
    others = torch.ones(5, 4, dtype=torch.bool, device=device)
    others[2, 1] = False
    assert torch.equal(codes[others], clean_codes[others])
    assert torch.equal(scales[others], clean_scales[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_stores_a_restored_row_unchanged_for_every_maximum_and_code(
    dtype: torch.dtype,
) -> None:
    """Exhaustive: every finite maximum of the dtype, with every code from -127 to 127 below it."""
    codec = get_codec("int8")
    maxima = finite_values(dtype)
    maxima = maxima[maxima >= 0]
    for part in maxima.split(4096):
        _, scales = codec.encode(part[:, None, None])
        codes = torch.arange(-127, 128, dtype=torch.int8).expand(len(part), 1, -1)
        restored = codec.decode(codes, scales, dtype)
        again, scales_again = codec.encode(restored)
        # A zero head has the smallest scale whatever it held; all others keep theirs exactly.
        assert torch.equal(scales_again.view(torch.int16), scales.view(torch.int16))
        assert torch.equal(again, codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_int8_never_drifts(dtype: torch.dtype, data: st.DataObject) -> None:
    codec = get_codec("int8")
    codes, scales = codec.encode(data.draw(rows("int8", dtype)))
    for _ in range(3):
        codes_again, scales_again = codec.encode(codec.decode(codes, scales, dtype))
        assert torch.equal(codes_again, codes)
        assert torch.equal(scales_again, scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_int8_rot_stays_within_twice_its_bound_over_ten_cycles(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    codec = get_codec("int8-rot")
    first = data.draw(rows("int8-rot", dtype))
    row = first
    for _ in range(10):
        row = codec.decode(*codec.encode(row), dtype)
    error = (row.double() - first.double()).norm(dim=-1)
    bound = error - codec.excess(first, row)
    assert (error <= 2 * bound).all()


def test_int8_rot_refuses_a_head_dim_that_is_no_power_of_two() -> None:
    codec = get_codec("int8-rot")
    with pytest.raises(ValueError, match=r"power of two.*80.*HIQCACHE_CODEC=int8"):
        codec.row_formats(kv_parts(8, 80))
    with pytest.raises(ValueError, match="power of two"):
        codec.encode(torch.zeros(1, 1, 80, dtype=torch.bfloat16))


def test_signs_are_the_published_constant() -> None:
    assert [i for i, sign in enumerate(signs(64)) if sign < 0] == SIGNS_64
    assert signs(256)[:64] == signs(64)
    assert len(signs(512)) == 512


#: Elements of a 64-wide head that int8-rot negates. Part of the stored format: never change it.
SIGNS_64 = [
    0,
    2,
    4,
    6,
    8,
    9,
    12,
    15,
    16,
    17,
    18,
    20,
    21,
    23,
    24,
    27,
    32,
    38,
    40,
    43,
    45,
    46,
    48,
    51,
    53,
    56,
    57,
    59,
    60,
    61,
    62,
    63,
]


def test_unknown_codec_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="int8, int8-rot"):
        get_codec("int7")
