"""Prompts that share long prefixes: the system prompts and documents that L2 exists for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from loadtest.workloads.base import TOKEN_IDS, Conversation, Request, Workload, single

#: Requests of a group in one shuffle of ``dealt``.
DEALS = 4


@dataclass
class SharedPrefix(Workload):
    """``groups`` prefixes of ``prefix_tokens``; a request is one of them and a suffix of its own.

    choice: ``uniform`` draws the group of every request alike; ``zipf`` draws group k (from 1) in
        proportion to 1 / k**zipf_exponent, a few prefixes being hot as they are in production;
        ``dealt`` gives every group as many requests, DEALS of each shuffled and then as many again,
        as SGLang's bench_serving shuffles its generated shared prefixes.
    The KV of all prefixes is ``groups * prefix_tokens`` tokens: between the capacities of two host
    tiers, the larger one hits and the smaller one thrashes.
    """

    name: ClassVar[str] = "shared-prefix"

    seed: int = 0
    groups: int = 32
    prefix_tokens: int = 2048
    suffix_tokens: int = 32
    output_tokens: int = 32
    choice: Literal["uniform", "zipf", "dealt"] = "uniform"
    zipf_exponent: float = 1.0

    def __post_init__(self) -> None:
        if min(self.groups, self.prefix_tokens, self.suffix_tokens, self.output_tokens) < 1:
            raise ValueError(f"groups and token counts must be at least 1: {self}")
        if self.choice not in ("uniform", "zipf", "dealt"):
            raise ValueError(f"choice must be uniform, zipf or dealt, not {self.choice!r}")
        if self.zipf_exponent <= 0:
            raise ValueError(f"zipf_exponent must be above 0, not {self.zipf_exponent}")

    @property
    def working_set_tokens(self) -> int:
        """Tokens of KV that all prefixes take."""
        return self.groups * self.prefix_tokens

    @cached_property
    def prefixes(self) -> tuple[tuple[int, ...], ...]:
        """The prefixes, as token ids."""
        return tuple(
            tuple(self.rng("prefix", group).choices(TOKEN_IDS, k=self.prefix_tokens))
            for group in range(self.groups)
        )

    @property
    def weights(self) -> list[float]:
        """How often each group is drawn, in proportion."""
        exponent = self.zipf_exponent if self.choice == "zipf" else 0.0
        return [1 / rank**exponent for rank in range(1, self.groups + 1)]

    def conversations(self, stream: int = 0) -> Iterator[Conversation]:
        suffixes = self.rng("suffix", stream)
        for group in self._groups(self.rng("order", stream)):
            prefix = self.prefixes[group]
            suffix = suffixes.choices(TOKEN_IDS, k=self.suffix_tokens)
            yield Conversation(single(Request(self.output_tokens, tokens=(*prefix, *suffix))))

    def _groups(self, order: random.Random) -> Iterator[int]:
        everyone = range(self.groups)
        cumulative = list(itertools.accumulate(self.weights))
        while True:
            if self.choice == "dealt":
                dealt = [group for group in everyone for _ in range(DEALS)]
                order.shuffle(dealt)
                yield from dealt
            else:
                yield from order.choices(everyone, cum_weights=cumulative)
