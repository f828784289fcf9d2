"""Asks a server the items of a task, each with its prefix restored from L2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bench.quality.arm_run import FROM_TIER, InvalidRunError
from bench.quality.measures import divergence
from bench.quality.scoring import Scored, Scorer
from bench.quality.tasks.answers import is_right, letter
from bench.quality.tasks.items import LETTERS, Item

#: A solution's tokens at most, and what ends it.
SOLUTION, STOPS = 256, ("\n\n", "Question:")
#: Tokens of which an answer's distribution is kept; see measures.divergence for the rest.
TOP = 256


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Asked:
    """An item in tokens."""

    item: Item
    prefix: tuple[int, ...]
    question: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens with the longest answer."""
        answer = SOLUTION if self.item.task == "gsm8k" else 1
        return len(self.prefix) + len(self.question) + answer


@dataclass(frozen=True)
class Outcome:
    """One item's answer.

    host: prompt tokens that came from L2.
    tokens, logprobs: where a letter is asked, the most probable tokens at the answer, best first.
    """

    right: bool
    said: str
    host: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def prepared(items: Sequence[Item], tokenizer: Tokenizer) -> list[Asked]:
    """Items in tokens; a prefix's are the same in each of its items."""
    prefixes = {item.prefix: tuple(tokenizer.encode(item.prefix)) for item in items}
    return [
        Asked(
            item,
            prefixes[item.prefix],
            tuple(tokenizer.encode(item.question, add_special_tokens=False)),
        )
        for item in items
    ]


def l1_tokens(asked: Sequence[Asked], concurrency: int, page_size: int) -> int:
    """A capacity of L1 that holds what is asked at a time, and no prefix until its next turn.

    Raises ValueError where the prefixes are too few or too short for that.
    """
    pages = 1 + max(one.longest for one in asked) // page_size
    l1 = (concurrency + 1) * (pages + 1) * page_size
    for task in {one.item.task for one in asked}:
        turn = sum(map(len, {one.prefix for one in asked if one.item.task == task}))
        if turn < 2 * l1:
            raise ValueError(
                f"the prefixes of {task} are {turn} tokens in all, and L1 needs {l1} for "
                f"{concurrency} requests at a time: an L1 that holds half of the prefixes may not "
                "let one go before it is asked for again. Ask for more items, or fewer at a time."
            )
    return l1


def l2_tokens(asked: Sequence[Asked]) -> int:
    """What is asked, each prefix once."""
    prefixes = {one.prefix for one in asked}
    return sum(map(len, prefixes)) + sum(one.longest - len(one.prefix) for one in asked)


def ask_all(
    scorer: Scorer,
    asked: Sequence[Asked],
    tokens: dict[str, int],
    concurrency: int,
    tick: Callable[[], Any],
) -> list[Outcome]:
    """Every item's outcome, in order. Raises InvalidRunError where a prefix was not restored."""

    def one(each: Asked) -> Outcome:
        outcome = _ask(scorer, each, tokens)
        tick()
        return outcome

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, asked))


def letter_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The token of each letter after a blank. Raises ValueError where one takes several."""
    found = {}
    for each in LETTERS:
        encoded = tokenizer.encode(f" {each}", add_special_tokens=False)
        if len(encoded) != 1:
            raise ValueError(f"{each!r} after a blank is {len(encoded)} tokens of this tokenizer.")
        found[each] = encoded[0]
    return found


def answer_kl(reference: Outcome, other: Outcome, vocabulary: int) -> float | None:
    """KL in nats between two distributions at an answer; none where a text was asked for."""
    if not reference.tokens:
        return None
    return float(divergence(_listed(reference), _listed(other), vocabulary)[0])


def _listed(outcome: Outcome) -> Scored:
    return Scored(
        np.empty(0, np.float32),
        np.array([outcome.logprobs], np.float32),
        np.array([outcome.tokens], np.int32),
        (),
        0,
        outcome.host,
    )


def _ask(scorer: Scorer, asked: Asked, tokens: dict[str, int]) -> Outcome:
    item, prompt = asked.item, (*asked.prefix, *asked.question)
    if item.task == "mmlu":
        # The distribution at the answer alone: what the question's last token predicts.
        (scored,) = scorer.score((*prompt, tokens["A"]), len(prompt) - 1, TOP)
        said = letter(scored, tokens)
        outcome = Outcome(
            said == item.answer,
            said,
            scored.host,
            scored.top_tokens[-1].tolist(),
            scored.top_values[-1].tolist(),
        )
    else:
        text, host = scorer.solve(prompt, SOLUTION, STOPS)
        outcome = Outcome(is_right(text, item.answer), text, host)
    needed = scorer.cached_of(len(asked.prefix))
    if outcome.host < FROM_TIER * needed:
        raise InvalidRunError(
            f"INVALID RUN: of a prefix of {needed} tokens in whole pages, {outcome.host} came from "
            f"L2, where at least {FROM_TIER:.0%} must ({item.task}, {item.group}). It was still in "
            "L1, or L2 had lost it: ask for more items, or fewer at a time."
        )
    return outcome
