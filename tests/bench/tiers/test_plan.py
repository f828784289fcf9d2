"""Plans: the sizes that the published figures rest on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.lab.arms import arm_named, arms_named
from bench.lab.shapes import QWEN3_8B
from bench.lab.shards import Shards
from bench.tiers.plan import CPU, EXPERIMENTS, GPU, Experiment, Scale, experiment
from hiqcache.geometry import KVGeometry
from loadtest.workloads.shared_prefix import DEALS

#: What the published figures of before December 2026 rest on.
PAGES_OF_1 = replace(GPU, shards=Shards(1))
ALL = tuple(arms_named("bf16,int8:mover,int8,int8-rot,fp8"))


def arguments(plan: Experiment, arm: str) -> dict[str, str]:
    """An arm's SGLang arguments by name."""
    return dict(zip(*[iter(plan.server_args(arm_named(arm), QWEN3_8B))] * 2, strict=False))


def test_experiment_b_has_the_published_capacities_and_workload() -> None:
    at_1 = experiment("same-bytes", ALL, PAGES_OF_1, QWEN3_8B, repeats=4)
    assert at_1.capacity(arm_named("bf16"), QWEN3_8B) == 54_254
    assert at_1.capacity(arm_named("int8:mover"), QWEN3_8B) == 96_451
    assert at_1.capacity(arm_named("int8"), QWEN3_8B) == 106_838
    # Whole pages, and the one that SGLang adds.
    plan = experiment("same-bytes", ALL, GPU, QWEN3_8B, repeats=4)
    assert plan.capacity(arm_named("bf16"), QWEN3_8B) == 848 * 64
    assert plan.capacity(arm_named("int8:mover"), QWEN3_8B) == 1508 * 64
    assert plan.capacity(arm_named("int8"), QWEN3_8B) == 1670 * 64
    assert at_1.points == plan.points
    (point,) = plan.points
    assert (point.groups, point.prefix, point.requests, point.concurrency) == (32, 2048, 128, 8)
    assert point.repeats == 4


