"""Runs one arm: fills the cache, lets L1 forget, and scores every prompt from restored prefixes."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.quality.measures import common_prefix, divergence, first_tokens, identical
from bench.quality.prompts import Prompts, Window
from bench.quality.recall import Recall
from bench.quality.scoring import Scored, Scorer

#: The share of a prefix that must come from the tier that a row is about, or the run is invalid.
FROM_TIER = 0.95

#: Raised whenever the passes below ask for something else: what was kept from before is of no use.
PASSES = 2

Tick = Callable[[str], None]


class InvalidRunError(RuntimeError):
    """What was measured is not what the table would say; the text says which and what to do."""


@dataclass(frozen=True)
class Reference:
    """Answers to all prompts with their prefixes still in L1."""

    windows: list[Scored]
    recalls: list[Scored]

    def save(self, path: Path) -> None:
        """Write arrays alone (.npz): reading the file runs nothing that it holds."""
        arrays: dict[str, NDArray[Any]] = {}
        for kind, answers in (("windows", self.windows), ("recalls", self.recalls)):
            arrays[kind] = np.array(len(answers))
            for number, answer in enumerate(answers):
                for name, value in asdict(answer).items():
                    arrays[f"{kind}/{number}/{name}"] = np.asarray(value)
        np.savez(path, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: Path) -> Reference:
        """What ``save`` wrote. Raises InvalidRunError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return Reference(
                    *(
                        [_scored(arrays, f"{kind}/{n}") for n in range(int(arrays[kind]))]
                        for kind in ("windows", "recalls")
                    )
                )
        except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
            raise InvalidRunError(
                f"{path} cannot be read ({error}): run with --fresh to measure it again."
            ) from error


