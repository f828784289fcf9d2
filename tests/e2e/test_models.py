"""Families of models, each by a tiny one of random weights: restored prefixes against L1's.

Random weights show that rows come back to where attention reads them, not what a codec costs in
quality.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.demo import passages
from bench.lab.server_metrics import scrape
from hiqcache.codecs.formats import row_formats
from hiqcache.record import Part, RecordLayout, kv_parts, latent_parts
from tests.e2e.arms import Arm, check
from tests.e2e.conftest import MakeServer
from tests.e2e.tiny_models import tiny

pytestmark = pytest.mark.e2e

#: Bound on the change of an answer's log-probabilities, natural logarithm: see LOGPROB_BOUND in
#: test_restores.
BOUND = 0.4

#: Share of an answer that stays as it was, at least. Random weights make flat distributions: the
#: first two tokens lie some 0.3 apart, where bf16 logits have steps of 0.03. Rows of another
#: prefix, or of another layer, leave nothing of an answer.
LEAST = 0.5

#: Layers and parts of each model.
SHAPES: dict[str, tuple[int, tuple[Part, ...]]] = {
    "mla": (3, latent_parts(512, 64)),
    "gemma3": (6, kv_parts(1, 256)),
}

CONFIGURATIONS = [
    ("mla", "bf16", "1", "page_first"),
    ("mla", "int8", "1", "page_first"),
    ("mla", "int8-rot", "16", "layer_first"),
    # Its windows are in SGLang's plain pool.
    ("gemma3", "int8", "1", "page_first"),
]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids="-".join)
def arm(
    request: pytest.FixtureRequest,
    make_server: MakeServer,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Arm]:
    family, codec, page_size, layout = request.param
    folder = tiny(family, tmp_path_factory.mktemp(family) / "model", model)
    server = make_server(
        codec,
        *("--page-size", page_size, "--hicache-mem-layout", layout),
        # torch_native reads latent rows as they lie, never in chunks of another attention.
        "--disable-chunked-prefix-cache",
        name=family,
        folder=folder,
    )
    with server:
        server.wait()
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = [tokenizer(text)["input_ids"][:125] for text in passages(model, 13)]
        yield Arm(server, codec, int(page_size), prompts, family)


def test_restored_answers(arm: Arm) -> None:
    check(arm, BOUND, LEAST)


def test_bytes_per_token_are_the_records(arm: Arm) -> None:
    layers, parts = SHAPES[arm.family]
    expected = layers * 2 * sum(part.heads * part.width for part in parts)
    if arm.codec != "bf16":
        layout = RecordLayout(layers, arm.page_size, row_formats(arm.codec, parts))
        expected = layout.bytes_per_token
    assert arm.restored
    metrics = scrape(arm.server)
    for direction in ("load_back", "hicache_backup"):
        moved = metrics[f"sglang:{direction}_tokens_total"]
        assert moved > 0
        assert metrics[f"sglang:{direction}_bytes_total"] / moved == expected
