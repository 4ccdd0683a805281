"""Medians, quartiles and paired ratios with bootstrap intervals, by torch alone: not every machine has NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_RESAMPLES = 4000
_TAIL = 0.025


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


def turn_medians(turns: Sequence[Sequence[float]]) -> Tensor:
    """One number a turn: the median of its calls."""
    return torch.stack([_quantiles(torch.tensor(turn, dtype=torch.float64), 0.5)[0] for turn in turns])


def spread(turns: Sequence[Sequence[float]]) -> Spread:
    """Median and quartiles over the turns."""
    lower, median, upper = _quantiles(turn_medians(turns), 0.25, 0.5, 0.75).tolist()
    return Spread(median, lower, upper)


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
    generator = torch.Generator().manual_seed(0)
    rounds = torch.randint(len(ratios), (_RESAMPLES, len(ratios)), generator=generator)
    low, high = _quantiles(_quantiles(ratios[rounds], 0.5)[0], _TAIL, 1 - _TAIL).tolist()
    return Ratio(float(_quantiles(ratios, 0.5)[0]), low, high)


def _quantiles(values: Tensor, *shares: float) -> Tensor:
    """Of the last dimension, with linear interpolation, ``[len(shares), ...]``."""
    return torch.quantile(values, torch.tensor(shares, dtype=values.dtype), dim=-1)
