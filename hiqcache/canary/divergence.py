"""How far one answer's distributions lie from another's."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: A remainder is 1 less a sum of float32 probabilities; below this it is their rounding.
SMALLEST_REMAINDER = 1e-7

#: The most probable tokens at one position: log-probability (natural logarithm) by token id.
Listed = Mapping[int, float]


def lumped_kl(reference: Listed, other: Listed) -> float:
    """KL(reference || other) at one position, in nats: 0 for equal lists, else a lower bound.

    The tokens that ``reference`` lists count one by one, all others as one outcome: lumping
    outcomes can only lower a KL (log-sum inequality). bench.quality measures on whole distributions
    how much. ``other`` must list every token of the reference (KeyError): lumping those that it
    does not list would call two answers that share no token alike.
    """
    both = [(p, other[token]) for token, p in reference.items()]
    p_rest = max(1 - math.fsum(math.exp(p) for p, _ in both), SMALLEST_REMAINDER)
    q_rest = max(1 - math.fsum(math.exp(q) for _, q in both), SMALLEST_REMAINDER)
    listed = math.fsum(math.exp(p) * (p - q) for p, q in both)
    return listed + p_rest * math.log(p_rest / q_rest)


def best(listed: Listed) -> int:
    """The most probable token."""
    return max(listed, key=lambda token: listed[token])
