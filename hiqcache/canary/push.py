"""Prompts that push others out of L1, where the operator allows tokens for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hiqcache.canary.prompts import Prompt
from hiqcache.canary.server import Facts, Tiers


@dataclass
class Push:
    """As many tokens of fillers as L1 holds, asked for again and again: L2 holds them once.

    per_hour: tokens that may be asked for in an hour; what is not used is kept for one round.
    """

    fillers: list[Prompt]
    per_hour: int
    _allowance: float = field(init=False)
    _at: float = field(default_factory=time.monotonic)
    _turn: int = 0

    @classmethod
    def of(
        cls, per_hour: int, prompts: Sequence[Prompt], facts: Facts, tiers: Tiers
    ) -> Push | None:
        """Fillers of the tokens of ``prompts``, each under a cache key of its own; None for 0."""
        if not per_hour:
            return None
        size = max(facts.page_size, min(facts.longest // 2, tiers.l1 // 4))
        tokens = [token for prompt in prompts for token in prompt.tokens]
        tokens = (tokens * (size // len(tokens) + 1))[:size]
        run = secrets.token_hex(8)
        count = -(-tiers.l1 // size)
        names = (f"hiqcache-canary/push-{number}/{run}" for number in range(count))
        return cls([Prompt(name, tuple(tokens), size) for name in names], per_hour)

    def __post_init__(self) -> None:
        self._allowance = float(min(self.per_hour, self.tokens))

    @property
    def tokens(self) -> int:
        """Tokens of all fillers: what they take of L2."""
        return sum(len(filler.tokens) for filler in self.fillers)

    def next(self, now: float) -> Prompt | None:
        """The filler whose turn it is; None where the hour's tokens are used up.

        ``now``: seconds of a clock that never goes back.
        """
        earned = (now - self._at) * self.per_hour / 3600
        self._allowance = min(self._allowance + earned, float(max(self.per_hour, self.tokens)))
        self._at = now
        filler = self.fillers[self._turn % len(self.fillers)]
        if self._allowance < len(filler.tokens):
            return None
        self._allowance -= len(filler.tokens)
        self._turn += 1
        return filler
