"""Shuffled and graded orders, their slices over ranks, and states that resume at the exact next sample."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import distributed

from dsaccel.data import (
    CurriculumSampler,
    DynamicSampler,
    LengthGroupedBatchSampler,
    ResumableSampler,
    ShuffledSampler,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = torch.tensor([5, 1, 9, 3, 3, 7, 2, 8, 6, 4, 4, 1, 10])
SIZE = len(LENGTHS)

Make = Callable[..., ResumableSampler[Any]]
KINDS: dict[str, Make] = {
    "shuffled": lambda **shared: ShuffledSampler(SIZE, **shared),
    "dynamic": lambda **shared: DynamicSampler(SIZE, **shared),
    "dynamic_once": lambda **shared: DynamicSampler(SIZE, replacement=False, **shared),
    "curriculum": lambda **shared: CurriculumSampler(LENGTHS, epochs=4, easy_share=0.5, **shared),
    "lengths": lambda **shared: LengthGroupedBatchSampler(LENGTHS, max_tokens=12, **shared),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """The state after a checkpoint was written and read."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def feed(sampler: ResumableSampler[Any], item: Any) -> None:
    """A loss that depends on the sample and grows with the epoch."""
    if isinstance(sampler, DynamicSampler):
        sampler.update([item], [0.1 + (item * 37 % 11) * (1 + sampler.epoch)])


def train(sampler: ResumableSampler[Any], steps: int | None) -> list[Any]:
    """What a training sees in so many steps, or up to the end of epoch 3."""
    seen = []
    for _ in range(sampler.epoch, 4):
        for item in sampler:
            feed(sampler, item)
            seen.append(item)
            if len(seen) == steps:
                return seen
    return seen


def all_slices(make: Make, world: int, **shared: Any) -> list[list[Any]]:
    return [list(make(num_replicas=world, rank=rank, **shared)) for rank in range(world)]


def interleaved(slices: list[list[Any]]) -> list[Any]:
    """In the order in which ranks took turns."""
    return [item for turn in itertools.zip_longest(*slices) for item in turn if item is not None]


def test_the_order_is_pinned() -> None:
    """On every machine and with every torch: a change here breaks the resumption of trainings under way."""
    assert list(ShuffledSampler(10)) == [1, 5, 9, 4, 7, 2, 8, 3, 6, 0]
    assert list(ShuffledSampler(10, seed=1)) == [9, 8, 3, 1, 6, 0, 5, 4, 7, 2]


@kinds
def test_order_depends_on_seed_and_epoch_alone(make: Make) -> None:
    expected = train(make(seed=3), None)
    torch.manual_seed(17)
    before = torch.get_rng_state()
    assert train(make(seed=3), None) == expected
    assert torch.get_rng_state().equal(before)
    assert train(make(seed=4), None) != expected
    sampler = make(seed=3)
    sampler.set_epoch(2)
    fresh = list(sampler)
    again = make(seed=3)
    assert list(again) != fresh
    again.set_epoch(2)
    assert list(again) == fresh or isinstance(again, DynamicSampler)


@pytest.mark.parametrize("make", [KINDS["shuffled"], KINDS["dynamic_once"]], ids=["shuffled", "dynamic_once"])
def test_each_once_an_epoch(make: Make) -> None:
    sampler = make()
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_unshuffled() -> None:
    sampler = ShuffledSampler(4, shuffle=False)
    assert [list(sampler), list(sampler)] == [[0, 1, 2, 3]] * 2


def test_the_length_is_that_of_the_whole_epoch() -> None:
    sampler = ShuffledSampler(10, num_replicas=3, rank=1, pad=False)
    assert len(sampler) == 3
    next(iter(sampler))
    assert len(sampler) == 3
    assert len(list(sampler)) == 2


