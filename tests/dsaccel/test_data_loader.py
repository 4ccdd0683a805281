"""The loader's state is that of the batches handed out, with workers that fetch ahead and without."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsaccel.data import (
    CurriculumSampler,
    DynamicSampler,
    LengthGroupedBatchSampler,
    ResumableLoader,
    ShuffledSampler,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = torch.tensor([5, 1, 9, 3, 3, 7, 2, 8, 6, 4, 4, 1, 10])
SIZE = len(LENGTHS)


class Numbers(Dataset[int]):
    """Samples that are their own ids."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def shuffled(num_workers: int = 0, **options: Any) -> ResumableLoader:
    return ResumableLoader(Numbers(), 3, sampler=ShuffledSampler(SIZE), num_workers=num_workers, **options)


def dynamic(num_workers: int = 0) -> ResumableLoader:
    return ResumableLoader(Numbers(), 4, sampler=DynamicSampler(SIZE), num_workers=num_workers, drop_last=True)


def curriculum(num_workers: int = 0) -> ResumableLoader:
    sampler = CurriculumSampler(LENGTHS, epochs=3, easy_share=0.7)
    return ResumableLoader(Numbers(), 2, sampler=sampler, num_workers=num_workers)


def lengths(num_workers: int = 0) -> ResumableLoader:
    sampler = LengthGroupedBatchSampler(LENGTHS, max_tokens=12)
    return ResumableLoader(Numbers(), batch_sampler=sampler, num_workers=num_workers)


Make = Callable[..., ResumableLoader]
makes = pytest.mark.parametrize("make", [shuffled, dynamic, curriculum, lengths])


def train(loader: ResumableLoader, steps: int | None = None) -> list[list[int]]:
    """The batches of so many steps, or up to the end of epoch 2."""
    seen: list[list[int]] = []
    for epoch in range(loader.sampler.epoch, 3):
        loader.sampler.set_epoch(epoch)
        for ids in loader:
            if isinstance(loader.sampler, DynamicSampler):
                loader.sampler.update(ids, 0.1 + (ids * 37 % 11) * (1.0 + epoch))
            seen.append(ids.tolist())
            if len(seen) == steps:
                return seen
    return seen


def moved(loader: ResumableLoader, other: ResumableLoader) -> ResumableLoader:
    """``other`` with the state of ``loader``, by way of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


@makes
def test_resume_after_every_batch_and_again(make: Make) -> None:
    expected = train(make())
    for steps in range(1, len(expected)):
        first = make()
        seen = train(first, steps)
        second = moved(first, make())
        seen += train(second, 2)
        seen += train(moved(second, make()))
        assert seen == expected, f"{steps} steps"


@makes
def test_resume_with_workers(make: Make) -> None:
    expected = train(make())
    assert train(make(num_workers=2)) == expected
    epoch = len(list(make()))
    for steps in (2, epoch):
        first = make(num_workers=2)
        seen = train(first, steps)
        # Workers had fetched four batches more, or all.
        second = moved(first, make(num_workers=2))
        seen += train(second, 1)
        # The number of workers may change.
        seen += train(moved(second, make()))
        assert seen == expected, f"{steps} steps"


def test_a_plain_loader_with_workers_counts_too_much() -> None:
    # What the loader is for.
    sampler = ShuffledSampler(SIZE)
    next(iter(DataLoader(Numbers(), 3, sampler=sampler, num_workers=2)))
    assert sampler.epoch == 1


def test_batches_are_those_of_a_plain_loader() -> None:
    loader, plain = shuffled(), DataLoader(Numbers(), 3, sampler=ShuffledSampler(SIZE))
    assert len(loader) == len(plain) == 5
    for _ in range(2):
        for ours, theirs in zip(loader, plain, strict=True):
            assert ours.equal(theirs)
    dropping = shuffled(drop_last=True)
    assert len(dropping) == len(list(dropping)) == 4
    assert len(list(lengths())) == len(lengths())


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_loop_left_early_goes_on(options: dict[str, Any]) -> None:
    expected = [batch.tolist() for batch in shuffled()]
    loader = shuffled(**options)
    seen = [batch.tolist() for batch in itertools.islice(loader, 2)]
    seen += [batch.tolist() for batch in loader]
    assert seen == expected
    assert loader.sampler.epoch == 1
    assert [batch.tolist() for batch in loader] != expected


def test_states_at_an_epochs_end() -> None:
    expected = train(shuffled())
    last = shuffled()
    seen = train(last, 5)
    assert last.state_dict()["position"] == SIZE
    resumed = moved(last, shuffled())
    assert list(resumed) == []
    assert seen + train(resumed) == expected
    # What is dropped at the end is not given out later.
    dropping = shuffled(drop_last=True)
    train(dropping, 4)
    resumed = moved(dropping, shuffled(drop_last=True))
    assert list(resumed) == []
    assert resumed.sampler.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_numbers_stay(num_workers: int) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(shuffled(num_workers), 2)
    assert torch.get_rng_state().equal(before)


def test_another_loop_within_a_loop() -> None:
    loader = shuffled()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match=r"sampler: expected epoch and position \(0, 3\), .* got \(0, 6\)"):
        next(first)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampler": None}, ValueError, "sampler and batch_sampler: expected one of them, got neither"),
        ({"batch_sampler": ShuffledSampler(SIZE)}, ValueError, "expected one of them, got both"),
        ({"sampler": range(3)}, TypeError, r"sampler: expected a sampler of dsaccel.data, got range\(0, 3\)"),
        ({"batch_size": 0}, ValueError, "batch_size: expected at least 1, got 0"),
        ({"batch_size": None}, TypeError, "batch_size: expected an int, got None"),
        (
            {"sampler": None, "batch_sampler": LengthGroupedBatchSampler(LENGTHS, batch_size=2), "batch_size": 4},
            ValueError,
            r"batch_size and drop_last: expected 1 and False with batch_sampler, got \(4, False\)",
        ),
        ({"shuffle": True}, ValueError, "shuffle: expected nothing: the sampler decides the order, got True"),
        ({"in_order": False}, ValueError, "in_order: expected True"),
        ({"generator": torch.Generator()}, ValueError, "generator: expected nothing"),
        ({"dataset": Endless()}, ValueError, "IterableDataset"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ResumableLoader(**{"dataset": Numbers(), "sampler": ShuffledSampler(SIZE), **arguments})


def interrupted(rank: int, state: dict[str, Any] | None, steps: int | None) -> tuple[list[list[int]], dict[str, Any]]:
    sampler = DynamicSampler(SIZE, num_samples=16, momentum=0.5)
    loader = ResumableLoader(Numbers(), 2, sampler=sampler)
    if state is not None:
        loader.load_state_dict(state)
    return train(loader, steps), loader.state_dict()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return all(same(first[name], second[name]) for name in first)
    return torch.equal(first.nan_to_num(), second.nan_to_num()) if isinstance(first, Tensor) else first == second


def test_two_ranks_go_on_with_the_state_of_the_first(ranks: Ranks) -> None:
    whole = ranks.run(interrupted, 2, state=None, steps=None)
    start = ranks.run(interrupted, 2, state=None, steps=6)
    assert same(start[0][1], start[1][1])
    rest = ranks.run(interrupted, 2, state=start[0][1], steps=None)
    for rank in range(2):
        assert start[rank][0] + rest[rank][0] == whole[rank][0]
    assert whole[0][0] != whole[1][0]
