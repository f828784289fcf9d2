"""The fleet of compose.yaml as processes on loopback: replicas that find each other's prefixes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from bench.demo import passages
from bench.lab.completions import Completion, client_of, complete
from bench.lab.server_metrics import scrape
from monitoring.fleet import Fleet, fleet

pytestmark = [pytest.mark.e2e, pytest.mark.storage]

PAGE = 64
ANSWER_TOKENS = 4

#: Characters of a prompt of some 600 tokens: SGLang reads no prefix under 256 from storage.
PROMPT_CHARACTERS = 2400


def eventually(what: str, holds: Callable[[], bool], timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {timeout:.0f} s"
        time.sleep(0.5)


def whole_pages(answer: Completion) -> int:
    """Tokens of an answer's prompt that can be cached: all but the last, in whole pages."""
    return (answer.prompt_tokens - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    "storage", ["file", pytest.param("mooncake", marks=pytest.mark.mooncake_fleet)]
)
def test_what_one_replica_computed_the_other_restores_once_that_one_is_killed(
    storage: Literal["file", "mooncake"], model: Path, tmp_path: Path
) -> None:
    text = "\n".join(passages(model, 32))
    one, two = text[:PROMPT_CHARACTERS], text[PROMPT_CHARACTERS : 2 * PROMPT_CHARACTERS]
    with fleet(tmp_path, storage) as running:
        client = client_of(running.router)

        def ask(prompt: str) -> Completion:
            return complete(client, prompt, ANSWER_TOKENS, running.model)

        cold = ask(one)
        assert (cold.device_tokens, cold.host_tokens, cold.storage_tokens) == (0, 0, 0)
        pages = whole_pages(cold) // PAGE
        assert pages >= 5
        ((first, _),) = [item for item in running.routed().items() if item[1]]
        (second,) = set(running.replicas) - {first}
        # The router sends a prompt to where its prefix is.
        again = ask(one)
        assert again.device_tokens == whole_pages(cold)
        assert running.routed() == {first: 2, second: 0}
        eventually(
            "the prefix is in L3",
            lambda: scrape(running.replicas[first])["hiqcache_l3_written_pages_total"] >= pages,
        )
        sees_all(running, storage)

        running.replicas[first].stop(grace=0)
        restored = ask(one)
        assert restored.storage_tokens == whole_pages(cold)
        assert (restored.device_tokens, restored.host_tokens) == (0, 0)
        assert scrape(running.replicas[second])["hiqcache_l3_read_pages_total"] == pages
        # What the second computes meanwhile, the first has never seen.
        other = ask(two)
        assert (other.device_tokens, other.storage_tokens) == (0, 0)
        eventually("the router misses a replica", lambda: running.healthy() == 1)
        eventually("and so does Prometheus", lambda: running.query("up")[first] == 0)

        running.replicas[first].start().wait()
        eventually("the router has both again", lambda: running.healthy() == 2)
        direct = client_of(running.replicas[first].url)
        for prompt, before in ((one, restored), (two, other)):
            back = complete(direct, prompt, ANSWER_TOKENS)
            assert back.storage_tokens == whole_pages(before)
            assert (back.device_tokens, back.host_tokens) == (0, 0)
            if before is restored:
                # The same pages, so the same answer to the last bit.
                assert (back.tokens, back.logprobs) == (restored.tokens, restored.logprobs)
        corrupt = [
            scrape(server)["hiqcache_l3_corrupt_pages_total"]
            for server in running.replicas.values()
        ]
        assert corrupt == [0, 0]

        with running.load(conversations=2) as load:
            assert load.process is not None
            assert load.process.wait(300) == 0, load.log.read_text()[-2000:]
        requests = json.loads((tmp_path / "load.json").read_text())["arms"]["chat"]["fleet"][
            "requests"
        ]
        assert requests["ok"] == 2 * 4, "conversations of four turns"
        assert sum(requests.values()) == requests["ok"]


def sees_all(running: Fleet, storage: str) -> None:
    """Prometheus scrapes replicas, router and store."""
    expected = {*running.replicas, "router", *(("mooncake",) if storage == "mooncake" else ())}
    eventually(
        "all is scraped",
        lambda: {name for name, up in running.query("up").items() if up} == expected,
    )
