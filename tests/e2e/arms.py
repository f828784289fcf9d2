"""Servers whose answers are compared: from L1, and from L2 once each prompt has left L1."""

from __future__ import annotations

from functools import cached_property

from bench.demo import Answer
from bench.lab.completions import Completion, client_of, complete
from bench.lab.servers import Server

ANSWER_TOKENS = 8


class Arm:
    """A server of a model of ``family``, and what it answered. Prompts are token ids."""

    def __init__(
        self,
        server: Server,
        codec: str,
        page_size: int,
        prompts: list[list[int]],
        family: str = "plain",
        item_bytes: int = 2,
        askings: int = 1,
    ) -> None:
        """item_bytes: of an element of L1's rows. askings: after which a prompt is stored in L2."""
        self.family, self.item_bytes = family, item_bytes
        self.server, self.codec, self.page_size = server, codec, page_size
        self.client = client_of(server.url)
        self.prompts = prompts
        self.references = [self.reference(prompt, askings) for prompt in prompts]

    def ask(self, prompt: list[int]) -> Completion:
        return complete(self.client, prompt, ANSWER_TOKENS)

    def reference(self, prompt: list[int], askings: int) -> Completion:
        """The answer from L1, after the prompt without its last token was asked cold.

        With its last token, L1 would bring that token's rows as the cold prefill computed them,
        where a restored prefix computes them as one token.
        """
        for _ in range(askings):
            complete(self.client, prompt[:-1], 1)
        reference = self.ask(prompt)
        assert reference.host_tokens == 0
        assert reference.device_tokens == (len(prompt) - 1) // self.page_size * self.page_size
        return reference

    @cached_property
    def restored(self) -> list[Answer]:
        """Every prompt again, in an order in which each has left L1; those that came from L2."""
        answers = [
            Answer(self.ask(prompt), reference)
            for prompt, reference in zip(self.prompts, self.references, strict=True)
        ]
        return [answer for answer in answers if answer.restored]


def check(arm: Arm, bound: float, least: float = 0.9) -> None:
    """Whether restored answers are L1's: equal for bf16, else within ``bound`` (natural log).

    ``least``: the share of an answer, on average, that must be as it was.
    """
    answers = arm.restored
    assert len(answers) >= 12, "too few prompts came back from L2"
    for answer in answers:
        assert answer.given.host_tokens >= 96
    if arm.codec == "bf16":
        for answer in answers:
            assert answer.given.tokens == answer.reference.tokens
            assert answer.given.logprobs == answer.reference.logprobs
        return
    agreement = sum(answer.agreement for answer in answers) / len(answers)
    largest = max(change(answer) for answer in answers)
    assert agreement >= least, f"{agreement:.3f} of the answers is as it was; change {largest:.3f}"
    assert largest <= bound, f"a log-probability changed by {largest:.3f}"
    # The tier is lossy, so restored rows must show: equal log-probabilities would mean that
    # nothing was quantised.
    assert any(answer.given.logprobs != answer.reference.logprobs for answer in answers)


def change(answer: Answer) -> float:
    """Largest change of a log-probability up to and including the first differing token."""
    same = round(answer.agreement * len(answer.given.tokens))
    pairs = list(zip(answer.given.logprobs, answer.reference.logprobs, strict=False))
    return max((abs(a - b) for a, b in pairs[:same]), default=0.0)
