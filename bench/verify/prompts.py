"""What is asked: random ids, or windows of a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.lab.texts import windows


@dataclass(frozen=True)
class RandomPrompts:
    """Random ids below ``vocabulary``, for weights that tell any two of them apart."""

    vocabulary: int = 256
    #: Token ids whose log-probabilities are compared: bytes, in a vocabulary beginning with them.
    watched: tuple[int, ...] = tuple(range(32, 64))

    def draw(self, count: int, width: int, seed: int) -> list[list[int]]:
        """``count`` prompts of ``width`` tokens."""
        generator = np.random.default_rng(seed)
        return [row.tolist() for row in generator.integers(0, self.vocabulary, (count, width))]

    def other(self, token: int) -> int:
        """A token in place of ``token``."""
        return (token + 1) % self.vocabulary


class TextPrompts:
    """Windows of a text, and as watched ids its 256 most frequent ``tokens``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.watched = tuple(token for token, _ in Counter(tokens).most_common(256))

    def draw(self, count: int, width: int, seed: int) -> list[list[int]]:
        """``count`` windows of ``width`` tokens. Raises ValueError where the text is too short."""
        start = int(np.random.default_rng(seed).integers(len(self._tokens)))
        return windows([*self._tokens[start:], *self._tokens[:start]], count, width)

    def other(self, token: int) -> int:
        """A token in place of ``token``."""
        first, second, *_ = self.watched
        return first if token != first else second


Prompts = RandomPrompts | TextPrompts
