"""Batches of similar length: each sample once, no batch too large, as many for each rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dsaccel.data import LengthGroupedBatchSampler
from dsaccel.data.lengths import halved

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = torch.randint(1, 200, (500,), generator=torch.Generator().manual_seed(0))
EVERY = list(range(500))


def all_ids(batches: list[list[int]]) -> list[int]:
    return sorted(itertools.chain(*batches))


def padding_of(batches: list[list[int]]) -> float:
    tokens = sum(int(LENGTHS[batch].sum()) for batch in batches)
    return 1 - tokens / sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)


def test_batch_size() -> None:
    sampler = LengthGroupedBatchSampler(LENGTHS, batch_size=16, pool=160)
    share = sampler.padding_share()
    first, second = list(sampler), list(sampler)
    assert all_ids(first) == all_ids(second) == EVERY
    # Three pools of 160, and 20 samples.
    assert sorted(map(len, first)) == [4] + [16] * 31
    assert share == pytest.approx(padding_of(first), abs=1e-12)
    assert {frozenset(batch) for batch in first}.isdisjoint(frozenset(batch) for batch in second)
    shuffled = [batch.tolist() for batch in torch.randperm(500, generator=torch.Generator().manual_seed(0)).split(16)]
    assert share < 0.12 < 0.4 < padding_of(shuffled)
    # Long and short batches take turns.
    longest = torch.tensor([float(LENGTHS[batch].max()) for batch in first])
    assert not longest.sort().values.equal(longest)
    assert torch.corrcoef(torch.stack([longest[1:], longest[:-1]]))[0, 1].abs() < 0.5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_tokens", [199, 1000])
def test_max_tokens(max_tokens: int, padded: bool) -> None:
    sampler = LengthGroupedBatchSampler(LENGTHS, max_tokens=max_tokens, padded=padded)
    batches = list(sampler)
    assert all_ids(batches) == EVERY

    def tokens(batch: list[int]) -> int:
        lengths = LENGTHS[batch]
        return len(batch) * int(lengths.max()) if padded else int(lengths.sum())

    assert max(map(tokens, batches)) <= max_tokens
    if max_tokens == 1000:
        # With 100 a sample, little is left.
        assert sum(map(tokens, batches)) / len(batches) > 850


def test_one_batch_and_one_sample() -> None:
    assert all_ids(list(LengthGroupedBatchSampler(LENGTHS, batch_size=1000))) == EVERY
    assert list(LengthGroupedBatchSampler(torch.tensor([7]), max_tokens=7)) == [[0]]
    assert LengthGroupedBatchSampler(torch.tensor([7, 7]), batch_size=2).padding_share() == 0.0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [{"batch_size": 16}, {"max_tokens": 900}, {"batch_size": 500}])
def test_ranks_have_equal_numbers_of_batches(limit: dict[str, int], world: int) -> None:
    slices = [list(LengthGroupedBatchSampler(LENGTHS, num_replicas=world, rank=rank, **limit)) for rank in range(world)]
    assert len({len(each) for each in slices}) == 1
    assert all_ids(list(itertools.chain(*slices))) == EVERY


def test_single_samples_cannot_be_halved() -> None:
    lengths = torch.full((5,), 10)
    slices = [list(LengthGroupedBatchSampler(lengths, max_tokens=10, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert [len(each) for each in slices] == [3, 3]
    assert set(all_ids(slices[0] + slices[1])) == set(range(5))
    uneven = [
        list(LengthGroupedBatchSampler(lengths, max_tokens=10, num_replicas=2, rank=rank, pad=False)) for rank in (0, 1)
    ]
    assert all_ids(uneven[0] + uneven[1]) == list(range(5))


def test_the_largest_batches_are_halved() -> None:
    batches = list(torch.arange(10).split([2, 5, 3]))
    assert [batch.tolist() for batch in halved(batches, 5)] == [[0, 1], [2, 3], [7, 8, 9], [5, 6], [4]]
    sizes = [sorted(len(batch) for batch in halved(batches, multiple)) for multiple in (1, 3, 4, 5, 7, 10)]
    assert sizes == [[2, 3, 5], [2, 3, 5], [2, 2, 3, 3], [1, 2, 2, 2, 3], [1, 1, 1, 1, 2, 2, 2], [1] * 10]
    assert sorted(torch.cat(halved(batches, 7)).tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengths": [1, 2]}, TypeError, r"lengths: expected a tensor, got \[1, 2\]"),
        ({"lengths": torch.tensor([3, 0])}, ValueError, "lengths: expected finite numbers of at least 1, got 0 at 1"),
        ({"lengths": torch.tensor([3.0])}, TypeError, r"lengths: expected integers, got a tensor of shape \[1\]"),
        ({"batch_size": None}, ValueError, r"batch_size and max_tokens: expected one of them, got \(None, None\)"),
        ({"max_tokens": 500}, ValueError, r"batch_size and max_tokens: expected one of them, got \(4, 500\)"),
        ({"batch_size": 0}, ValueError, "batch_size: expected at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size: expected an int, got 2.5"),
        ({"batch_size": None, "max_tokens": 198}, ValueError, "max_tokens: expected at least 199, .* got 198"),
        ({"pool": 0}, ValueError, "pool: expected at least 1, got 0"),
        ({"num_replicas": 501, "rank": 0, "drop_last": True}, ValueError, "drop_last: expected False for 500 items"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LengthGroupedBatchSampler(**{"lengths": LENGTHS, "batch_size": 4, **arguments})


def test_states_of_other_lengths() -> None:
    state = LengthGroupedBatchSampler(LENGTHS, batch_size=4).state_dict()
    with pytest.raises(ValueError, match="state_dict: expected lengths = "):
        LengthGroupedBatchSampler(LENGTHS.flip(0), batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict: expected batch_size = 8, as this sampler has, got 4"):
        LengthGroupedBatchSampler(LENGTHS, batch_size=8).load_state_dict(state)


@pytest.mark.parametrize("options", [{}, {"pad": False}, {"drop_last": True}], ids=str)
def test_a_state_after_the_last_batch_is_that_of_the_next_epoch(options: dict[str, Any]) -> None:
    # Of 7 single samples, which cannot be halved, over 3 ranks.
    lengths = torch.arange(1, 8)
    samplers = [
        LengthGroupedBatchSampler(lengths, batch_size=1, num_replicas=3, rank=rank, **options) for rank in range(3)
    ]
    steps = []
    for sampler in samplers:
        steps.append([sampler.state_dict() for _ in sampler])
        assert sampler.state_dict()["epoch"] == 1
    last = steps[0][-1]
    assert (last["epoch"], last["position"]) == (1, 0)
    assert [(state["epoch"], state["position"]) for state in steps[0][:-1]] == [(0, 3), (0, 6)][: len(steps[0]) - 1]
    resumed = LengthGroupedBatchSampler(lengths, batch_size=1)
    resumed.load_state_dict(last)
    assert all_ids(list(resumed)) == list(range(7))
    assert resumed.epoch == 2
