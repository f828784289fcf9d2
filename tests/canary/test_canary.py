"""The canary's arithmetic and accounts; tests/e2e/test_canary.py runs it against real servers."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from hiqcache.canary import command
from hiqcache.canary.budget import Budget
from hiqcache.canary.divergence import lumped_kl
from hiqcache.canary.metrics import CanaryMetrics
from hiqcache.canary.prompts import TOPICS, Prompt, texts
from hiqcache.canary.push import Push
from hiqcache.canary.server import Client, Facts, ServerError, Tiers, tiers_of
from hiqcache.canary.watch import Plan, Probe, Watch


def logprobs(logits: list[float]) -> dict[int, float]:
    values = np.array(logits, dtype=np.float64)
    values -= np.log(np.exp(values - values.max()).sum()) + values.max()
    return dict(enumerate(values.astype(np.float32).astype(float).tolist()))


def top(listed: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(listed.items(), key=lambda entry: -entry[1])[:count])


LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8)


@given(LOGITS, LOGITS)
@settings(max_examples=200, deadline=None)
def test_the_lumped_kl_is_a_lower_bound_of_the_whole_one(
    left: list[float], right: list[float]
) -> None:
    p, q = logprobs(left), logprobs(right)
    whole = sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
    # What float32 log-probabilities leave of a sum of 1.
    assert -1e-5 < lumped_kl(top(p, 4), q) <= whole + 1e-5
    assert lumped_kl(p, q) == pytest.approx(whole, abs=1e-5)


@given(LOGITS)
@settings(max_examples=100, deadline=None)
def test_equal_lists_diverge_by_exactly_nothing(logits: list[float]) -> None:
    listed = top(logprobs(logits), 4)
    assert lumped_kl(listed, dict(listed)) == 0.0


def test_a_known_divergence() -> None:
    # 0.5, 0.25 and 0.25 lumped, against 0.25, 0.25 and 0.5.
    p = {1: math.log(0.5), 2: math.log(0.25)}
    q = {1: math.log(0.25), 2: math.log(0.25)}
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert lumped_kl(p, q) == pytest.approx(expected)
    # Answers that share no likely token are as far apart as they are.
    assert lumped_kl({1: math.log(0.99)}, {1: math.log(1e-6), 2: math.log(0.9)}) > 10
    with pytest.raises(KeyError):
        lumped_kl({1: math.log(0.99)}, {2: math.log(0.99)})


def tiers(stored: int, used: int = 1000, l2: int = 1000) -> Tiers:
    return Tiers(l1=200, l2=l2, l2_used=used, evicted=0, stored=stored)


def test_what_the_canary_takes_of_l2_counts_until_l2_has_turned_over() -> None:
    budget = Budget(0.1)
    assert budget.allowed(tiers(0)) == 100
    budget.use("a", 60, tiers(500))
    assert budget.taken(tiers(500)) == 60
    assert budget.fits(40, tiers(600))
    assert not budget.fits(41, tiers(600))
    # Used again: it is L2's newest entry again.
    budget.use("a", 60, tiers(1400))
    # What is on its way to L2 is not counted as stored yet, and lies in L1 (200).
    assert budget.taken(tiers(2599)) == 60
    assert budget.taken(tiers(2600)) == 0


def test_a_flushed_l2_holds_nothing_of_the_canary() -> None:
    budget = Budget(0.1)
    budget.use("a", 100, tiers(500))
    assert not budget.fits(50, tiers(510))
    assert budget.fits(50, tiers(510, used=0))
    budget.forget_all()
    assert budget.taken(tiers(500)) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_an_lru_l2_never_holds_more_of_the_canary_than_counted(
    steps: list[tuple[int, int]],
) -> None:
    """Against a model of L2: entries by last use, the oldest evicted."""
    capacity, stored = 1000, 0
    held: dict[str, int] = {}
    budget = Budget(0.1)
    for number, (kind, tokens) in enumerate(steps):
        used = sum(held.values())
        now = Tiers(200, capacity, used, 0, stored)
        if kind == 0 and not budget.fits(tokens, now):
            continue
        mine = [key for key in held if key.startswith("canary")]
        if kind == 1 and mine:
            held[mine[0]] = held.pop(mine[0])
            budget.use(mine[0], held[mine[0]], now)
            continue
        held[f"{'canary' if kind == 0 else 'other'}-{number}"] = tokens
        stored += tokens
        while sum(held.values()) > capacity:
            del held[next(iter(held))]
        now = Tiers(200, capacity, sum(held.values()), 0, stored)
        if kind == 0:
            budget.use(f"canary-{number}", tokens, now)
        mine_tokens = sum(size for key, size in held.items() if key.startswith("canary"))
        assert mine_tokens <= budget.taken(now)
        assert mine_tokens <= budget.allowed(now)


def test_pushing_keeps_to_its_hour_and_to_l1_s_size() -> None:
    facts = Facts("m", page_size=16, data_parallel=1, longest=2000)
    prompt = Prompt("p", tuple(range(100)), 64)
    assert Push.of(0, [prompt], facts, tiers(0)) is None
    push = Push.of(150, [prompt], facts, tiers(0))
    assert push is not None
    assert (len(push.fillers), push.tokens) == (4, 200)
    assert len({filler.name for filler in push.fillers}) == 4
    start = push._at
    asked = [push.next(start) for _ in range(5)]
    assert [filler is not None for filler in asked] == [True, True, True, False, False]
    # 150 an hour is 50 in 20 minutes: one filler.
    assert push.next(start + 1199) is None
    assert push.next(start + 1201) is push.fillers[3]
    assert push.next(start + 1201) is None
    # A night of rest earns one round, not a night's worth.
    assert sum(push.next(start + 86400) is not None for _ in range(20)) == 4


class Visited(Watch):
    """Fills and compares nothing, and says whose turn it was."""

    seen: list[str]
    now: Tiers

    def _fill(self, probe: Probe) -> None:
        self.seen.append(f"fill {probe.prompt.name}")
        probe.reference = ()

    def _compare(self, probe: Probe) -> None:
        self.seen.append(f"compare {probe.prompt.name}")
        probe.evicted = self.now.evicted

    def visit_at(self, evicted: int) -> None:
        self.now = Tiers(200, 10_000, 100, evicted, evicted)
        self._next(self.now)


def test_every_prompt_has_its_turn_though_l1_turns_over_between_visits() -> None:
    plan = Plan(0.5, 16, 2, 0, 0.01, {})
    watch = Visited("a", Client("http://127.0.0.1:9"), plan, CanaryMetrics(CollectorRegistry()))
    watch.seen = []
    watch.probes = [Probe(Prompt(name, tuple(range(18)), 16)) for name in "abc"]
    for visit in range(9):
        watch.visit_at(1000 * visit)
    assert watch.seen == [f"{what} {name}" for what in ("fill", *2 * ["compare"]) for name in "abc"]


def test_a_prompt_still_in_l1_is_not_asked_for() -> None:
    plan = Plan(0.5, 16, 2, 0, 0.01, {})
    watch = Visited("a", Client("http://127.0.0.1:9"), plan, CanaryMetrics(CollectorRegistry()))
    watch.seen = []
    watch.probes = [Probe(Prompt("a", tuple(range(18)), 16))]
    for evicted in (0, 100, 199, 200, 399):
        watch.visit_at(evicted)
    assert watch.seen == ["fill a", "compare a"]


PAGE = """\
sglang:max_total_num_tokens{dp_rank="0",tp_rank="0"} 1000
sglang:max_total_num_tokens{dp_rank="0",tp_rank="1"} 1000
sglang:max_total_num_tokens{dp_rank="1",tp_rank="2"} 5000
sglang:hicache_host_total_tokens{tp_rank="0"} 4000
sglang:hicache_host_used_tokens{tp_rank="0"} 70
sglang:evicted_tokens_total{tp_rank="0"} 30
sglang:evicted_tokens_total{tp_rank="1"} 29
sglang:hicache_backup_tokens_total{tp_rank="0"} 90
sglang:other{text="} 3"} 4
"""


def test_tiers_are_one_replica_s() -> None:
    assert tiers_of(PAGE, "u") == Tiers(1000, 4000, 70, 30, 90)


@pytest.mark.parametrize(
    ("lacking", "advice"),
    [("max_total", "--enable-metrics"), ("host_total", "--enable-hierarchical-cache")],
)
def test_a_server_without_tiers_is_told_what_it_lacks(lacking: str, advice: str) -> None:
    page = "\n".join(line for line in PAGE.splitlines() if lacking not in line)
    with pytest.raises(ServerError, match=advice):
        tiers_of(page, "u")


def test_its_own_texts_are_there_and_begin_apart() -> None:
    own = texts(None)
    assert set(own) == set(TOPICS)
    assert len({text[:200] for text in own.values()}) == len(own)
    assert all(len(text) > 5000 for text in own.values())


def test_an_operator_s_texts(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(["one", "two"]))
    assert texts(file) == {"mine-0": "one", "mine-1": "two"}
    for content, complaint in (("{", "is no JSON"), ("[]", "a JSON list"), ("[1]", "a JSON list")):
        file.write_text(content)
        with pytest.raises(ValueError, match=complaint):
            texts(file)


def test_an_arm_has_every_series_before_anything_was_compared() -> None:
    registry = CollectorRegistry()
    bound = CanaryMetrics(registry).of("int8", "m")
    page = generate_latest(registry).decode()
    arm = 'arm="int8",model_name="m"'
    for series in (
        f"hiqcache_canary_restored_total{{{arm}}} 0.0",
        f'hiqcache_canary_not_restored_total{{{arm},reason="lost"}} 0.0',
        f"hiqcache_canary_kl_nats_count{{{arm}}} 0.0",
        f"hiqcache_canary_top1_agreement{{{arm}}} NaN",
        f'hiqcache_canary_seconds_count{{{arm},tier="L2"}} 0.0',
    ):
        assert series in page
    bound.compared([0.0, 0.25], agreeing=1, identical=False)
    bound.compared([0.0, 0.0], agreeing=2, identical=True)
    page = generate_latest(registry).decode()
    for series in (
        f"hiqcache_canary_restored_total{{{arm}}} 2.0",
        f"hiqcache_canary_different_total{{{arm}}} 1.0",
        f"hiqcache_canary_kl_nats_sum{{{arm}}} 0.25",
        'hiqcache_canary_kl_nats_bucket{arm="int8",le="0.0",model_name="m"} 3.0',
        f"hiqcache_canary_top1_agreement{{{arm}}} 0.75",
    ):
        assert series in page


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--arm", "nonsense"], "--arm nonsense: give a name and an address"),
        (["--arm", "a=http://h:30000x"], "--arm a=http://h:30000x: .*Port could not be cast"),
        (["--arm", "a=http://h", "--arm", "a=http://i"], "name them apart"),
        (["--l2-share", "0"], "--l2-share 0: it must be above 0"),
        (["--l2-share", "1.5"], "--l2-share 1.5: it must be above 0, and at most 1"),
        (["--prefix-tokens", "8"], "--prefix-tokens 8: it must be 16 or more"),
        (["--scored-tokens", "1"], "--scored-tokens 1: it must be 2 or more"),
        (["--interval", "0"], "--interval 0: it must be above 0"),
        (["--slo-kl-nats", "nan"], "--slo-kl-nats nan: it must be above 0"),
        (["--prompts", "/nowhere.json"], "--prompts /nowhere.json: .*No such file"),
    ],
)
def test_bad_arguments_say_what_to_do(flags: list[str], complaint: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ValueError, match=complaint):
        command.run(parser.parse_args(flags))