def test_experiment_a_gives_every_arm_the_same_tokens() -> None:
    for scale, tokens in ((PAGES_OF_1, 54_254), (GPU, 848 * 64)):
        plan = experiment("same-tokens", ALL, scale, QWEN3_8B, repeats=4)
        assert {plan.capacity(arm, QWEN3_8B) for arm in ALL} == {tokens}
        for arm in ALL:
            args = arguments(plan, arm.name)
            page, l1 = int(args["--page-size"]), int(args["--max-total-tokens"])
            assert page == scale.page_size
            assert (int(l1 * float(args["--hicache-ratio"])) // page + 1) * page == tokens
    assert plan.server_env(arm_named("int8"))["HIQCACHE_SIZING"] == "tokens"
    assert "HIQCACHE_SIZING" not in plan.server_env(arm_named("bf16"))


@pytest.mark.parametrize("page", [1, 16, 64])
def test_by_a_ratio_every_arm_gets_the_bytes_that_bf16_gets(page: int) -> None:
    """As SGLang sizes pools: so many times L1, in whole pages, and one more."""
    scale = replace(CPU, shards=Shards(page))
    plan = experiment("same-bytes", ALL, scale, QWEN3_8B, repeats=1)
    stock = plan.capacity(arm_named("bf16"), QWEN3_8B)
    assert stock == scale.stock_tokens(QWEN3_8B)
    for arm in ALL:
        tokens, args = plan.capacity(arm, QWEN3_8B), arguments(plan, arm.name)
        assert tokens % page == 0
        ours = arm.bytes_per_token(QWEN3_8B, page)
        given = int(args["--max-total-tokens"]) * float(args["--hicache-ratio"])
        growth = QWEN3_8B.stock_bytes_per_token / ours if arm.quantises else 1
        assert tokens == (int(given * growth) // page + 1) * page
        # But for the page that pads the pool, and what makes no whole page.
        assert abs(stock * QWEN3_8B.stock_bytes_per_token - tokens * ours) < 2 * page * max(
            ours, QWEN3_8B.stock_bytes_per_token
        )


def test_a_layout_that_rounds_pages_up_is_counted_at_its_page_size() -> None:
    """One head of 16: a page of one token is rounded up to more than a token of a larger page."""
    small = KVGeometry.of_heads(layers=1, heads=1, head_dim=16)
    int8 = arm_named("int8")
    found = {
        page: experiment(
            "same-bytes", ALL, replace(GPU, shards=Shards(page)), small, repeats=1
        ).bytes_per_token(int8, small)
        for page in (1, 64)
    }
    assert found[1] > found[64] == int8.bytes_per_token(small, 64)


def test_fp8_has_the_bytes_of_l1_that_the_others_have() -> None:
    plan = experiment("same-bytes", ALL, GPU, QWEN3_8B, repeats=4)
    assert plan.l1_of(arm_named("fp8")) == 2 * plan.l1_of(arm_named("bf16"))


@pytest.mark.parametrize("scale", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_request_fits_l1(name: str, scale: Scale) -> None:
    plan = experiment(name, ALL, replace(scale, shards=Shards(64)), QWEN3_8B, repeats=1)
    for point in plan.points:
        assert point.prefix + point.suffix + point.output < plan.l1_tokens


def test_prompts_are_the_same_for_the_same_seed_and_share_prefixes() -> None:
    (point,) = experiment("same-bytes", ALL, CPU, QWEN3_8B, repeats=1).points
    assert point.prompts(1) == point.prompts(1)
    assert point.prompts(1) != point.prompts(2)
    _, measured = point.prompts(1)
    assert len(measured) == point.requests
    assert len({tuple(prompt[: point.prefix]) for prompt in measured}) <= point.groups
    assert len({tuple(prompt) for prompt in measured}) == len(measured)


@pytest.mark.parametrize("scale", [GPU, CPU], ids=["gpu", "cpu"])
def test_experiment_b_asks_for_every_prefix_equally_often(scale: Scale) -> None:
    (point,) = experiment("same-bytes", ALL, scale, QWEN3_8B, repeats=1).points
    _, measured = point.prompts(1)
    asked = Counter(tuple(prompt[: point.prefix]) for prompt in measured)
    assert len(asked) == point.groups
    assert set(asked.values()) == {DEALS}


def test_the_sweep_reaches_from_what_fits_to_what_does_not() -> None:
    plan = experiment("sweep", ALL, GPU, QWEN3_8B, repeats=1)
    shares = [p.groups * p.prefix / 54_254 for p in plan.points if p.name.startswith("share")]
    assert min(shares) < 0.26
    assert max(shares) > 3.4
    assert {p.prefix for p in plan.points} >= {512, 2048, 16_384}
    assert {p.repeats for p in plan.points} == {1}


def test_the_sweep_repeats_most_where_all_fits() -> None:
    plan = experiment("sweep", ALL, GPU, QWEN3_8B, repeats=4)
    repeats = {point.name: point.repeats for point in plan.points}
    assert repeats["share 0.25"] == repeats["share 1"] == 4
    assert repeats["share 1.5"] == repeats["prefix 512"] == 2


def test_points_can_be_chosen() -> None:
    plan = experiment("sweep", ALL, GPU, QWEN3_8B, repeats=4)
    assert [point.name for point in plan.only(["prefix 512", "share 3"]).points] == [
        "share 3",
        "prefix 512",
    ]
    assert plan.only([]) == plan
    with pytest.raises(ValueError, match=r"no point share 9: choose from share 0\.25, share 0\.5"):
        plan.only(["share 3", "share 9"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no arm 'int3'"):
        arms_named("bf16,int3")
    with pytest.raises(ValueError, match="no experiment"):
        experiment("c", ALL, GPU, QWEN3_8B, repeats=1)
