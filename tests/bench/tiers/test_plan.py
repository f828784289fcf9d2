"""Plans: the sizes that the published figures rest on."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.lab.arms import ARMS, arms_named
from bench.tiers.plan import CPU, EXPERIMENTS, GPU, Scale, experiment
from hiqcache.geometry import KVGeometry
from loadtest.workloads.shared_prefix import DEALS

QWEN3_8B = KVGeometry.of_heads(36, 8, 128)
ALL = tuple(ARMS.values())


def test_experiment_b_has_the_published_capacities_and_workload() -> None:
    plan = experiment("b", ALL, GPU, QWEN3_8B, repeats=4)
    assert plan.capacity(ARMS["bf16"], QWEN3_8B) == 54_254
    assert plan.capacity(ARMS["mover"], QWEN3_8B) == 96_451
    assert plan.capacity(ARMS["int8"], QWEN3_8B) == 106_838
    (point,) = plan.points
    assert (point.groups, point.prefix, point.requests, point.concurrency) == (32, 2048, 128, 8)
    assert point.repeats == 4


def test_experiment_a_gives_every_arm_the_same_tokens() -> None:
    plan = experiment("a", ALL, GPU, QWEN3_8B, repeats=4)
    assert {plan.capacity(arm, QWEN3_8B) for arm in ALL} == {54_254}
    args = dict(zip(*[iter(plan.server_args(ARMS["int8"], QWEN3_8B))] * 2, strict=True))
    assert int(16_384 * float(args["--hicache-ratio"])) + 1 == 54_254
    assert plan.server_env(ARMS["int8"])["HIQCACHE_SIZING"] == "tokens"
    assert "HIQCACHE_SIZING" not in plan.server_env(ARMS["bf16"])


def test_fp8_has_the_bytes_of_l1_that_the_others_have() -> None:
    plan = experiment("b", ALL, GPU, QWEN3_8B, repeats=4)
    assert plan.l1_of(ARMS["fp8"]) == 2 * plan.l1_of(ARMS["bf16"])


@pytest.mark.parametrize("scale", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_request_fits_l1(name: str, scale: object) -> None:
    assert scale in (GPU, CPU)
    plan = experiment(name, ALL, scale, QWEN3_8B, repeats=1)  # type: ignore[arg-type]
    for point in plan.points:
        assert point.prefix + point.suffix + point.output < plan.l1_tokens


def test_prompts_are_the_same_for_the_same_seed_and_share_prefixes() -> None:
    (point,) = experiment("b", ALL, CPU, QWEN3_8B, repeats=1).points
    assert point.prompts(1) == point.prompts(1)
    assert point.prompts(1) != point.prompts(2)
    _, measured = point.prompts(1)
    assert len(measured) == point.requests
    assert len({tuple(prompt[: point.prefix]) for prompt in measured}) <= point.groups
    assert len({tuple(prompt) for prompt in measured}) == len(measured)


@pytest.mark.parametrize("scale", [GPU, CPU], ids=["gpu", "cpu"])
def test_experiment_b_asks_for_every_prefix_equally_often(scale: Scale) -> None:
    (point,) = experiment("b", ALL, scale, QWEN3_8B, repeats=1).points
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
    with pytest.raises(ValueError, match="choose a comma-separated list"):
        arms_named("bf16,int4")
    with pytest.raises(ValueError, match="no experiment"):
        experiment("c", ALL, GPU, QWEN3_8B, repeats=1)
