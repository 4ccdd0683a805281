"""The processes that tests of distributed code share: values, failures, and going on after one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks
from torch import distributed


def adds_up(rank: int, factor: int) -> tuple[int, float, int, int]:
    total = torch.tensor(float(rank * factor))
    distributed.all_reduce(total)
    return rank, float(total), distributed.get_world_size(), torch.get_num_threads()


def first_fails(rank: int) -> None:
    if rank == 0:
        raise ValueError("rank 0 found a wrong value")
    distributed.barrier()


def last_ends(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def sleeps(rank: int) -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("world", [2, 3, 1])
def test_each_rank_answers(pool: Ranks, world: int) -> None:
    expected = sum(range(world)) * 5.0
    assert pool.run(adds_up, world, factor=5) == [(rank, expected, world, 1) for rank in range(world)]


def test_a_failure_is_told_and_the_next_case_runs(pool: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0: Traceback.*rank 0 found a wrong value"):
        pool.run(first_fails, 2)
    with pytest.raises(AssertionError, match="rank 1: the process ended"):
        pool.run(last_ends, 2)
    assert pool.run(adds_up, 2, factor=1) == [(0, 1.0, 2, 1), (1, 1.0, 2, 1)]


def test_a_hang_is_a_failure(pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.SECONDS", 1.0)
    with pytest.raises(AssertionError, match="rank 1: no answer"):
        pool.run(sleeps, 2)
