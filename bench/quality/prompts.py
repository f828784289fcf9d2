"""What every arm is asked, the same for all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.lab.texts import Tokenizer, tokens_of, windows
from bench.quality.recall import Recall, key_values, needles


@dataclass(frozen=True)
class Size:
    """How much is asked. The defaults take about eight minutes on two cores with SmolLM2-135M.

    windows: per text, each of ``prefix`` + ``suffix`` tokens.
    greedy: windows per text that are continued by ``generate`` tokens.
    top: tokens listed at each position; see measures.divergence for the rest.
    haystacks, haystack, depths: ``haystacks`` needles at each depth, per text.
    lists, pairs, questions: key-value lists.
    l1_tokens: capacity of L1, so small that a prefix has left it when it is asked for again.
    """

    windows: int = 8
    prefix: int = 1024
    suffix: int = 128
    greedy: int = 5
    generate: int = 16
    top: int = 4096
    haystacks: int = 1
    haystack: int = 800
    depths: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    lists: int = 5
    pairs: int = 60
    questions: int = 4
    l1_tokens: int = 3072


#: A tenth of the work, to see that everything runs; its figures are too few to quote.
QUICK = Size(
    windows=4, greedy=1, generate=8, haystacks=1, depths=(0.25, 0.75), lists=5, questions=2
)


@dataclass(frozen=True)
class Window:
    """A text window: its prefix is restored, its suffix scored."""

    text: str
    tokens: tuple[int, ...]
    prefix: int
    top: int
    generate: int = 1


@dataclass(frozen=True)
class Prompts:
    """Everything that is asked."""

    size: Size
    vocabulary: int
    windows: tuple[Window, ...]
    recalls: tuple[Recall, ...]

    def fingerprint(self) -> str:
        """A digest of everything asked; answers to other prompts are not resumed."""
        everything = json.dumps(asdict(self)).encode()
        return hashlib.sha256(everything).hexdigest()[:16]


def build(tokenizer: Tokenizer, vocabulary: int, size: Size, texts: Sequence[str]) -> Prompts:
    """The prompts of ``texts`` under ``tokenizer``.

    The first window of each text asks for whole distributions.
    """
    made: list[Window] = []
    haystacks: list[list[int]] = []
    for name in texts:
        tokens = tokens_of(name, tokenizer)
        # Windows from the first two thirds, haystacks from the rest.
        cut = 2 * len(tokens) // 3
        for index, window in enumerate(
            windows(tokens[:cut], size.windows, size.prefix + size.suffix)
        ):
            top = vocabulary if index == 0 else size.top
            generate = size.generate if 0 < index <= size.greedy else 1
            made.append(Window(name, tuple(window), size.prefix, top, generate))
        # A haystack for each needle: two that began alike would share what L1 still holds.
        haystacks += windows(tokens[cut:], size.haystacks * len(size.depths), size.haystack)
    asked = needles(tokenizer, haystacks, size.depths)
    asked += key_values(tokenizer, size.lists, size.pairs, size.questions)
    return Prompts(size, vocabulary, tuple(made), tuple(asked))
