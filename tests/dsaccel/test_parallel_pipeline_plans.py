"""How a model is cut into stages, how long ranks of each schedule stand idle, and which arguments are refused."""

from __future__ import annotations

import sys
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pipelines import loss_of, make_batch, make_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from dsaccel.parallel.pipeline import Pipeline, layers_per_stage, split_stages, stage_indices

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("layers", "weights", "expected"),
    [
        (4, {}, [2, 2]),
        (3, {}, [2, 1]),
        (5, {}, [2, 1, 1, 1]),
        (6, {}, [2, 2, 1, 1]),
        (3, {}, [1, 1, 1]),
        (6, {"input_weight": 1, "output_weight": 1}, [1, 2, 2, 1]),
        (8, {"output_weight": 2.5}, [4, 3, 1]),
        (5, {"output_weight": 9}, [4, 1]),
    ],
)
def test_layers_of_stages(layers: int, weights: dict[str, float], expected: list[int]) -> None:
    assert layers_per_stage(layers, len(expected), **weights) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_in_turn_are_the_model(count: int) -> None:
    model = make_model(5)
    stages = [split_stages(model, count, index) for index in range(count)]
    tokens, _ = make_batch(2, 12, 0)
    x = tokens
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, model(tokens), rtol=0, atol=0)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert len(names) == len(set(names)) + (count > 1)
    assert set(names) == {name for name, _ in model.named_parameters()}
    whole = dict(model.named_parameters())
    assert all(parameter is whole[name] for stage in stages for name, parameter in stage.named_parameters())
    assert sum(len(stage.blocks) for stage in stages) == 5
    assert [list(stage.tied) for stage in stages] == (
        [[]] if count == 1 else [["embed.weight"], *[[]] * (count - 2), ["embed.weight"]]
    )


def test_indices_of_stages() -> None:
    assert [stage_indices(rank, 2, 3) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (TypeError, {"model": nn.Linear(2, 2)}, "model: expected a SlidingWindowLM, got "),
        (TypeError, {"count": 2.0}, "count: expected an integer, got 2.0"),
        (ValueError, {"count": 0}, "count: expected at least 1, got 0"),
        (ValueError, {"count": 4}, "count: expected at most a stage for each of 3 layers, got 4"),
        (TypeError, {"index": "0"}, "index: expected an integer, got '0'"),
        (ValueError, {"index": 2}, "index: expected 0 to 1, got 2"),
        (ValueError, {"index": -1}, "index: expected 0 to 1, got -1"),
        (ValueError, {"input_weight": -1}, "input_weight: expected a number that is not negative, got -1"),
        (ValueError, {"output_weight": None}, "output_weight: expected a number that is not negative, got None"),
    ],
)
def test_what_cannot_be_split(error: type, change: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        split_stages(**{"model": make_model(3), "count": 2, "index": 0, **change})


def test_blocks_that_share_a_parameter_stay_in_a_stage() -> None:
    model = make_model(4)
    model.blocks[1].mlp = model.blocks[0].mlp
    assert len(split_stages(model, 2, 1).blocks) == 2
    model.blocks[3].mlp = model.blocks[0].mlp
    with pytest.raises(ValueError, match=r"blocks.0.mlp.gate_proj.weight in stage 0, the same as blocks.3.mlp.gate"):
        split_stages(model, 2, 0)


def idle_share(kind: type, ranks: int, microbatches: int, per_rank: int) -> Fraction:
    """Of the time of a rank, when PyTorch's plan is carried out, and backward takes twice as long as forward."""
    common = {"num_stages": ranks * per_rank, "group_size": ranks, "group_rank": 0}
    stages = [SimpleNamespace(stage_index=index * ranks, **common) for index in range(per_rank)]
    schedule = kind(stages if per_rank > 1 else stages[0], microbatches, loss_fn=loss_of)
    waiting: dict[int, list[tuple[int, str, int]]] = {}
    for rank, actions in schedule.pipeline_order.items():
        # Each stage takes microbatches in order; numbers of the last rank's forwards are one too high in 1F1B's plan.
        numbers: Counter[tuple[int, str]] = Counter()
        waiting[rank] = []
        for action in filter(None, actions):
            kind_of_action = action.stage_index, action.computation_type.name
            if kind_of_action[1] in ("FORWARD", "FULL_BACKWARD"):
                waiting[rank].append((*kind_of_action, numbers[kind_of_action]))
                numbers[kind_of_action] += 1
    assert all(len(actions) == 2 * microbatches * per_rank for actions in waiting.values())
    done: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        progress = False
        for rank, actions in waiting.items():
            while actions:
                stage, name, number = actions[0]
                if name == "FORWARD":
                    needs = [(stage - 1, name, number)] if stage else []
                else:
                    last = stage == ranks * per_rank - 1
                    needs = [(stage, "FORWARD", number), *([] if last else [(stage + 1, name, number)])]
                if not all(need in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = done[actions.pop(0)] = start + (1 if name == "FORWARD" else 2)
                progress = True
        assert progress, "the plan waits for itself"
    return 1 - Fraction(3 * microbatches * per_rank, max(free.values()))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "per_rank"),
    [(2, 2, 1), (2, 5, 1), (4, 4, 1), (4, 16, 1), (2, 4, 2), (4, 8, 2), (4, 8, 3)],
)
def test_idle_share_is_that_of_the_formula(ranks: int, microbatches: int, per_rank: int) -> None:
    """(p - 1) / v of m + (p - 1) / v: Narayanan et al., 2021, section 2.2."""
    expected = Fraction(ranks - 1, per_rank) / (microbatches + Fraction(ranks - 1, per_rank))
    kinds = [ScheduleInterleaved1F1B] if per_rank > 1 else [ScheduleGPipe, Schedule1F1B]
    assert [idle_share(kind, ranks, microbatches, per_rank) for kind in kinds] == [expected] * len(kinds)


