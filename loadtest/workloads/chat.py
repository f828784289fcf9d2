"""Multi-turn chat: every turn sends the whole conversation again, longer by one exchange."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics
from typing import ClassVar

from loadtest.workloads.base import Conversation, Request, Turns, Workload


@dataclass
class Chat(Workload):
    """Conversations of ``turns`` turns after a system prompt that ``systems`` of them share.

    The text is English that every CPython carries (its own reference, pydoc_data.topics), cut to
    lengths in words: a word of it is about 1.5 tokens. The model's real answers go into the next
    turn, so their KV is reused too. ``output_tokens`` bounds an answer.
    """

    name: ClassVar[str] = "chat"

    seed: int = 0
    systems: int = 4
    system_words: int = 400
    question_words: int = 40
    turns: int = 4
    output_tokens: int = 48

    def __post_init__(self) -> None:
        counts = (self.systems, self.system_words, self.question_words, self.turns)
        if min(*counts, self.output_tokens) < 1:
            raise ValueError(f"counts and lengths must be at least 1: {self}")

    @cached_property
    def _words(self) -> list[str]:
        return " ".join(topics[name] for name in sorted(topics)).split()

    def _passage(self, words: int, rng: random.Random) -> str:
        start = rng.randrange(max(1, len(self._words) - words))
        return " ".join(self._words[start : start + words])

    def system(self, index: int) -> str:
        """The system prompt that conversations number ``index`` modulo ``systems`` share."""
        passage = self._passage(self.system_words, self.rng("system", index))
        return f"You are a helpful assistant. Answer from this text, briefly.\n\n{passage}"

    def conversations(self, stream: int = 0) -> Iterator[Conversation]:
        rng = self.rng("conversations", stream)
        while True:
            yield Conversation(self._turns(rng.randrange(self.systems), rng.getrandbits(64)))

    def _turns(self, system: int, key: int) -> Turns:
        rng = self.rng("questions", key)
        messages = [{"role": "system", "content": self.system(system)}]
        for _ in range(self.turns):
            passage = self._passage(self.question_words, rng)
            messages.append({"role": "user", "content": f"Explain this: {passage}"})
            answer = yield Request(self.output_tokens, messages=tuple(messages), fixed_length=False)
            messages.append({"role": "assistant", "content": answer})
