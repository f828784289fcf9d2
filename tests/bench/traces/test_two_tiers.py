"""The simulated tiers: by invariants, and request by request against a real SGLang server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lab.server_metrics import scrape
from bench.lab.servers import CPU_ARGS, CPU_ENV, serving
from bench.traces.replay import simulate
from bench.traces.two_tiers import Hit, TwoTierCache
from hiqcache import direct_http
from tests.e2e.forking import ForkingServer

#: The real server's tiers: L1 in tokens, and how much larger L2 is.
L1, RATIO = 512, 2.5

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=60)


@given(prompts, st.integers(12, 40), st.integers(0, 80))
def test_tiers_never_hold_more_than_they_can(
    asked: list[list[int]], device: int, host: int
) -> None:
    cache = TwoTierCache(device, host)
    for prompt in asked:
        hit = cache.request(prompt)
        assert hit.device + hit.host < len(prompt)
        assert 0 <= cache.device_free <= device
        assert 0 <= cache.host_free <= host


@given(prompts)
def test_with_room_for_everything_every_known_prefix_hits(asked: list[list[int]]) -> None:
    cache = TwoTierCache(10_000, 10_000)
    seen: list[list[int]] = []
    for prompt in asked:
        known = max((_common(prompt, earlier) for earlier in seen), default=0)
        assert cache.request(prompt) == Hit(min(known, len(prompt) - 1), 0)
        seen.append(prompt)


def test_what_left_l1_is_restored_from_l2() -> None:
    cache = TwoTierCache(device=10, host=100)
    first, second = list(range(8)), list(range(100, 108))
    assert cache.request(first) == (0, 0)
    assert cache.request(second) == (0, 0)
    assert cache.request(first) == (0, 7)


def test_without_l2_it_is_gone() -> None:
    cache = TwoTierCache(device=10, host=0)
    first, second = list(range(8)), list(range(100, 108))
    for prompt in (first, second, first):
        assert cache.request(prompt) == (0, 0)


def test_a_short_prefix_is_computed_rather_than_restored() -> None:
    cache = TwoTierCache(device=10, host=100, restore_at_least=8)
    for prompt in (list(range(8)), list(range(100, 108)), list(range(8))):
        assert cache.request(prompt) == (0, 0)


def test_l1_frees_what_is_to_be_spare() -> None:
    for spare, hit in ((0, Hit(3, 0)), (1, Hit(0, 3))):
        cache = TwoTierCache(device=10, host=100, spare=spare)
        for first in (0, 100, 200):
            # Four, then four, then two: all ten, or nine and one to spare.
            cache.request(range(first, first + (2 if first == 200 else 4)))
        assert cache.request(range(4)) == hit


def test_a_prompt_larger_than_l1_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit L1"):
        TwoTierCache(device=4, host=100).request([1, 2, 3, 4, 5])


@pytest.mark.e2e
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_real_server_hits_what_the_simulation_hits(
    page_size: int, quick_model: Path, tmp_path: Path
) -> None:
    """Prompts of 24-token blocks that branch and return, ten times the capacity of L2."""
    server = ForkingServer(
        "simulated",
        quick_model,
        tmp_path / "server.log",
        (
            *CPU_ARGS,
            *("--max-total-tokens", str(L1), "--hicache-ratio", str(RATIO)),
            *("--page-size", str(page_size), "--skip-server-warmup"),
        ),
        {**CPU_ENV, "HIQCACHE_CODEC": "int8", "HIQCACHE_SIZING": "tokens"},
    )
    generator = random.Random(7)
    block_tokens = [[generator.randrange(1000, 30000) for _ in range(24)] for _ in range(400)]
    conversations: list[list[int]] = []
    # SGLang adds a page to what the ratio gives.
    l2 = (int(L1 * RATIO) // page_size + 1) * page_size
    with serving(server):
        asked, hits = [], []
        for _ in range(150):
            if conversations and generator.random() < 0.7:
                earlier = generator.choice(conversations[-14:])
                blocks = earlier[: generator.randint(1, len(earlier))]
            else:
                blocks = []
            blocks = [*blocks, *generator.sample(range(400), generator.randint(1, 4))][:16]
            conversations.append(blocks)
            prompt = [token for block in blocks for token in block_tokens[block]]
            prompt = prompt[: len(prompt) - generator.randrange(24)]
            asked.append(prompt)
            hits.append(_ask(server, prompt))
        assert scrape(server)["sglang:hicache_host_total_tokens"] == l2
    assert sum(hit.host for hit in hits) > 1000, "the prompts must exercise L2"
    assert hits == simulate(asked, L1, l2, page_size)


def _ask(server: ForkingServer, prompt: list[int]) -> Hit:
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    sent = {"input_ids": prompt, "sampling_params": sampling}
    answer = direct_http.post(f"{server.url}/generate", sent, timeout=120).json()
    details = answer["meta_info"]["cached_tokens_details"] or {"device": 0, "host": 0}
    return Hit(details["device"], details["host"])


def _common(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