@kinds
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_slices_of_one_draw(make: Make, world: int) -> None:
    whole = make(num_replicas=world, rank=0)
    items = list(whole._items(whole.order().tolist()))
    total = len(items)
    padded = all_slices(make, world)
    assert len({len(each) for each in padded}) == 1
    assert interleaved(padded) == [*items, *items[: -total % world]]
    dropped = all_slices(make, world, drop_last=True)
    assert interleaved(dropped) == items[: total // world * world]
    uneven = all_slices(make, world, pad=False)
    assert interleaved(uneven) == items
    for rank, options in itertools.product(range(world), ({}, {"drop_last": True}, {"pad": False})):
        sampler = make(num_replicas=world, rank=rank, **options)
        assert len(sampler) == len(list(sampler))


def test_ten_over_three_ranks_without_padding() -> None:
    slices = all_slices(lambda **shared: ShuffledSampler(10, **shared), 3, pad=False)
    assert [len(each) for each in slices] == [4, 3, 3]
    assert sorted(itertools.chain(*slices)) == list(range(10))


def test_fewer_samples_than_ranks() -> None:
    def make(**shared: Any) -> ShuffledSampler:
        return ShuffledSampler(2, shuffle=False, **shared)

    assert all_slices(make, 5) == [[0], [1], [0], [1], [0]]
    assert all_slices(make, 5, pad=False) == [[0], [1], [], [], []]
    with pytest.raises(ValueError, match="drop_last: expected False for 2 items over 8 ranks"):
        make(num_replicas=8, rank=0, drop_last=True)


@kinds
def test_resume_at_every_step_and_again(make: Make) -> None:
    expected = train(make(), None)
    for steps in range(1, len(expected)):
        first = make()
        seen = train(first, steps)
        second = make(seed=99)
        second.load_state_dict(stored(first.state_dict()))
        seen += train(second, 3)
        third = make()
        third.load_state_dict(stored(second.state_dict()))
        seen += train(third, None)
        assert seen == expected, f"{steps} steps"


@kinds
def test_a_state_does_not_change_afterwards(make: Make) -> None:
    sampler = make()
    seen = train(sampler, 5)
    state = sampler.state_dict()
    rest = train(sampler, None)
    # Of an epoch that is not the state's.
    sampler.order()
    sampler.load_state_dict(state)
    assert train(sampler, None) == rest
    assert seen + rest == train(make(), None)


@kinds
def test_states_at_an_epochs_end(make: Make) -> None:
    whole = make()
    epochs = [list(whole) for _ in range(2)]
    last = make()
    iterator = iter(last)
    for _ in epochs[0]:
        next(iterator)
    inside = make()
    inside.load_state_dict(last.state_dict())
    # Of batches by length it is that of the next epoch, which any number of ranks can load.
    assert inside.epoch == int(isinstance(inside, LengthGroupedBatchSampler))
    assert inside.epoch == 1 or list(inside) == []
    assert list(inside) == epochs[1]
    assert next(iterator, None) is None
    after = make()
    after.load_state_dict(last.state_dict())
    assert after.epoch == 1
    after.set_epoch(1)
    assert list(after) == epochs[1]


def test_set_epoch_keeps_the_position_of_the_same_epoch() -> None:
    sampler = ShuffledSampler(6)
    order = sampler.order().tolist()
    iterator = iter(sampler)
    assert [next(iterator), next(iterator)] == order[:2]
    sampler.set_epoch(0)
    assert list(sampler) == order[2:]
    sampler.set_epoch(0)
    assert list(sampler) == order


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1), (4, 4)])
def test_another_number_of_ranks(before: int, after: int) -> None:
    steps = 2
    order = ShuffledSampler(SIZE).order().tolist()
    samplers = [ShuffledSampler(SIZE, num_replicas=before, rank=rank) for rank in range(before)]
    seen = interleaved([list(itertools.islice(sampler, steps)) for sampler in samplers])
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    rest = []
    for rank in range(after):
        sampler = ShuffledSampler(SIZE, num_replicas=after, rank=rank, pad=False)
        sampler.load_state_dict(states[0])
        rest.append(list(sampler))
    assert seen + interleaved(rest) == order


def test_length_grouped_batches_go_on_with_as_many_ranks_only() -> None:
    sampler = KINDS["lengths"](num_replicas=2, rank=0)
    next(iter(sampler))
    other = KINDS["lengths"](num_replicas=3, rank=0)
    with pytest.raises(ValueError, match=r"num_replicas: expected 2, as in the state, .* within an epoch, got 3"):
        other.load_state_dict(sampler.state_dict())
    list(sampler)
    other.load_state_dict(sampler.state_dict())
    assert other.epoch == 1


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("move", ["another loop", "set_epoch", "load_state_dict"])
def test_a_sampler_moved_within_a_loop(move: str, steps: int) -> None:
    sampler = ShuffledSampler(5)
    state = sampler.state_dict()
    iterator = iter(sampler)
    for _ in range(steps):
        next(iterator)
    if move == "another loop":
        next(iter(sampler), None)
    elif move == "set_epoch":
        sampler.set_epoch(4)
    else:
        sampler.load_state_dict(state)
    with pytest.raises(RuntimeError, match=rf"sampler: expected epoch and position \(0, {steps}\)"):
        next(iterator)


