"""Loss-weighted sampling: the running losses, what is drawn from them, who is due, and losses of several processes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from dsaccel.data import DynamicSampler, LossHistory

pytestmark = pytest.mark.usefixtures("one_thread")


def averaged(size: int, momentum: float, losses: list[tuple[int, float]]) -> Tensor:
    """Running losses, one step after the other."""
    running = [math.nan] * size
    for sample, loss in losses:
        before = running[sample]
        running[sample] = loss if math.isnan(before) else momentum * before + (1 - momentum) * loss
    return torch.tensor(running)


def run_epoch(sampler: DynamicSampler, losses: Tensor) -> list[int]:
    """One epoch in batches of 4 in which samples have these losses."""
    seen = []
    batch: list[int] = []
    for sample in sampler:
        batch.append(sample)
        if len(batch) == 4:
            sampler.update(batch, losses[batch])
            seen += batch
            batch = []
    if batch:
        sampler.update(batch, losses[batch])
    return seen + batch


def known(losses: list[float], **options: Any) -> DynamicSampler:
    """A sampler that has a loss of every sample."""
    sampler = DynamicSampler(len(losses), **{"max_staleness": None, "eps": 0.0, **options})
    sampler.update(list(range(len(losses))), losses)
    return sampler


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_running_losses(momentum: float) -> None:
    generator = torch.Generator().manual_seed(2)
    history = LossHistory(6, momentum)
    all_losses: list[tuple[int, float]] = []
    for epoch in range(3):
        for _ in range(4):
            # Some more than once a batch, and number 5 never.
            ids = torch.randint(5, (7,), generator=generator)
            losses = torch.rand(7, generator=generator) * 10
            history.add(ids, losses)
            all_losses += zip(ids.tolist(), losses.tolist(), strict=True)
        history.fold(epoch)
        torch.testing.assert_close(history.losses, averaged(6, momentum, all_losses), equal_nan=True)
    one_by_one = LossHistory(6, momentum)
    for sample, loss in all_losses:
        one_by_one.add(torch.tensor([sample]), torch.tensor([loss]))
        one_by_one.fold(0)
    torch.testing.assert_close(history.losses, one_by_one.losses, rtol=0, atol=0, equal_nan=True)
    assert history.losses[5].isnan()
    assert history.last_seen.tolist() == [2, 2, 2, 2, 2, -1]


def test_losses_wait_for_the_fold() -> None:
    history = LossHistory(2, 0.0)
    history.add(torch.tensor([1]), torch.tensor([3.0]))
    before = history.losses
    assert before.isnan().all()
    history.fold(7)
    assert history.losses[1] == 3.0
    # Tensors are replaced: a state that was taken before still has its own.
    assert before.isnan().all()
    history.fold(8)
    assert history.last_seen.tolist() == [-1, 7]


def test_losses_that_are_not_finite() -> None:
    sampler = DynamicSampler(4, momentum=0.0)
    list(sampler)
    sampler.set_epoch(5)
    next(iter(sampler))
    sampler.update([0, 1, 2, 3, 3], torch.tensor([math.nan, math.inf, 1e300, 2.0, -math.inf], dtype=torch.float64))
    sampler.set_epoch(6)
    torch.testing.assert_close(
        sampler.history.losses, torch.tensor([math.nan, math.nan, math.nan, 2.0]), equal_nan=True
    )
    assert sampler.history.ignored == 4
    assert sampler.history.last_seen.tolist() == [5, 5, 5, 5]
    assert sampler.weights().isfinite().all()


def test_weights() -> None:
    assert DynamicSampler(3).weights().tolist() == [1 + 1e-6] * 3
    sampler = DynamicSampler(4, momentum=0.5, eps=0.25, base_weights=torch.tensor([1.0, 2.0, 0.0, 3.0]))
    sampler.update([0, 1, 0], [1.0, 4.0, 2.0])
    # 1.5, 4, and of the new ones the largest.
    assert sampler.weights().tolist() == [1.75, 8.5, 0.0, 12.75]
    assert sampler.weights().dtype == torch.float64


def test_losses_count_from_the_next_epoch_on() -> None:
    sampler = DynamicSampler(6, num_samples=200, max_staleness=None)
    order = sampler.order().tolist()
    iterator = iter(sampler)
    seen = [next(iterator) for _ in range(50)]
    sampler.update(list(range(6)), [0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
    assert seen + list(iterator) == order
    assert set(order) == set(range(6))
    assert set(sampler.order().tolist()) == {5}
    list(sampler)
    # Between two epochs they count at once.
    sampler.update([5], [0.0])
    sampler.update([2], [1e9])
    assert set(sampler.order().tolist()) == {2}


@pytest.mark.parametrize("base", [None, [1.0, 0.0, 2.0, 1.0]])
def test_frequencies(base: list[float] | None) -> None:
    base_weights = None if base is None else torch.tensor(base)
    losses = torch.tensor([1.0, 2.0, 3.0, 0.0])
    sampler = known(losses.tolist(), num_samples=20_000, base_weights=base_weights)
    counts = sampler.order().bincount(minlength=4)
    weights = losses if base_weights is None else losses * base_weights
    is_drawn = weights > 0
    assert not counts[~is_drawn].any()
    expected = (weights / weights.sum() * 20_000)[is_drawn]
    statistic = ((counts[is_drawn] - expected) ** 2 / expected).sum()
    # The 99th percentile of chi-square with 2 degrees of freedom, so with 1 too.
    assert statistic < 9.21


def test_high_losses_come_early_without_replacement() -> None:
    sampler = known([0.01] * 50 + [10.0] * 50, replacement=False)
    order = sampler.order().tolist()
    assert sorted(order) == list(range(100))
    assert sum(sample >= 50 for sample in order[:50]) > 45


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("size", "num_samples", "max_staleness"), [(30, 10, 3), (30, 7, 6), (12, 12, 1)])
def test_no_sample_starves(size: int, num_samples: int, max_staleness: int, replacement: bool) -> None:
    losses = torch.full((size,), 1e-9)
    losses[: size // 4] = 1e6

    def longest_absence(max_staleness: int | None) -> int:
        base_weights = torch.ones(size)
        base_weights[-1] = 0.0
        sampler = DynamicSampler(
            size,
            num_samples=num_samples,
            max_staleness=max_staleness,
            replacement=replacement and num_samples < size,
            base_weights=base_weights,
        )
        last = dict.fromkeys(range(size - 1), -1)
        longest = 0
        for epoch in range(40):
            for sample in set(run_epoch(sampler, losses)):
                longest = max(longest, epoch - last[sample] - 1)
                last[sample] = epoch
        assert sampler.epoch == 40
        return max(longest, *(40 - epoch - 1 for epoch in last.values()))

    if num_samples == size:
        num_samples -= 1
    bound = max_staleness + math.ceil(size / num_samples) - 1
    assert longest_absence(max_staleness) <= bound
    if num_samples < size // 2:
        assert longest_absence(None) > bound


def test_the_longest_unseen_come_first() -> None:
    for seed in range(5):
        sampler = DynamicSampler(6, num_samples=2, max_staleness=3, seed=seed)
        for epoch, ids in enumerate([[4, 5], [2, 3], [0, 1]]):
            sampler.set_epoch(epoch)
            next(iter(sampler))
            sampler.update(ids, [1.0, 1.0])
        sampler.set_epoch(6)
        assert sorted(sampler.order().tolist()) == [4, 5]


def test_when_a_sample_is_due() -> None:
    sampler = DynamicSampler(3, num_samples=20, max_staleness=3, eps=0.0)
    sampler.set_epoch(1)
    next(iter(sampler))
    sampler.update([0, 1, 2], [0.0, 1.0, 1.0])
    # Sample 0 is in none of the epochs 2, 3 and 4.
    drawn = []
    for epoch in range(2, 7):
        sampler.set_epoch(epoch)
        drawn.append(int((sampler.order() == 0).sum()))
    assert drawn == [0, 0, 0, 1, 1]


def test_due_samples_have_places_at_random() -> None:
    sampler = known([1e9] + [0.0] * 9, num_samples=200, max_staleness=1)
    sampler.set_epoch(3)
    # All are due: ten places, the other ones drawn.
    order = sampler.order()
    assert order.bincount(minlength=10).tolist() == [191] + [1] * 9
    places = (order > 0).nonzero().flatten()
    assert places.min() < 60
    assert places.max() > 140


def test_importance_weights() -> None:
    losses = [1.0, 2.0, 3.0, 0.0, 4.0]
    sampler = known(losses, num_samples=3)
    probabilities = torch.tensor(losses) / 10
    weights = sampler.importance_weights(torch.arange(5))
    torch.testing.assert_close(weights, 1 / (5 * probabilities))
    assert weights[3] == math.inf
    assert sampler.importance_weights([]).shape == (0,)


def test_importance_weights_make_the_mean_loss() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0, 7.0])
    base_weights = torch.tensor([1.0, 1.0, 0.5, 2.0, 0.0, 1.0])
    sampler = DynamicSampler(6, num_samples=4, max_staleness=2, base_weights=base_weights, seed=5)
    expected = losses[base_weights > 0].mean()
    means = []
    for epoch in range(1500):
        sampler.set_epoch(epoch)
        ids = sampler.order()
        means.append((sampler.importance_weights(ids) * losses[ids]).mean())
        next(iter(sampler))
        sampler.update(ids, losses[ids])
    means = torch.stack(means).double()
    # Four standard errors.
    assert abs(means.mean() - expected) < 4 * means.std() / len(means) ** 0.5
    assert abs(losses[sampler.order()].mean() - expected) > 0.1


def test_more_than_2_to_24_samples() -> None:
    size = 2**24 + 1
    sampler = DynamicSampler(size, num_samples=1000, max_staleness=None)
    first = torch.tensor(list(sampler))
    assert first.max() > size * 0.9
    sampler.update([size - 1], [1e30])
    sampler.update(first[:-1], torch.zeros(999))
    sampler.update([size - 1], [1e30])
    # New samples count as much as that one.
    weights = sampler.weights()
    assert weights[:2].tolist() == [weights.max()] * 2
    assert sampler.order().max() < size


@pytest.mark.parametrize("replacement", [True, False])
def test_no_weight_is_left(replacement: bool) -> None:
    sampler = known([0.0, 0.0, 0.0], replacement=replacement)
    with pytest.raises(ValueError, match="weights: expected at least one above 0, got 3 times 0"):
        list(sampler)
    assert sorted(known([0.0, 0.0, 0.0], replacement=False, eps=1e-6)) == [0, 1, 2]


def test_too_few_weights_are_left() -> None:
    sampler = known([0.0, 1.0, 1.0], replacement=False)
    with pytest.raises(ValueError, match=r"count: expected at most 2, .* without replacement, got 3"):
        list(sampler)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "size: expected at least 1, got 0"),
        ({"num_samples": 0}, ValueError, "num_samples: expected at least 1, got 0"),
        ({"num_samples": 5, "replacement": False}, ValueError, "num_samples: expected at most 4 without replacement"),
        ({"momentum": 1.0}, ValueError, "momentum: expected from 0 to below 1, got 1.0"),
        ({"momentum": "last"}, TypeError, "momentum: expected a number, got 'last'"),
        ({"eps": -1e-9}, ValueError, "eps: expected a finite number that is not negative, got -1e-09"),
        ({"eps": math.inf}, ValueError, "eps: expected a finite number"),
        ({"max_staleness": 0}, ValueError, "max_staleness: expected at least 1, got 0"),
        ({"max_staleness": 3, "num_samples": 1}, ValueError, "max_staleness: expected at least 4, .* or None, got 3"),
        ({"base_weights": [1.0] * 4}, TypeError, "base_weights: expected a tensor"),
        ({"base_weights": torch.ones(3)}, ValueError, r"base_weights: expected a tensor \[4\], got \[3\]"),
        ({"base_weights": torch.zeros(4)}, ValueError, "base_weights: expected at least one above 0, got 4 times 0"),
        ({"base_weights": torch.tensor([1, -1, 1, 1])}, ValueError, "base_weights: expected finite numbers of at lea"),
        ({"num_replicas": 5, "rank": 0, "drop_last": True}, ValueError, "drop_last: expected False for 4 items"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DynamicSampler(**{"size": 4, **arguments})


@pytest.mark.parametrize(
    ("ids", "losses", "error", "message"),
    [
        ([0, 4], [1.0, 1.0], ValueError, "ids: expected from 0 to 3, got 4"),
        ([-1], [1.0], ValueError, "ids: expected from 0 to 3, got -1"),
        ([0.0], [1.0], TypeError, "ids: expected integers, got a tensor"),
        ([0, 1], [1.0], ValueError, r"ids and losses: expected one loss for each id, .* got \[2\] and \[1\]"),
        ([[0]], [[1.0]], ValueError, r"ids and losses: .* got \[1, 1\] and \[1, 1\]"),
        ([0, 2], [1.0, -2.0], ValueError, "losses: expected none below 0, .* got -2.0 of sample 2"),
    ],
)
def test_update_errors(ids: Any, losses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DynamicSampler(4).update(ids, losses)


def test_importance_weights_errors() -> None:
    with pytest.raises(ValueError, match="replacement: expected True for importance weights, got False"):
        DynamicSampler(4, replacement=False).importance_weights([0])
    with pytest.raises(ValueError, match=r"ids: expected \[k\] of numbers from 0 to 3, got \[2\]: \[0, 4\]"):
        DynamicSampler(4).importance_weights([0, 4])


def test_update_keeps_a_copy() -> None:
    sampler = DynamicSampler(2, momentum=0.0)
    next(iter(sampler))
    ids, losses = torch.tensor([0, 1]), torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    sampler.update(ids, losses)
    ids.fill_(1)
    losses.data.fill_(5.0)
    sampler.set_epoch(1)
    assert sampler.history.losses.tolist() == [1.0, 2.0]


@pytest.mark.gpu
def test_losses_on_a_gpu() -> None:
    sampler = DynamicSampler(3, momentum=0.0)
    sampler.update(torch.tensor([2, 0], device="cuda"), torch.tensor([1.0, 4.0], device="cuda", dtype=torch.bfloat16))
    assert sampler.history.losses[[0, 2]].tolist() == [4.0, 1.0]
    assert sampler.importance_weights(torch.tensor([2], device="cuda")).device.type == "cpu"


SIZE = 11


def loss_of(sample: int, place: int) -> float:
    return 0.1 + (sample * 7 + place * 3) % 13


def several_epochs(rank: int, **options: Any) -> tuple[list[list[int]], Tensor, Tensor]:
    sampler = DynamicSampler(SIZE, num_samples=25, momentum=0.5, max_staleness=3, pad=False, **options)
    epochs = []
    for _ in range(4):
        epochs.append(sampler.order().tolist())
        iterator = iter(sampler)
        for step in range(7):
            # The last step has a sample for one rank only.
            ids = list(itertools.islice(iterator, 2))
            sampler.update(ids, [loss_of(sample, 4 * step + 2 * i + rank) for i, sample in enumerate(ids)])
        # One rank was at the end before its last update, the other is now.
        assert next(iterator, None) is None
    return epochs, sampler.history.losses, sampler.history.last_seen


def wrong_updates(rank: int) -> str:
    sampler = DynamicSampler(SIZE)
    with pytest.raises(ValueError, match=r"ids: expected from 0 to 10, got 11") as error:
        sampler.update([rank + 10], [1.0])
    with pytest.raises(ValueError, match=r"group: expected num_replicas = 3 processes, .* got 2 processes"):
        DynamicSampler(SIZE, num_replicas=3, rank=rank).update([0], [1.0])
    # Not distributed: each has its own.
    alone = DynamicSampler(SIZE, num_replicas=1, rank=0, momentum=0.0)
    alone.update([0], [float(rank)])
    assert alone.history.losses[0] == rank
    return str(error.value)


def test_losses_of_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(several_epochs, 2)
    assert first[0] == second[0]
    for ours, theirs in zip(first[1:], second[1:], strict=True):
        assert ours.equal(theirs)
    # One process that sees the same samples, one after the other.
    sampler = DynamicSampler(SIZE, num_samples=25, momentum=0.5, max_staleness=3)
    for order in first[0]:
        assert sampler.order().tolist() == order
        for place, sample in enumerate(sampler):
            sampler.update([sample], [loss_of(sample, place)])
    assert sampler.history.losses.equal(first[1])
    assert sampler.history.last_seen.equal(first[2])


def test_an_error_of_one_rank_is_one_of_all(ranks: Ranks) -> None:
    assert len(set(ranks.run(wrong_updates, 2))) == 1


def test_slices_without_a_process_group_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match=r"group: expected num_replicas = 2 processes, .* got 1 processes"):
        DynamicSampler(4, num_replicas=2, rank=0).update([0], [1.0])
