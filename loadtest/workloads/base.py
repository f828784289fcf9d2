"""What a workload is: conversations, each a series of requests, the same for the same seed."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

#: Token ids that prompts are drawn from: inside the vocabulary of every model with 32k tokens or
#: more, and above the special and byte tokens that vocabularies begin with.
TOKEN_IDS = range(1_000, 30_000)

#: SGLang serves one model and takes any name for it. A router in front of it does not.
ANY_MODEL = "default"


@dataclass(frozen=True)
class Request:
    """One request of the OpenAI-compatible API, before it meets a server.

    Exactly one of ``tokens`` (a prompt as token ids, for /v1/completions) and ``messages`` (for
    /v1/chat/completions) is given. ``fixed_length`` asks for exactly ``max_tokens`` tokens: a
    measured load must not depend on when a model happens to stop.
    """

    max_tokens: int
    tokens: Sequence[int] | None = None
    messages: Sequence[dict[str, str]] | None = None
    fixed_length: bool = True

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.messages is None):
            raise ValueError("a request has either tokens or messages")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")

    @property
    def path(self) -> str:
        """The endpoint it goes to."""
        return "/v1/completions" if self.tokens is not None else "/v1/chat/completions"

    def body(self, model: str = ANY_MODEL) -> dict[str, Any]:
        """The JSON body for ``model``: streamed, greedy, with token counts in every chunk."""
        prompt: dict[str, Any] = (
            {"prompt": list(self.tokens)}
            if self.tokens is not None
            else {"messages": list(self.messages or ())}
        )
        return {
            "model": model,
            **prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": self.fixed_length,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_cached_tokens_details": True,
        }


#: A conversation yields requests and is sent the text of each answer.
Turns = Generator[Request, str, None]


@dataclass(frozen=True)
class Conversation:
    """``turns``, and when the first is due: ``at`` seconds after the start; None: when one can."""

    turns: Turns
    at: float | None = None


class Workload(ABC):
    """A source of conversations. ``seed`` fixes every prompt and the order of all."""

    #: The name that metrics, results and the command line use.
    name: ClassVar[str]
    seed: int

    @abstractmethod
    def conversations(self, stream: int = 0) -> Iterator[Conversation]:
        """The conversations of one load generator process.

        Processes (``stream`` 0, 1, …) draw from the same prompts in different orders; the same
        stream always brings the same conversations, so two arms can be given the same load.
        """

    def rng(self, *parts: int | str) -> random.Random:
        """A generator of its own for each purpose, so that one draw does not shift another."""
        return random.Random("/".join(map(str, (self.name, self.seed, *parts))))


def single(request: Request) -> Turns:
    """A conversation of one request."""
    yield request


def poisson(
    conversations: Iterator[Conversation], rate: float, rng: random.Random
) -> Iterator[Conversation]:
    """The same conversations, due as a Poisson process of ``rate`` a second."""
    if rate <= 0:
        raise ValueError(f"the arrival rate must be above 0 a second, not {rate}")
    at = 0.0
    for conversation in conversations:
        at += rng.expovariate(rate)
        yield Conversation(conversation.turns, at)
