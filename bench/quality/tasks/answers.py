"""What a model answered: the letter it finds most probable, the number that its text ends in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from bench.quality.scoring import Scored

_SAID = re.compile(r"answer is[^\d\-]*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?[\d,]*\.?\d+")


def letter(scored: Scored, tokens: Mapping[str, int]) -> str:
    """The most probable of the letters, whose token ids are ``tokens``.

    Raises ValueError where none of them is among the tokens that the server listed.
    """
    listed = scored.top_tokens[-1].tolist()
    ranks = {found: listed.index(token) for found, token in tokens.items() if token in listed}
    if not ranks:
        raise ValueError(
            f"none of {', '.join(tokens)} is among the {len(listed)} most probable tokens: list "
            "more of them."
        )
    return min(ranks, key=lambda found: ranks[found])


def number(text: str) -> Decimal | None:
    """The number that ``text`` says is the answer, else its last one; none where it has none."""
    said = _SAID.findall(text) or _NUMBER.findall(text)
    return Decimal(said[-1].replace(",", "")) if said else None


def is_right(text: str, answer: str) -> bool:
    """Whether ``text`` comes to the number ``answer``."""
    return number(text) == Decimal(answer.replace(",", ""))
