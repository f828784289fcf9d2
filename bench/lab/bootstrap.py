"""Bootstrap intervals: percentile intervals from resampled groups, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Resamples behind an interval: the 2.5 % tail then rests on 50 of them.
RESAMPLES = 2000
SEED = 20250

Sample = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap(
    groups: Sequence[Sample],
    statistic: Callable[[Sample], float],
    resamples: int = RESAMPLES,
) -> Interval:
    """The 95 % percentile interval of ``statistic`` over all rows of ``groups``.

    Whole groups are drawn with replacement, since rows of one group (tokens of one text, requests
    of one run) are not independent; with a single group, its rows are drawn. Each group is
    ``[rows, ...]``. Raises ValueError where there is nothing to resample.
    """
    filled = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not filled:
        raise ValueError("no measurements to take an interval of")
    if len(filled) == 1:
        filled = [row[np.newaxis] for row in filled[0]]
    generator = np.random.default_rng(SEED)
    draws = generator.integers(0, len(filled), size=(resamples, len(filled)))

    @cache
    def of(chosen: tuple[int, ...]) -> float:
        return statistic(np.concatenate([filled[i] for i in chosen]))

    # Few groups make few different draws.
    estimates = [of(tuple(sorted(draw))) for draw in draws.tolist()]
    low, high = np.percentile(estimates, (2.5, 97.5))
    return Interval(float(statistic(np.concatenate(filled))), float(low), float(high))


def bootstrap_pairs(
    pairs: Sequence[tuple[Sample, Sample]],
    statistic: Callable[[Sample, Sample], float],
    resamples: int = RESAMPLES,
    turn: int = 1,
) -> Interval:
    """The 95 % percentile interval of ``statistic(treatment, control)`` over paired runs.

    Each pair holds the measurements of one treatment run and of its control run, row by row of the
    same requests. Pairs are drawn with replacement, then turns of ``turn`` requests within each
    pair, the same ones for both runs, so that the spread between runs and within them is in the
    interval, and the spread between prompts is not. Raises ValueError where rows are missing.
    """
    if not pairs or any(len(a) != len(b) or not len(a) for a, b in pairs):
        raise ValueError("every pair needs the same requests of both arms")
    generator = np.random.default_rng(SEED)
    estimates = []
    for _ in range(resamples):
        left, right = [], []
        for index in generator.integers(0, len(pairs), size=len(pairs)):
            firsts = np.arange(0, len(pairs[index][0]), turn)
            drawn = firsts[generator.integers(0, len(firsts), size=len(firsts))]
            rows = (drawn[:, np.newaxis] + np.arange(turn)).ravel()
            rows = rows[rows < len(pairs[index][0])]
            left.append(pairs[index][0][rows])
            right.append(pairs[index][1][rows])
        estimates.append(statistic(np.concatenate(left), np.concatenate(right)))
    low, high = np.percentile(estimates, (2.5, 97.5))
    whole = statistic(
        np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs])
    )
    return Interval(float(whole), float(low), float(high))
