"""Weighted draws: their frequencies, the edges of float numbers, and more weights than torch.multinomial takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsaccel.data import draw
from dsaccel.data.draws import invert

pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How likely counts at least as far from the expected ones are."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic.double() / 2))


def test_frequencies_with_replacement() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 0.5, 0.0])
    ids = draw(weights, 100_000, seeded(), replacement=True)
    counts = ids.bincount(minlength=7)
    assert not counts[weights == 0].any()
    is_drawn = weights > 0
    assert chi_square(counts[is_drawn], weights[is_drawn] / weights.sum()) > 0.01
    # The test can tell: the weights' square roots are other probabilities.
    assert chi_square(counts[is_drawn], weights[is_drawn].sqrt() / weights.sqrt().sum()) < 1e-6


def test_frequencies_without_replacement() -> None:
    weights = torch.tensor([3.0, 0.0, 1.0, 2.0])
    generator = seeded(1)
    pairs = torch.stack([draw(weights, 2, generator, replacement=False) for _ in range(6000)])
    assert (pairs[:, 0] != pairs[:, 1]).all()
    # P(i, then j) = w_i / W * w_j / (W - w_i)
    keys = [(i, j) for i in (0, 2, 3) for j in (0, 2, 3) if i != j]
    w = weights.tolist()
    probabilities = torch.tensor([w[i] / 6 * w[j] / (6 - w[i]) for i, j in keys])
    counts = torch.tensor([int(((pairs[:, 0] == i) & (pairs[:, 1] == j)).sum()) for i, j in keys])
    assert counts.sum() == 6000
    assert chi_square(counts, probabilities) > 0.01


def test_all_without_replacement_is_a_permutation() -> None:
    weights = torch.rand(1000, generator=seeded()) + 0.1
    weights[::7] = 0.0
    count = int((weights > 0).sum())
    ids = draw(weights, count, seeded(), replacement=False)
    assert ids.sort().values.equal(weights.nonzero().flatten())


def test_the_ends_of_the_cumulative_sum() -> None:
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    ends = torch.tensor([0.0, 0.25, math.nextafter(0.25, 0.0), math.nextafter(1.0, 0.0), 1.0], dtype=torch.float64)
    assert invert(weights.cumsum(0), ends).tolist() == [2, 4, 2, 4, 4]
    # A weight that the sum loses to rounding: what is above 0 and last is never passed.
    tiny = torch.tensor([1.0, 1e-300, 0.0], dtype=torch.float64)
    assert invert(tiny.cumsum(0), ends).tolist() == [0] * 5


def test_small_weights_after_a_large_one() -> None:
    # In float32 the sum would grow in steps of 8 from 2^26 on: of the ones, seven in eight could not be drawn.
    weights = torch.ones(2**20)
    weights[0] = 2.0**26
    ids = draw(weights, 128_000, seeded(), replacement=True)
    counts = (ids[ids > 0] % 8).bincount(minlength=8)
    assert 1800 < counts.sum() < 2200
    assert chi_square(counts, torch.full((8,), 1 / 8)) > 0.01


@pytest.mark.parametrize("replacement", [True, False])
def test_extreme_weights(replacement: bool) -> None:
    weights = torch.tensor([5e-324, 0.0, 1e300, 5e-324], dtype=torch.float64)
    assert draw(weights, 1, seeded(), replacement=replacement).tolist() == [2]
    if not replacement:
        assert sorted(draw(weights, 3, seeded(), replacement=False).tolist()) == [0, 2, 3]


@pytest.mark.parametrize("replacement", [True, False])
def test_more_than_2_to_24_weights(replacement: bool) -> None:
    # torch.multinomial takes 2^24; float32 sums of as many ones stop growing there.
    size = 2**24 + 1
    weights = torch.zeros(size)
    weights[-3:] = torch.tensor([1.0, 0.0, 2.0])
    weights[0] = 1.0
    with pytest.raises(RuntimeError, match="2\\^24"):
        torch.multinomial(weights, 1)
    ids = draw(weights, 3 if not replacement else 1000, seeded(), replacement=replacement)
    assert sorted(set(ids.tolist())) == [0, size - 3, size - 1]
    if replacement:
        counts = torch.stack([(ids == i).sum() for i in (0, size - 3, size - 1)])
        assert chi_square(counts, torch.tensor([0.25, 0.25, 0.5])) > 0.01
        even = draw(weights.fill_(1.0), 4000, seeded(), replacement=True)
        # All of them can be drawn, each eighth as often as the others.
        assert chi_square((even * 8 // size).bincount(minlength=8), torch.full((8,), 1 / 8)) > 0.01


def test_the_order_is_pinned() -> None:
    """On every machine and with every torch: a change here breaks the resumption of trainings under way."""
    weights = torch.arange(8.0)
    assert draw(weights, 8, seeded(), replacement=True).tolist() == [7, 6, 5, 7, 6, 7, 3, 4]
    assert draw(weights, 7, seeded(), replacement=False).tolist() == [7, 3, 5, 6, 2, 4, 1]


def test_a_sum_that_overflows_is_refused() -> None:
    weights = torch.full((3,), 1e308, dtype=torch.float64)
    with pytest.raises(ValueError, match="weights: expected a finite sum, got inf"):
        draw(weights, 2, seeded(), replacement=True)
    assert sorted(draw(weights, 3, seeded(), replacement=False).tolist()) == [0, 1, 2]


def test_no_draws() -> None:
    for replacement in (True, False):
        assert draw(torch.ones(3), 0, seeded(), replacement=replacement).shape == (0,)


@pytest.mark.parametrize(
    ("weights", "count", "error", "message"),
    [
        ([1.0], 1, TypeError, r"weights: expected a tensor, got \[1.0\] \(list\)"),
        (torch.ones(2, 2), 1, ValueError, r"weights: expected a tensor \[n\] with n at least 1, got \[2, 2\]"),
        (torch.ones(0), 1, ValueError, r"weights: expected a tensor \[n\] with n at least 1, got \[0\]"),
        (torch.tensor([1.0, math.nan]), 1, ValueError, "weights: expected finite numbers of at least 0, got nan at 1"),
        (torch.tensor([math.inf]), 1, ValueError, "weights: expected finite numbers of at least 0, got inf at 0"),
        (torch.tensor([2.0, -1.0]), 1, ValueError, "weights: expected finite numbers of at least 0, got -1.0 at 1"),
        (torch.zeros(4), 1, ValueError, "weights: expected at least one above 0, got 4 times 0"),
        (torch.ones(4), 1.0, TypeError, "count: expected an int, got 1.0"),
        (torch.ones(4), -1, ValueError, "count: expected at least 0, got -1"),
        (torch.tensor([1.0, 0.0]), 2, ValueError, "count: expected at most 1, .* without replacement, got 2"),
    ],
)
def test_errors(weights: Tensor, count: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(weights, count, seeded(), replacement=False)
