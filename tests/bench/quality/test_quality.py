"""Prompts, measures and summaries of the quality run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.lab.texts import TEXTS, paragraphs, windows
from bench.quality import summary
from bench.quality.arm_run import (
    InvalidRunError,
    Reference,
    Rows,
    batched_pass,
    cold_pass,
    restored_pass,
)
from bench.quality.measures import common_prefix, divergence, first_tokens, identical
from bench.quality.prompts import Prompts, Size, build
from bench.quality.recall import key_values, needles
from bench.quality.scoring import Scored, Scorer

VOCABULARY = 50


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def scored(logits: np.ndarray, top: int, *, device: int = 0, host: int = 90) -> Scored:
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logprobs, axis=1)[:, :top]
    return Scored(
        logprobs[:, 0].astype(np.float32),
        np.take_along_axis(logprobs, order, 1).astype(np.float32),
        order.astype(np.int32),
        (1, 2, 3),
        device,
        host,
    )


def test_texts_are_long_english_prose() -> None:
    for text in TEXTS.values():
        words = paragraphs(text.load()).split()
        assert len(words) > 30_000
        assert sum(word in ("the", "of", "and", "is", "to") for word in words) > 0.1 * len(words)


def test_windows_do_not_overlap() -> None:
    made = windows(range(100), 3, 30)
    assert [window[0] for window in made] == [0, 33, 66]
    with pytest.raises(ValueError, match="do not hold"):
        windows(range(100), 4, 30)


def test_prompts_are_the_same_each_time_and_prefixes_differ() -> None:
    size = Size(windows=3, prefix=64, suffix=8, haystacks=2, haystack=80, lists=2, pairs=12)
    first, second = (build(Bytes(), 256, size, list(TEXTS)) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    starts = [recall.prefix[:40] for recall in first.recalls if recall.kind == "needle"]
    # A shared beginning would still be in L1 when the second prompt is asked.
    assert len(set(starts)) == len(starts)


def test_a_needle_stands_at_its_depth() -> None:
    haystacks = [list(range(1000, 1100))] * 4
    for recall in needles(Bytes(), haystacks, (0.25, 0.75)):
        text = bytes(t for t in recall.prefix if t < 256).decode()
        assert bytes(recall.answer).decode().strip() in text
        assert recall.prefix.index(1000 + round(recall.depth * 100) - 1) < recall.prefix.index(10)


def test_key_values_ask_every_list_before_any_list_again() -> None:
    recalls = key_values(Bytes(), lists=3, pairs=10, questions=4)
    assert len(recalls) == 12
    assert len({recall.prefix for recall in recalls[:3]}) == 3
    assert {recall.depth for recall in recalls} >= {0.0, 1.0}
    for recall in recalls:
        line = bytes(recall.question + recall.answer).decode().strip()
        assert line in bytes(recall.prefix).decode()


def test_divergence_is_kl_where_everything_is_listed() -> None:
    generator = np.random.default_rng(0)
    p = generator.normal(size=(6, VOCABULARY))
    q = p + generator.normal(scale=0.1, size=p.shape)
    a, b = scored(p, VOCABULARY), scored(q, VOCABULARY)
    lp, lq = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    exact = (np.exp(lp) * (lp - lq)).sum(1)
    assert divergence(a, b, VOCABULARY) == pytest.approx(exact, rel=1e-3, abs=1e-6)


def test_lumping_only_lowers_and_only_a_little() -> None:
    generator = np.random.default_rng(1)
    p = 4 * generator.normal(size=(40, VOCABULARY))
    q = p + generator.normal(scale=0.1, size=p.shape)
    whole = divergence(scored(p, VOCABULARY), scored(q, VOCABULARY), VOCABULARY)
    listed = divergence(first_tokens(scored(p, VOCABULARY), 20), scored(q, 20), VOCABULARY)
    assert (listed <= whole + 1e-6).all()
    assert listed.mean() > 0.8 * whole.mean()


def test_a_distribution_does_not_diverge_from_itself() -> None:
    same = scored(np.random.default_rng(2).normal(size=(5, VOCABULARY)), 10)
    assert divergence(same, same, VOCABULARY) == pytest.approx(0)
    assert identical(same, same)


def test_common_prefix() -> None:
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 3)) == 2
    assert common_prefix((), (1,)) == 0


class _FromL1(Scorer):
    """A server that reports a tenth of every prefix as still in L1."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:0")

    def score(self, tokens, prefix, top, generate=1):  # type: ignore[no-untyped-def]  # noqa: ARG002
        logits = np.zeros((len(tokens) - prefix - 1, VOCABULARY))
        return [scored(logits, top, device=prefix // 10, host=prefix - prefix // 10)]


def test_a_prefix_that_did_not_come_from_l2_makes_the_run_invalid() -> None:
    size = Size(windows=2, prefix=64, suffix=8, haystacks=1, haystack=80, lists=2, pairs=12)
    prompts = build(Bytes(), VOCABULARY, size, ["opticks"])
    prompts = Prompts(size, VOCABULARY, prompts.windows, ())
    reference = Reference([scored(np.zeros((7, VOCABULARY)), 10)] * 2, [])
    with pytest.raises(InvalidRunError, match="6 came from L1"):
        restored_pass(_FromL1(), prompts, reference, lambda _: None)


def test_of_a_prefix_whole_pages_must_come_from_l2() -> None:
    assert [Scorer("", page_size=page).cached_of(815) for page in (1, 16, 64)] == [815, 800, 768]


def rows(kl: float, shift: float) -> list[dict[str, object]]:
    return [
        {
            "text": "opticks",
            "prefix": 100,
            "device": 0,
            "host": 100,
            "nll": [2.0 + shift] * 10,
            "reference_nll": [2.0] * 10,
            "kl": [kl] * 10,
            "kl_whole": None,
            "top1": [True] * 9 + [False],
            "identical": False,
            "generated": 32,
            "agreed": 16,
        }
        for _ in range(4)
    ]


def test_summary_says_whether_the_promises_hold() -> None:
    int8, rot = rows(0.002, 0.001), rows(0.0005, 0.0)
    arms = {
        "int8": summary.summarise(int8, [], 32),
        "int8-rot": summary.summarise(rot, [], 32),
    }
    assert arms["int8"]["perplexity_ratio"]["value"] == pytest.approx(math.exp(0.001))
    assert arms["int8"]["top1_agreement"]["value"] == pytest.approx(0.9)
    assert arms["int8"]["greedy"] == {
        "texts": 4,
        "tokens": 32,
        "agreed_mean": 16.0,
        "agreed_whole": 0.0,
    }
    met = summary.acceptance(arms, summary.kl_share(rot, int8))
    assert met["int8_rot_kl_share_of_int8"]["value"] == pytest.approx(0.25)
    assert met["int8_rot_kl_met"]
    assert met["int8_perplexity_ratio_met"]
    assert not summary.acceptance(arms, summary.kl_share(int8, int8))["int8_rot_kl_met"]


def test_kept_answers_come_back_bit_by_bit(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    answers = [scored(generator.normal(size=(n, VOCABULARY)), n + 1) for n in (3, 5, 1)]
    kept = Reference(answers[:2], answers[2:])
    kept.save(tmp_path / "reference.npz")
    found = Reference.load(tmp_path / "reference.npz")
    for ours, theirs in zip(
        [*kept.windows, *kept.recalls], [*found.windows, *found.recalls], strict=True
    ):
        assert identical(ours, theirs)
        assert (ours.device, ours.host) == (theirs.device, theirs.host)
        assert ours.logprobs.dtype == theirs.logprobs.dtype


class _Answers(Scorer):
    """A server that answers as many tokens as it is asked for, and never to the reference's end."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:0")

    def score(self, tokens, prefix, top, generate=1):  # type: ignore[no-untyped-def]
        batch = [tokens] if isinstance(tokens[0], int) else tokens
        counts = [generate] if isinstance(generate, int) else generate
        logits = np.zeros((len(batch[0]) - prefix - 1, VOCABULARY))
        return [
            replace(scored(logits, top), output=(*range(count - 1), -1))
            for _, count in zip(batch, counts, strict=True)
        ]

    def flush(self) -> None:
        """There are no tiers."""


@pytest.mark.parametrize("noise", [batched_pass, cold_pass])
def test_whole_answers_have_their_noise_too(noise: Callable[..., Rows]) -> None:
    small = Size(windows=4, prefix=64, suffix=8, haystacks=1, haystack=80, lists=2, pairs=12)
    size = replace(small, greedy=2, generate=6)
    prompts = build(Bytes(), VOCABULARY, size, ["opticks"])
    logits = np.zeros((7, VOCABULARY))
    reference = Reference(
        [replace(scored(logits, 10), output=tuple(range(w.generate))) for w in prompts.windows], []
    )
    found = noise(_Answers(), prompts, reference, lambda _: None)
    # The last token of each answer differs.
    greedy = summary.summarise(found.windows, [], size.generate)["greedy"]
    assert greedy == {"texts": 2, "tokens": 6, "agreed_mean": 5.0, "agreed_whole": 0.0}


class _Runs:
    """What a pickle can do to whoever reads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("content", ["code", "code in an array", "nothing", "a part"])
def test_reading_kept_answers_runs_nothing_that_they_hold(tmp_path: Path, content: str) -> None:
    file, trace = tmp_path / "reference.npz", tmp_path / "ran"
    if content == "code":
        file.write_bytes(pickle.dumps(_Runs(trace)))
    elif content == "code in an array":
        np.savez(file, windows=np.array([_Runs(trace)], dtype=object), recalls=np.array(0))
    elif content == "a part":
        np.savez(file, windows=np.array(1), recalls=np.array(0))
    else:
        file.touch()
    with pytest.raises(InvalidRunError, match=r"cannot be read .* --fresh"):
        Reference.load(file)
    assert not trace.exists()
