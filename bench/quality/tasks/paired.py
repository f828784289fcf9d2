"""Two arms on the same items: which answers changed, and whether that can be chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest


@dataclass(frozen=True)
class Paired:
    """``lost``: items that the reference had right and the other wrong; ``gained``: the reverse.

    p: of McNemar's exact test, two-sided: how often chance alone splits the changed items at least
    as unevenly, if a change is as likely to either side.
    """

    lost: int
    gained: int
    p: float


def mcnemar(reference: Sequence[bool], other: Sequence[bool]) -> Paired:
    """Compare right answers item by item. Raises ValueError for lists of different lengths."""
    pairs = list(zip(reference, other, strict=True))
    lost = sum(was and not now for was, now in pairs)
    gained = sum(now and not was for was, now in pairs)
    changed = lost + gained
    return Paired(lost, gained, float(binomtest(lost, changed).pvalue) if changed else 1.0)
