"""Recall prompts: one fact somewhere in a long prefix, asked for in the suffix.

Averages over a text hide a lost token; these do not. An answer counts as recalled where every one
of its tokens is the model's first choice, given the tokens before it: that is what greedy decoding
would have written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.lab.texts import Tokenizer

_ADJECTIVES = """
amber brisk calm daring eager faint gentle hollow ivory jolly keen lively mellow noble olive proud
quiet rapid silver tidy urban velvet windy young
"""
_ANIMALS = """
badger camel donkey eagle falcon gibbon heron iguana jackal koala lemur magpie newt otter panda
quail raven salmon tiger urchin viper walrus yak zebra
"""


@dataclass(frozen=True)
class Recall:
    """One question. ``depth`` is where in the prefix the fact stands, from 0 to 1."""

    kind: str
    depth: float
    prefix: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


def needles(
    tokenizer: Tokenizer,
    haystacks: Sequence[Sequence[int]],
    depths: Sequence[float],
    seed: int = 1,
) -> list[Recall]:
    """A five-digit code hidden in each of ``haystacks``, at each of ``depths`` in turn."""
    generator = random.Random(seed)
    made = []
    for haystack, depth in zip(haystacks, itertools.cycle(depths), strict=False):
        name = f"{generator.choice(_ADJECTIVES.split())} {generator.choice(_ANIMALS.split())}"
        code = "".join(generator.choice("0123456789") for _ in range(5))
        fact = tokenizer.encode(f"\n\nThe secret code of the {name} is {code}.\n\n")
        cut = round(depth * len(haystack))
        made.append(
            Recall(
                "needle",
                depth,
                (*haystack[:cut], *fact, *haystack[cut:]),
                tuple(tokenizer.encode(f"\n\nThe secret code of the {name} is")),
                tuple(tokenizer.encode(f" {code}")),
            )
        )
    return made


def key_values(
    tokenizer: Tokenizer, lists: int, pairs: int, questions: int, seed: int = 2
) -> list[Recall]:
    """``lists`` lists of ``pairs`` keys with four-digit values; ``questions`` keys of each asked.

    Ordered question by question, list by list, so that a list has left L1 when it is asked again.
    """
    generator = random.Random(seed)
    made: list[list[Recall]] = []
    names = [f"{left}-{right}" for left in _ADJECTIVES.split() for right in _ANIMALS.split()]
    for _ in range(lists):
        keys = generator.sample(names, pairs)
        values = ["".join(generator.choice("0123456789") for _ in range(4)) for _ in keys]
        lines = [f"{key}: {value}" for key, value in zip(keys, values, strict=True)]
        prefix = tuple(tokenizer.encode("Door codes of the building.\n\n" + "\n".join(lines)))
        asked = [round(i * (pairs - 1) / (questions - 1)) for i in range(questions)]
        made.append(
            [
                Recall(
                    "key-value",
                    i / (pairs - 1),
                    prefix,
                    tuple(tokenizer.encode(f"\n\n{keys[i]}:")),
                    tuple(tokenizer.encode(f" {values[i]}")),
                )
                for i in asked
            ]
        )
    return [recall for one_each in zip(*made, strict=True) for recall in one_each]
