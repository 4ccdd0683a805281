"""The norm over the stages of a pipeline, and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import Ranks
from torch import nn

from dsaccel.parallel import clip_grad_norm_, total_grad_norm

MAX_NORM = 0.5


def parameters_with(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient.clone()
    return parameters


def stages(rank: int, norm_type: float) -> None:
    """Two stages, with a parameter that both have."""
    group = torch.distributed.group.WORLD
    everything = [torch.randn(5, 3), torch.randn(4), torch.randn(7)]
    shared, others = everything[0], everything[1:]
    parameters = parameters_with([shared, others[rank]])
    copies = parameters[:1] if rank == 1 else []
    wanted = torch.linalg.vector_norm(torch.cat([x.flatten() for x in everything]), norm_type)
    for scale in (None, 8.0, torch.tensor(8.0)):
        found = total_grad_norm(parameters, copies=copies, pipeline=group, loss_scale=scale, norm_type=norm_type)
        torch.testing.assert_close(found.total_norm, wanted / (1 if scale is None else 8))
        assert found.found_inf == 0
    found = clip_grad_norm_(
        parameters, MAX_NORM, copies=copies, pipeline=group, loss_scale=torch.tensor(2.0), norm_type=norm_type
    )
    torch.testing.assert_close(found.total_norm, wanted / 2)
    factor = MAX_NORM / (wanted / 2 + 1e-6) / 2
    for parameter, before in zip(parameters, (shared, others[rank]), strict=True):
        torch.testing.assert_close(parameter.grad, before * factor)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_each_parameter_counts_once(ranks: Ranks, norm_type: float) -> None:
    ranks.run(stages, 2, norm_type=norm_type)


def broken(rank: int) -> None:
    group = torch.distributed.group.WORLD
    for value in (math.inf, math.nan):
        parameters = parameters_with([torch.full((3,), value) if rank == 1 else torch.full((3,), 5.0)])
        before = parameters[0].grad.clone()
        found = clip_grad_norm_(parameters, MAX_NORM, pipeline=group, loss_scale=4.0)
        assert found.found_inf == 1
        assert not found.total_norm.isfinite()
        torch.testing.assert_close(parameters[0].grad, before, equal_nan=True, rtol=0, atol=0)


def test_nothing_is_written_if_any_stage_is_not_finite(ranks: Ranks) -> None:
    ranks.run(broken, 2)


def without(rank: int) -> None:
    """A stage without gradients, small ones, and a threshold of 0."""
    group = torch.distributed.group.WORLD
    parameters = parameters_with([torch.full((4,), 0.1)]) if rank == 0 else [nn.Parameter(torch.zeros(2))]
    found = clip_grad_norm_(parameters, MAX_NORM, pipeline=group)
    torch.testing.assert_close(found.total_norm, torch.tensor(0.2))
    if rank == 0:
        assert torch.equal(parameters[0].grad, torch.full((4,), 0.1))
    clip_grad_norm_(parameters, 0.0, pipeline=group)
    if rank == 0:
        assert torch.equal(parameters[0].grad, torch.zeros(4))


def test_stages_without_gradients(ranks: Ranks) -> None:
    ranks.run(without, 2)


def test_one_stage() -> None:
    parameters = parameters_with([torch.randn(5, 3), torch.randn(4)])
    wanted = nn.utils.get_total_norm([p.grad for p in parameters])
    torch.testing.assert_close(total_grad_norm(iter(parameters)).total_norm, wanted)
    torch.testing.assert_close(clip_grad_norm_(iter(parameters), MAX_NORM).total_norm, wanted)
    torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in parameters]), torch.tensor(MAX_NORM))


def test_thresholds_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="max_norm: expected a number not below 0, got -1"):
        clip_grad_norm_([], -1)
    with pytest.raises(TypeError, match="max_norm: expected a number, got '1'"):
        clip_grad_norm_([], "1")
