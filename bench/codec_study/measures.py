"""How far a model's answers moved, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Neighbouring positions move together; blocks of so many count as one observation.
BLOCK = 32


@dataclass(frozen=True)
class Moved:
    """Log-probabilities of one window against the exact ones, position by position.

    kl: KL(exact || other) in nats. agree: whether the most probable token is the same.
    loss: nats that the text's next token lost; one position fewer.
    """

    kl: torch.Tensor
    agree: torch.Tensor
    loss: torch.Tensor


def moved(exact: torch.Tensor, other: torch.Tensor, tokens: Sequence[int]) -> Moved:
    """Compare log-probabilities ``[positions, vocabulary]`` after each of ``tokens``."""
    following = torch.tensor(tokens[1:])[:, None]
    return Moved(
        (exact.exp() * (exact - other)).sum(-1),
        exact.argmax(-1) == other.argmax(-1),
        (exact[:-1].gather(1, following) - other[:-1].gather(1, following))[:, 0],
    )


def summary(windows: Sequence[Moved]) -> dict[str, float]:
    """Mean KL with its standard error over blocks of positions, agreement, perplexity ratio."""
    kl = torch.cat([window.kl for window in windows]).double()
    blocks = torch.cat([window.kl.unfold(0, BLOCK, BLOCK).mean(-1) for window in windows]).double()
    agree = torch.cat([window.agree for window in windows]).double()
    loss = torch.cat([window.loss for window in windows]).double()
    return {
        "kl": kl.mean().item(),
        "kl_standard_error": (blocks.std() / math.sqrt(len(blocks))).item(),
        "kl_median": kl.median().item(),
        "top1_percent": 100 * agree.mean().item(),
        "perplexity_ratio": math.exp(loss.mean().item()),
        "positions": len(kl),
    }