def pipeline(**change: Any) -> Pipeline:
    size = change.pop("size", 4)
    mesh = Mock(spec=DeviceMesh, ndim=len(shape := change.pop("shape", (size,))), shape=shape, size=lambda: size)
    options = {"stages": nn.Linear(2, 2), "mesh": mesh, "microbatches": 4, "loss_fn": loss_of, **change}
    return Pipeline(**options)


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (ValueError, {"shape": (2, 2)}, r"mesh: expected one dimension of two ranks or more, got shape \[2, 2\]"),
        (ValueError, {"size": 1}, r"mesh: expected one dimension of two ranks or more, got shape \[1\]"),
        (ValueError, {"schedule": "zero"}, "schedule: expected one of gpipe, 1f1b, interleaved, got 'zero'"),
        (TypeError, {"microbatches": 4.0}, "microbatches: expected an integer, got 4.0"),
        (ValueError, {"microbatches": 0, "schedule": "gpipe"}, "microbatches: expected at least 1, got 0"),
        (ValueError, {"microbatches": 3}, "microbatches: expected at least 4 for 1f1b, as many as ranks, got 3"),
        (
            ValueError,
            {"microbatches": 9, "schedule": "interleaved"},
            "microbatches: expected a multiple of 2, best of 4, for interleaved, got 9",
        ),
        (ValueError, {"stages": [], "schedule": "interleaved"}, "stages: expected at least one, got 0"),
        (ValueError, {"stages": [nn.Identity()] * 2}, "stages: expected one for 1f1b, got 2"),
        (TypeError, {"stages": ["first"]}, "stages: expected a module or a sequence of modules, got 'first'"),
        (TypeError, {"stages": None}, "stages: expected a module or a sequence of modules, got None"),
        (TypeError, {"mesh": "pp"}, "mesh: expected a DeviceMesh, got 'pp'"),
        (TypeError, {"loss_fn": None}, "loss_fn: expected a function of outputs and targets, got None"),
    ],
)
def test_arguments_are_refused(error: type, change: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline(**change)


def test_a_pytorch_without_pipelining_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", None)
    monkeypatch.delitem(sys.modules, "dsaccel.parallel.pipeline_schedules", raising=False)
    monkeypatch.delattr("dsaccel.parallel.pipeline_schedules", raising=False)
    with pytest.raises(ImportError, match=r"a pipeline needs torch.distributed.pipelining as of PyTorch 2.11"):
        pipeline()
