"""How far one distribution lies from another, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.quality.scoring import Scored

#: A remainder is 1 minus a sum of float32 probabilities; below this it is their rounding.
SMALLEST_REMAINDER = 1e-7


def divergence(reference: Scored, other: Scored, vocabulary: int) -> NDArray[np.float64]:
    """KL(reference || other) in nats at each position.

    The tokens that both servers listed count one by one, all others as one lump. Lumping can only
    lower a KL (log-sum inequality); with the whole vocabulary listed nothing is lumped. How much
    the lump hides is measured in each run, on whole distributions.
    """
    result = np.empty(len(reference.top_values))
    listed = np.full(vocabulary, np.nan)
    for position in range(len(result)):
        listed[:] = np.nan
        listed[other.top_tokens[position]] = other.top_values[position]
        q = listed[reference.top_tokens[position]]
        both = ~np.isnan(q)
        p, q = reference.top_values[position][both].astype(np.float64), q[both]
        rest_p = max(1 - np.exp(p).sum(), SMALLEST_REMAINDER)
        rest_q = max(1 - np.exp(q).sum(), SMALLEST_REMAINDER)
        result[position] = (np.exp(p) * (p - q)).sum() + rest_p * np.log(rest_p / rest_q)
    return result


def first_tokens(scored: Scored, top: int) -> Scored:
    """``scored`` with only the ``top`` best tokens of each position listed."""
    return Scored(
        scored.logprobs,
        scored.top_values[:, :top],
        scored.top_tokens[:, :top],
        scored.output,
        scored.device,
        scored.host,
    )


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens before the first difference."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def identical(reference: Scored, other: Scored) -> bool:
    """Whether two answers are equal bit by bit: every log-probability and every token."""
    return (
        np.array_equal(reference.logprobs, other.logprobs)
        and np.array_equal(reference.top_values, other.top_values)
        and np.array_equal(reference.top_tokens, other.top_tokens)
        and reference.output == other.output
    )
