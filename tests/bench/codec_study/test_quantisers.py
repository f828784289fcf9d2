"""The study's schemes, each held to what it says of itself."""

from __future__ import annotations

import math

import pytest
import torch

from bench.codec_study.candidates import CANDIDATES, DRIFT, FOUR_BITS, K3_5, Candidate
from bench.codec_study.page_quantisers import (
    Kept,
    MeanFirst,
    PerChannel,
    Unturned,
    band_of_channel,
    turn,
)
from bench.codec_study.quantisers import (
    LLOYD_MAX,
    SEARCH,
    Exact,
    PerToken,
    Place,
    lloyd_max,
    rotate,
    rotate_back,
)

AT = Place(layer=0, layers=30, rope_theta=10_000.0)
LAST = Place(layer=29, layers=30, rope_theta=10_000.0)


def rows(heads: int = 2, tokens: int = 128, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, tokens, width, generator=torch.Generator().manual_seed(seed))


def error(quantiser: object, given: torch.Tensor) -> float:
    restored = quantiser(given, AT)  # type: ignore[operator]
    return float((restored - given).square().mean() / given.square().mean())


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_a_candidate_restores_every_row_and_leaves_what_it_was_given(candidate: Candidate) -> None:
    k, v = rows(), rows(seed=1)
    given = k.clone(), v.clone()
    restored = candidate(k, v, LAST)
    assert torch.equal(k, given[0])
    assert torch.equal(v, given[1])
    for back, was in zip(restored, given, strict=True):
        assert back.shape == was.shape
        # Every code of every candidate: no element is lost.
        assert (back - was).norm() < 0.3 * was.norm()
        assert not torch.equal(back, was)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_pages_and_heads_do_not_mix(candidate: Candidate) -> None:
    """A page that changes leaves every other page, and every other head, as it was."""
    k, v = rows(), rows(seed=1)
    before = candidate(k, v, LAST)
    k, v = k.clone(), v.clone()
    k[1, 64:] *= 7
    v[1, 64:] *= 7
    after = candidate(k, v, LAST)
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1, :64], second[1, :64])
        assert not torch.equal(first[1, 64:], second[1, 64:])


@pytest.mark.parametrize(
    "candidate", [c for c in CANDIDATES if c.block == 1], ids=lambda candidate: candidate.name
)
def test_token_wise_candidates_take_any_page_size(candidate: Candidate) -> None:
    k, v = rows(), rows(seed=1)
    page, token = candidate(k, v, LAST), candidate(k[:, 5:6], v[:, 5:6], LAST)
    assert torch.equal(page[0][:, 5:6], token[0])
    assert torch.equal(page[1][:, 5:6], token[1])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_channels_keep_to_half_a_step(bits: int) -> None:
    given = rows() * torch.logspace(-2, 2, 64)
    step = (given.unflatten(1, (2, 64)).amax(2) - given.unflatten(1, (2, 64)).amin(2)) / (
        2**bits - 1
    )
    bound = (0.5 + 0.02 * 2**bits / 2) * step + 1e-6
    difference = (PerChannel((bits,))(given, AT) - given).abs().unflatten(1, (2, 64))
    assert (difference <= bound[:, :, None]).all()
    assert (difference > 0.4 * step[:, :, None]).any()


def test_codes_take_no_more_levels_than_their_bits() -> None:
    """A channel of a page, a token: as many different values as its code can say, no more."""
    restored = PerChannel((3, 5))(rows(), AT)
    bands = band_of_channel(64, 2)
    for channel in range(64):
        levels = len(set(restored[0, :64, channel].tolist()))
        assert levels <= (8, 32)[bands[channel]]
        assert levels > (4, 16)[bands[channel]]
    values = PerToken(4, "asymmetric")(rows(), AT)
    assert max(len(set(values[0, token].tolist())) for token in range(128)) == 16
    searched = lloyd_max(rows())
    assert max(len(set(searched[0, token].tolist())) for token in range(128)) <= 2 * len(LLOYD_MAX)


