"""Bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lab.bootstrap import bootstrap, bootstrap_pairs


def mean(values: np.ndarray) -> float:
    return float(values.mean())


def ratio(left: np.ndarray, right: np.ndarray) -> float:
    return float(left.mean() / right.mean())


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        groups = list(generator.normal(3.0, 1.0, size=(20, 10)))
        interval = bootstrap(groups, mean, resamples=300)
        covered += interval.low <= 3.0 <= interval.high
    assert covered >= 50


def test_groups_that_differ_widen_the_interval() -> None:
    """Rows of one group go together: a hundred copies of one value are one observation."""
    alike = [np.full(100, value) for value in (1.0, 2.0, 3.0, 4.0)]
    interval = bootstrap(alike, mean)
    assert interval.value == 2.5
    assert interval.high - interval.low > 1.5


def test_a_single_group_is_resampled_by_row() -> None:
    interval = bootstrap([np.array([1.0, 2.0, 3.0])], mean)
    assert interval.low < interval.value < interval.high


def test_the_same_data_give_the_same_interval() -> None:
    groups = [np.arange(5.0), np.arange(7.0)]
    assert bootstrap(groups, mean) == bootstrap(groups, mean)


def test_pairs_that_agree_give_a_narrow_ratio() -> None:
    generator = np.random.default_rng(1)
    pairs = [
        (base * 0.5 * generator.uniform(0.95, 1.05, 50), base * generator.uniform(0.95, 1.05, 50))
        for base in (1.0, 1.2, 0.8, 1.1)
    ]
    interval = bootstrap_pairs(pairs, ratio)
    assert 0.48 < interval.low < interval.value < interval.high < 0.52


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        bootstrap([], mean)
    with pytest.raises(ValueError, match="of both arms"):
        bootstrap_pairs([(np.array([1.0]), np.array([]))], ratio)
