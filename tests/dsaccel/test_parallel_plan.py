"""Plans: which sizes go together, and how they are written down."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dsaccel.parallel import ParallelPlan


def test_world_size_is_the_product() -> None:
    plan = ParallelPlan(dp=2, shard=3, tp=5, pp=7, cp=11)
    assert plan.world_size == 2 * 3 * 5 * 7 * 11
    assert plan.data_size == 2 * 3 * 11
    assert plan.batch_multiple == 2 * 3 * (plan.microbatches or plan.pp)
    assert ParallelPlan(dp=2, shard=3, microbatches=None).batch_multiple == 6
    assert plan.shape == (7, 2, 3, 11, 5)
    assert ParallelPlan().world_size == 1


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(),
        ParallelPlan(dp=2, tp=2),
        ParallelPlan(shard=4, zero=2),
        ParallelPlan(pp=2, schedule="gpipe", microbatches=8, sequence_parallel=False),
    ],
    ids=str,
)
def test_text_and_back(plan: ParallelPlan) -> None:
    assert ParallelPlan.parse(str(plan)) == plan


def test_parse_takes_spaces() -> None:
    assert ParallelPlan.parse(" dp = 2 , tp=2,") == ParallelPlan(dp=2, tp=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "plan: expected name=value with a name of dp, shard, tp, pp, cp, zero, schedule, microbatches"),
        ("ep=2", "plan: expected name=value"),
        ("dp=2,dp=2", "plan: expected every name once, got 'dp=2,dp=2'"),
        ("dp=two", "dp: expected an integer, got 'two'"),
        ("dp=0", "dp: expected at least 1, got 0"),
        ("sequence_parallel=1", "sequence_parallel: expected true or false, got '1'"),
        ("schedule=zb", "schedule: expected one of gpipe, 1f1b, interleaved, got 'zb'"),
    ],
)
def test_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ParallelPlan.parse(text)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dp": 2.0}, TypeError, "dp: expected an integer, got 2.0 (float)"),
        ({"tp": True}, TypeError, "tp: expected an integer"),
        ({"cp": -1}, ValueError, "cp: expected at least 1, got -1"),
        ({"zero": 4}, ValueError, "zero: expected 0, 1, 2 or 3, got 4"),
        ({"zero": "3"}, TypeError, "zero: expected an integer"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel: expected True or False"),
        ({"microbatches": 2}, ValueError, "microbatches: expected None without a pipeline (pp = 1), got 2"),
        ({"microbatches": 0, "pp": 2}, ValueError, "microbatches: expected at least 1, got 0"),
        ({"shard": 2, "zero": 0}, ValueError, "shard: expected 1 with zero = 0"),
        ({"shard": 2, "tp": 2, "zero": 1}, ValueError, "zero: expected 2 or 3 with both shard and tp"),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ParallelPlan(**fields)
