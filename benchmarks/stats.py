"""Medians, quartiles and paired ratios with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_RESAMPLES = 4000
_CONFIDENCE = 95.0


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    lower: float
    upper: float


class Ratio(NamedTuple):
    """A ratio and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Ratio:
        """The ratio in another unit."""
        return Ratio(*(factor * part for part in self))


def turn_medians(turns: Sequence[Sequence[float]]) -> np.ndarray:
    """One number a turn: the median of its calls."""
    return np.array([np.median(turn) for turn in turns])


def spread(turns: Sequence[Sequence[float]]) -> Spread:
    """Median and quartiles over the turns."""
    lower, median, upper = np.percentile(turn_medians(turns), (25, 50, 75))
    return Spread(float(median), float(lower), float(upper))


def paired_ratio(numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]]) -> Ratio:
    """The median over the rounds of the ratio within a round, with a bootstrap interval.

    Both sides of a pair were timed next to each other, so that a slow minute of the machine cancels. Rounds are drawn
    with replacement; the same samples give the same interval. Percentile method of Efron and Tibshirani, "An
    Introduction to the Bootstrap", 1993, chapter 13.

    Raises:
        ValueError: the sides do not have the same number of turns, or none.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(f"turns: expected as many on both sides, got {len(numerator)} and {len(denominator)}")
    ratios = turn_medians(numerator) / turn_medians(denominator)
    rounds = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    tail = (100.0 - _CONFIDENCE) / 2
    low, high = np.percentile(np.median(ratios[rounds], axis=1), (tail, 100.0 - tail))
    return Ratio(float(np.median(ratios)), float(low), float(high))