def _scored(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Scored:
    return Scored(
        arrays[f"{prefix}/logprobs"],
        arrays[f"{prefix}/top_values"],
        arrays[f"{prefix}/top_tokens"],
        tuple(arrays[f"{prefix}/output"].tolist()),
        int(arrays[f"{prefix}/device"]),
        int(arrays[f"{prefix}/host"]),
    )


@dataclass
class Rows:
    """The measurements of one arm, for JSON."""

    windows: list[dict[str, Any]] = field(default_factory=list)
    recalls: list[dict[str, Any]] = field(default_factory=list)


def reference_pass(scorer: Scorer, prompts: Prompts, tick: Tick) -> Reference:
    """Answers with every prefix in L1.

    Only the prefix is asked for first. A suffix that were in the tree already would be shared when
    the request enters it, and its tokens would be generated from another shape's suffix.
    """
    hot = []
    for window in prompts.windows:
        scorer.fill(window.tokens[: window.prefix])
        hot.append(_ask(scorer, window))
        _require("device", scorer.cached_of(window.prefix), hot[-1])
        tick("reference")
    recalls: dict[int, Scored] = {}
    # List by list, so that a list stays in L1 from its first question to its last.
    order = sorted(range(len(prompts.recalls)), key=lambda i: prompts.recalls[i].prefix)
    previous: tuple[int, ...] = ()
    for index in order:
        recall = prompts.recalls[index]
        if recall.prefix != previous:
            scorer.fill(recall.prefix)
            previous = recall.prefix
        recalls[index] = _recall(scorer, recall)
        _require("device", scorer.cached_of(len(recall.prefix)), recalls[index])
        tick("reference")
    return Reference(hot, [recalls[i] for i in range(len(prompts.recalls))])


def fill_pass(scorer: Scorer, prompts: Prompts, tick: Tick) -> None:
    """Have every prefix computed and stored, in the shapes of the reference pass."""
    for window in prompts.windows:
        scorer.fill(window.tokens[: window.prefix])
        tick("fill")
    for prefix in sorted({recall.prefix for recall in prompts.recalls}):
        scorer.fill(prefix)
        tick("fill")


def restored_pass(scorer: Scorer, prompts: Prompts, reference: Reference, tick: Tick) -> Rows:
    """Score every prompt from L2. Raises InvalidRunError where a prefix came from elsewhere."""
    rows = Rows()
    for window, expected in zip(prompts.windows, reference.windows, strict=True):
        scored = _ask(scorer, window)
        _require("host", scorer.cached_of(window.prefix), scored)
        rows.windows.append(compare(window, expected, scored, prompts))
        tick("restored")
    for recall, expected in zip(prompts.recalls, reference.recalls, strict=True):
        scored = _recall(scorer, recall)
        _require("host", scorer.cached_of(len(recall.prefix)), scored)
        rows.recalls.append(_recall_row(recall, expected, scored))
        tick("restored")
    return rows


def batched_pass(scorer: Scorer, prompts: Prompts, reference: Reference, tick: Tick) -> Rows:
    """Score the windows two at a time: other shapes, the same values, and so the noise floor."""
    rows = Rows()
    for first in range(0, len(prompts.windows) - 1, 2):
        pair = prompts.windows[first : first + 2]
        answers = scorer.score(
            [window.tokens for window in pair],
            pair[0].prefix,
            prompts.size.top,
            [window.generate for window in pair],
        )
        for offset, (window, scored) in enumerate(zip(pair, answers, strict=True)):
            expected = reference.windows[first + offset]
            rows.windows.append(compare(window, expected, scored, prompts))
            tick("batched")
    return rows


def cold_pass(scorer: Scorer, prompts: Prompts, reference: Reference, tick: Tick) -> Rows:
    """Score the windows from empty caches: what a prefill in one piece differs by."""
    rows = Rows()
    scorer.flush()
    for window, expected in zip(prompts.windows, reference.windows, strict=True):
        rows.windows.append(compare(window, expected, _ask(scorer, window), prompts))
        tick("cold")
    return rows


def compare(window: Window, reference: Scored, scored: Scored, prompts: Prompts) -> dict[str, Any]:
    """The row of one window; per position where a distribution over positions is reported."""
    top, vocabulary = prompts.size.top, prompts.vocabulary
    p, q = first_tokens(reference, top), first_tokens(scored, top)
    whole = min(reference.top_values.shape[1], scored.top_values.shape[1]) == vocabulary
    generated = len(scored.output) == window.generate
    return {
        "text": window.text,
        "prefix": window.prefix,
        "device": scored.device,
        "host": scored.host,
        "nll": (-scored.logprobs.astype(np.float64)).tolist(),
        "reference_nll": (-reference.logprobs.astype(np.float64)).tolist(),
        "kl": divergence(p, q, vocabulary).tolist(),
        "kl_whole": divergence(reference, scored, vocabulary).tolist() if whole else None,
        "top1": (p.top_tokens[:, 0] == q.top_tokens[:, 0]).tolist(),
        "identical": identical(reference, scored) if generated else None,
        "generated": len(scored.output),
        "agreed": common_prefix(reference.output, scored.output),
    }


def _ask(scorer: Scorer, window: Window) -> Scored:
    return scorer.score(window.tokens, window.prefix, window.top, window.generate)[0]


def _recall(scorer: Scorer, recall: Recall) -> Scored:
    tokens = (*recall.prefix, *recall.question, *recall.answer)
    return scorer.score(tokens, len(recall.prefix), 1)[0]


def _recall_row(recall: Recall, reference: Scored, scored: Scored) -> dict[str, Any]:
    return {
        "kind": recall.kind,
        "depth": recall.depth,
        "prefix": len(recall.prefix),
        "device": scored.device,
        "host": scored.host,
        "recalled": _recalled(recall, scored),
        "reference_recalled": _recalled(recall, reference),
        "nll": float(-scored.logprobs[-len(recall.answer) :].mean()),
        "reference_nll": float(-reference.logprobs[-len(recall.answer) :].mean()),
        "identical": identical(reference, scored),
    }


def _recalled(recall: Recall, scored: Scored) -> bool:
    chosen: Sequence[int] = scored.top_tokens[-len(recall.answer) :, 0].tolist()
    return tuple(chosen) == recall.answer


def _require(tier: str, prefix: int, scored: Scored) -> None:
    found = scored.host if tier == "host" else scored.device
    if found < FROM_TIER * prefix:
        raise InvalidRunError(
            f"INVALID RUN: of a prefix of {prefix} tokens in whole pages, {scored.device} came "
            f"from L1 (device) and {scored.host} from L2 (host), where at least {FROM_TIER:.0%} "
            f"must come from {tier}. "
            + (
                "The prefix was still in L1, or L2 had lost it: lower the server's "
                "--max-total-tokens or raise its --hicache-size."
                if tier == "host"
                else "The prefix had left L1 before it was asked for: raise --max-total-tokens."
            )
        )
