"""Plans: the sizes that the published figures rest on."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.lab.arms import arm_named, arms_named
from bench.lab.shapes import QWEN3_8B
from bench.tiers.plan import CPU, EXPERIMENTS, GPU, Scale, experiment
from loadtest.workloads.shared_prefix import DEALS

ALL = tuple(arms_named("bf16,int8:mover,int8,int8-rot,fp8"))


def test_experiment_b_has_the_published_capacities_and_workload() -> None:
    plan = experiment("same-bytes", ALL, GPU, QWEN3_8B, repeats=4)
    assert plan.capacity(arm_named("bf16"), QWEN3_8B) == 54_254
    assert plan.capacity(arm_named("int8:mover"), QWEN3_8B) == 96_451
    assert plan.capacity(arm_named("int8"), QWEN3_8B) == 106_838
    (point,) = plan.points
    assert (point.groups, point.prefix, point.requests, point.concurrency) == (32, 2048, 128, 8)
    assert point.repeats == 4


def test_experiment_a_gives_every_arm_the_same_tokens() -> None:
    plan = experiment("same-tokens", ALL, GPU, QWEN3_8B, repeats=4)
    assert {plan.capacity(arm, QWEN3_8B) for arm in ALL} == {54_254}
    args = dict(zip(*[iter(plan.server_args(arm_named("int8"), QWEN3_8B))] * 2, strict=True))
    assert int(16_384 * float(args["--hicache-ratio"])) + 1 == 54_254
    assert plan.server_env(arm_named("int8"))["HIQCACHE_SIZING"] == "tokens"
    assert "HIQCACHE_SIZING" not in plan.server_env(arm_named("bf16"))


def test_fp8_has_the_bytes_of_l1_that_the_others_have() -> None:
    plan = experiment("same-bytes", ALL, GPU, QWEN3_8B, repeats=4)
    assert plan.l1_of(arm_named("fp8")) == 2 * plan.l1_of(arm_named("bf16"))


@pytest.mark.parametrize("scale", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_request_fits_l1(name: str, scale: object) -> None:
    assert scale in (GPU, CPU)
    plan = experiment(name, ALL, scale, QWEN3_8B, repeats=1)  # type: ignore[arg-type]
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


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no arm 'int3'"):
        arms_named("bf16,int3")
    with pytest.raises(ValueError, match="no experiment"):
        experiment("c", ALL, GPU, QWEN3_8B, repeats=1)