def test_high_frequencies_are_the_first_channels_of_each_half() -> None:
    assert band_of_channel(8, 2).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert band_of_channel(16, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_a_constant_of_a_page_costs_a_mean_nothing() -> None:
    """What a bias adds to K spoils token-wise codes; a page's mean, or its channels, hold it."""
    plain = rows()
    biased = plain.clone()
    biased[..., 5] += 256.0
    spread = plain.square().mean()
    token = PerToken(4, rotated=True)

    def loss(quantiser: object) -> float:
        return float(((quantiser(biased, AT) - biased).square().mean()) / spread)  # type: ignore[operator]

    assert loss(token) > 1
    assert loss(MeanFirst(token)) < 0.05
    assert loss(PerChannel((4,))) < 0.05


def test_a_mean_that_some_tokens_lack_is_optional() -> None:
    given = rows() + 100 * torch.nn.functional.one_hot(torch.tensor(3), 64)
    given[:, 0] = rows(tokens=1)[:, 0]
    quantiser = PerToken(4, rotated=True)
    plain = MeanFirst(quantiser)(given, AT) - given
    optional = MeanFirst(quantiser, optional=True)(given, AT) - given
    assert optional[:, 0].norm() < 0.3 * plain[:, 0].norm()


def test_kept_tokens_do_not_widen_their_page() -> None:
    given = rows() + 10 * torch.ones(64)
    given[:, 17] = 0.01 * given[:, 17]
    without, kept = PerChannel((4,)), Kept(PerChannel((4,)), 1)
    others = [token for token in range(64) if token != 17]
    before = (without(given, AT) - given)[:, others].norm()
    after = (kept(given, AT) - given)[:, others].norm()
    assert after < 0.6 * before
    # At 8 bits of the token's own largest value.
    own = given[:, 17].abs().amax(-1, keepdim=True)
    assert ((kept(given, AT) - given)[:, 17].abs() <= own / 127 * 0.51).all()


def test_shortest_and_range_choose_what_they_say() -> None:
    given = rows(heads=1, tokens=64)
    given[0, 9] *= 0.01
    given[0, 40] *= 100.0
    for choose, token, bound in (("shortest", 9, 0.51), ("range", 40, 0.51)):
        kept = Kept(PerChannel((2,)), 1, choose=choose)  # type: ignore[arg-type]
        step = given[0, token].abs().max() / 127
        assert ((kept(given, AT) - given)[0, token].abs() <= bound * step).all()


def test_range_finds_the_token_without_which_the_ranges_are_least() -> None:
    given = rows(heads=1, tokens=64, seed=3)
    kept = torch.zeros(1, 1, 64, 1, dtype=torch.bool)
    pages = given[:, None]
    chosen = int(Kept(K3_5, 1, choose="range")._next(pages, kept))

    def ranges(token: int) -> float:
        rest = torch.cat((given[0, :token], given[0, token + 1 :]))
        return float((rest.amax(0) - rest.amin(0)).square().sum())

    assert chosen == min(range(64), key=ranges)


def test_turning_there_and_back_changes_nothing_and_undoes_rope() -> None:
    pages = rows(tokens=64)[:, None]
    assert torch.allclose(turn(turn(pages, -1, 1e4), 1, 1e4), pages, atol=1e-5)
    same = rows(tokens=1).expand(-1, 64, -1)[:, None]
    turned = turn(same, 1, 1e4).flatten(1, 2)
    # One key at every position: nothing is left to quantise once its angles are turned back.
    assert error(Unturned(PerChannel((3,))), turned) < 1e-4
    assert error(PerChannel((3,)), turned) > 1e-3


def test_rotation_is_orthonormal_and_spreads_an_outlier() -> None:
    given = torch.zeros(1, 1, 64)
    given[..., 3] = 8.0
    turned = rotate(given)
    assert torch.allclose(turned.abs(), torch.ones_like(turned))
    assert torch.allclose(rotate_back(turned), given, atol=1e-5)


def test_a_search_never_has_more_error_than_no_search() -> None:
    given = rows()
    for levels in ("symmetric", "asymmetric", "lloyd-max"):
        plain = PerToken(4, levels, clips=(1.0,))  # type: ignore[arg-type]
        searched = PerToken(4, levels, clips=(1.0, *SEARCH))  # type: ignore[arg-type]
        assert error(searched, given) < error(plain, given)


def test_ratios_are_what_a_page_of_64_holds() -> None:
    """Counted in bytes, by hand, for heads of 128."""
    page = 64
    k_codes, channels, kept = page * 128 // 2, 128 * 2 * 2, 4 * (128 // 2 + 2 + 1)
    v_codes, v_scales = page * 128 // 2, page * 2 * 2
    own = k_codes + channels + kept + v_codes + v_scales
    assert FOUR_BITS.times_bf16(128, 36) == pytest.approx(2 * page * 128 * 2 / own)
    by_name = {candidate.name: candidate for candidate in CANDIDATES}
    assert by_name["int8"].times_bf16(128, 36) == pytest.approx(256 / 130)
    mean = page * 130 * 2 + 128 * 2
    assert by_name["int8, K mean, rotated"].times_bf16(128, 36) == pytest.approx(
        2 * page * 256 / mean
    )


def test_first_layers_are_finer() -> None:
    candidate = next(c for c in CANDIDATES if "first 2 layers" in c.name)
    k, v = rows(), rows(seed=1)
    first = candidate(k, v, AT)[0] - k
    last = candidate(k, v, LAST)[0] - k
    assert first.norm() < 0.2 * last.norm()


def test_fp8_behind_adds_only_what_four_bits_lose() -> None:
    candidate = next(c for c in CANDIDATES if c.behind_fp8)
    k, v = rows(), rows(seed=1)
    restored, _ = candidate(k, v, AT)
    # What comes back are FP8 rows.
    assert torch.equal(restored, restored.to(torch.float8_e4m3fn).float())


def test_names_are_unique_and_the_study_covers_the_range() -> None:
    names = [candidate.name for candidate in CANDIDATES]
    assert len(set(names)) == len(names)
    assert {candidate.name for candidate in DRIFT} <= set(names)
    asked = [c for c in CANDIDATES if 2.5 <= c.times_bf16(128, 36) <= 3.9]
    assert len(asked) >= 8
    assert any(c.block == 1 for c in asked)
    assert math.isclose(Candidate("exact", Exact(), Exact()).times_bf16(128, 36), 1.0)
