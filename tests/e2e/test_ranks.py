"""Servers of several ranks, each with an L2 of its own: what they hold, say and restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoTokenizer

from bench.demo import passages
from bench.lab.server_metrics import by_labels, page_of
from hiqcache.codecs.formats import row_formats
from hiqcache.record import RecordLayout, kv_parts
from tests.e2e.arms import Arm, check
from tests.e2e.conftest import MakeServer
from tests.e2e.test_models import BOUND, LEAST
from tests.e2e.tiny_models import tiny

pytestmark = pytest.mark.e2e


class Ranks(NamedTuple):
    """How a model of 5 layers and 2 KV heads of 64 is split.

    shares: layers and heads of each rank, by tp_rank and pp_rank.
    """

    codec: str
    page_size: int
    arguments: tuple[str, ...]
    shares: dict[tuple[str, str], tuple[int, int]]


RANKS = {
    "tp-int8": Ranks("int8", 1, ("--tp-size", "2"), {("0", "0"): (5, 1), ("1", "0"): (5, 1)}),
    "pp-int8": Ranks("int8", 16, ("--pp-size", "2"), {("0", "0"): (2, 2), ("0", "1"): (3, 2)}),
}


@pytest.fixture(scope="module", params=RANKS.values(), ids=RANKS)
def served(
    request: pytest.FixtureRequest,
    make_server: MakeServer,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Ranks, Arm]]:
    ranks: Ranks = request.param
    server = make_server(
        ranks.codec,
        *("--page-size", str(ranks.page_size), *ranks.arguments),
        name="ranks",
        folder=tiny("plain", tmp_path_factory.mktemp("plain") / "model", model),
        # SGLang wants a NUMA node a rank, unless told of cores.
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    )
    with server:
        server.wait()
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = [tokenizer(text)["input_ids"][:125] for text in passages(model, 16)]
        yield ranks, Arm(server, ranks.codec, ranks.page_size, prompts)


def test_restored_answers(served: tuple[Ranks, Arm]) -> None:
    check(served[1], BOUND, LEAST)


def test_each_rank_says_what_it_holds_and_none_holds_fewer_tokens(
    served: tuple[Ranks, Arm],
) -> None:
    ranks, arm = served
    assert arm.restored
    found = by_labels(page_of(arm.server), ("tp_rank", "pp_rank"), "hiqcache_")
    assert found.keys() == ranks.shares.keys()
    for rank, (layers, heads) in ranks.shares.items():
        rows = row_formats(ranks.codec, kv_parts(heads, 64))
        layout = RecordLayout(layers, ranks.page_size, rows)
        assert found[rank]["l2_bytes_per_token"] == layout.bytes_per_token
    counted = ["l2_capacity_tokens", "backup_tokens_total", "restore_tokens_total"]
    assert min(values[name] for values in found.values() for name in counted) > 0
    first, *others = [[values[name] for name in counted] for values in found.values()]
    assert all(other == first for other in others)