def test_states_of_other_samplers() -> None:
    state = ShuffledSampler(5).state_dict()
    with pytest.raises(ValueError, match="state_dict: expected size = 6, as this sampler has, got 5"):
        ShuffledSampler(6).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state_dict: expected shuffle = False, as this sampler has, got True"):
        ShuffledSampler(5, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state_dict: expected kind = 'DynamicSampler', .* got 'ShuffledSampler'"):
        DynamicSampler(5).load_state_dict(state)
    graded = CurriculumSampler(LENGTHS, epochs=4)
    with pytest.raises(ValueError, match="state_dict: expected difficulty = "):
        CurriculumSampler(LENGTHS.flip(0), epochs=4).load_state_dict(graded.state_dict())
    with pytest.raises(ValueError, match=r"state_dict: expected epochs = 5, as this sampler has, got 4"):
        CurriculumSampler(LENGTHS, epochs=5).load_state_dict(graded.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "size: expected at least 1, got 0"),
        ({"size": 2.0}, TypeError, r"size: expected an int, got 2.0 \(float\)"),
        ({"seed": -1}, ValueError, "seed: expected at least 0, got -1"),
        ({"seed": None}, TypeError, "seed: expected an int, got None"),
        ({"num_replicas": 0, "rank": 0}, ValueError, "num_replicas: expected at least 1, got 0"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank: expected below num_replicas = 2, got 2"),
        ({"num_replicas": 2, "rank": -1}, ValueError, "rank: expected at least 0, got -1"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShuffledSampler(**{"size": 4, **arguments})
    with pytest.raises(ValueError, match="epoch: expected at least 0, got -1"):
        ShuffledSampler(4).set_epoch(-1)


def test_curriculum_grows_and_then_has_all() -> None:
    difficulty = torch.tensor([0.5, 0.1, 0.5, 0.9, 0.3, 0.5, 0.2, 0.8, 0.7, 0.6])
    sampler = CurriculumSampler(difficulty, epochs=10, start=0.4)
    # q: 0.4, 0.6, 0.8; of the three 0.5 the lower ids are the easier ones.
    easiest = [1, 6, 4, 0, 2, 5, 9, 8, 7, 3]
    for epoch, count in enumerate([4, 6, 8, 10, 10, 10]):
        assert (sampler.epoch, sampler.count(epoch), len(sampler)) == (epoch, count, count)
        seen = list(sampler)
        assert sorted(seen) == sorted(easiest[:count])
        assert seen != easiest[:count]
    assert sampler.count(1000) == 10


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"epochs": 10, "easy_share": 0.0}, [100]),
        ({"epochs": 1}, [100]),
        ({"epochs": 4, "easy_share": 1.0, "start": 0.0}, [1, 25, 50, 75, 100]),
        # 0.07 * 100 is a little above 7, and 0.7 * 10 of epochs must be 7.
        ({"epochs": 10, "easy_share": 0.7, "start": 0.07}, [7, 21, 34, 47, 61, 74, 87, 100]),
        ({"epochs": 10, "start": 1.0}, [100]),
    ],
)
def test_curriculum_counts(options: dict[str, Any], counts: list[int]) -> None:
    sampler = CurriculumSampler(torch.rand(100), **options)
    assert [sampler.count(epoch) for epoch in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"difficulty": [1, 2]}, TypeError, r"difficulty: expected a tensor, got \[1, 2\]"),
        (
            {"difficulty": torch.tensor([0.0, math.nan])},
            ValueError,
            "difficulty: expected finite numbers, got nan at 1",
        ),
        ({"epochs": 0}, ValueError, "epochs: expected at least 1, got 0"),
        ({"easy_share": 1.5}, ValueError, "easy_share: expected from 0 to 1, got 1.5"),
        ({"easy_share": "half"}, TypeError, "easy_share: expected a number, got 'half'"),
        ({"start": -0.1}, ValueError, "start: expected from 0 to 1, got -0.1"),
        (
            {"num_replicas": 8, "rank": 0, "drop_last": True, "start": 0.1},
            ValueError,
            "drop_last: expected False for 2 items over 8 ranks",
        ),
    ],
)
def test_curriculum_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CurriculumSampler(**{"difficulty": LENGTHS, "epochs": 10, **arguments})


def each_kind(rank: int) -> list[list[Any]]:
    samplers = [make(pad=False) for make in KINDS.values()]
    assert all((sampler.num_replicas, sampler.rank) == (distributed.get_world_size(), rank) for sampler in samplers)
    return [list(sampler) for sampler in samplers]


def in_half_groups(rank: int) -> list[int]:
    groups = [distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    sampler = ShuffledSampler(8, group=groups[rank // 2])
    assert (sampler.num_replicas, sampler.rank) == (2, rank % 2)
    return list(sampler)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_a_process_group(ranks: Ranks, world: int) -> None:
    results = ranks.run(each_kind, world)
    for kind, make in enumerate(KINDS.values()):
        assert [result[kind] for result in results] == all_slices(make, world, pad=False)


def test_ranks_of_a_group_of_their_own(ranks: Ranks) -> None:
    first, second, third, fourth = ranks.run(in_half_groups, 4)
    assert first == third
    assert second == fourth
    assert sorted(first + second) == list(range(8))
