"""What the learning rate range test puts back, of kinds that few models and optimizers have."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccel.optim import lr_range_test

pytestmark = pytest.mark.usefixtures("one_thread")


class Remembering(torch.optim.SGD):
    """Has state in containers of several kinds."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                value = parameter.sum().item()
                state.setdefault("last", collections.deque(maxlen=2)).append(value)
                state.setdefault("seen", set()).add(value)
                state.setdefault("all", []).append(value)
        return super().step(closure)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any = loss_of) -> None:
    lr_range_test(model, optimizer, loss_fn, [torch.randn(8, 4)], steps=4, lowest=1e-3, highest=1e-1)


def test_containers_of_an_optimizer() -> None:
    model = nn.Linear(4, 2)
    optimizer = Remembering(model.parameters(), lr=0.1)
    loss_of(model, torch.randn(8, 4)).backward()
    optimizer.step()
    before = copy.deepcopy(list(optimizer.state.values()))
    held = [list(state.values()) for state in optimizer.state.values()]
    run(model, optimizer)
    after = list(optimizer.state.values())
    assert after == before
    assert after[0]["last"].maxlen == 2
    for state, containers in zip(after, held, strict=True):
        assert all(one is other for one, other in zip(state.values(), containers, strict=True))


def test_expanded_buffers() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("rows", torch.arange(3.0).expand(5, 3))
    model.register_buffer("none", torch.zeros(1).expand(0))
    rows = model.rows

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        model.rows[0] += 1
        return loss_of(model, x)

    run(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    assert model.rows is rows
    assert rows.stride() == (0, 1)
    assert torch.equal(rows, torch.arange(3.0).expand(5, 3))


def test_parameters_outside_of_the_model_and_groups_without_any() -> None:
    model = nn.Linear(4, 2)
    scale = nn.Parameter(torch.ones(2))
    scale.grad = grad = torch.full((2,), 3.0)
    optimizer = torch.optim.SGD([{"params": []}, {"params": [*model.parameters(), scale]}], lr=0.1)
    run(model, optimizer, lambda model, x: (model(x) * scale).square().mean())
    assert torch.equal(scale, torch.ones(2))
    assert scale.grad is grad
    assert torch.equal(grad, torch.full((2,), 3.0))
