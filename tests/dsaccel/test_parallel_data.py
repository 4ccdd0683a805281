"""Replicas and shards of models that are not the language model: ties, parameters without gradients, precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parallel_models import language_model, whole
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from dsaccel.parallel import ParallelPlan, data_parallel, make_mesh, sharded_optimizer, sharding_units

HAS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
KINDS = ["dp=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2,zero=3"]


class Layers(nn.Module):
    """Four layers, of which the third has the weight of the first, and a head with that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.head = nn.Linear(6, 6)
        self.head.weight = self.input.weight

    def forward(self, x: Tensor, skips: int = -1) -> Tensor:
        x = self.input(x)
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x) if index != skips else x)
        return self.head(x)


class Choice(nn.Module):
    """A layer with two ways, of which a process may take either."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({"left": nn.Linear(6, 6), "right": nn.Linear(6, 6)})
        self.rest = nn.Linear(6, 6)

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.rest(torch.tanh(self.ways[way](x)))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def optimizer_of(model: nn.Module, plan: ParallelPlan, mesh: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return sharded_optimizer(sgd, parameters, mesh.get_group("shard")) if plan.zero == 1 else sgd(parameters)


def assert_trained(model: nn.Module, alone: nn.Module, before: dict[str, Tensor]) -> None:
    for (name, mine), (_, right) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert not torch.equal(right, before[name]), name
        torch.testing.assert_close(whole(mine), right.detach(), rtol=1e-12, atol=1e-12)


def tied(rank: int, spec: str) -> None:
    plan = ParallelPlan.parse(spec)
    mesh = make_mesh(plan, "cpu")
    alone = Layers().double()
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    model = copy.deepcopy(alone)
    parallel = data_parallel(model, plan, mesh)
    assert isinstance(parallel, DistributedDataParallel if plan.zero == 1 or plan.dp == 2 else FSDPModule)
    assert model.head.weight is model.input.weight
    assert model.layers[2].weight is model.layers[0].weight
    mine, right = optimizer_of(model, plan, mesh), sgd(list(alone.parameters()))
    for _ in range(3):
        x = torch.randn(4, 6, dtype=torch.float64)
        parallel(x.chunk(2)[rank]).square().mean().backward()
        alone(x).square().mean().backward()
        for optimizer in (mine, right):
            optimizer.step()
            optimizer.zero_grad()
    assert_trained(model, alone, before)


@pytest.mark.parametrize("spec", KINDS)
def test_tied_weights_are_all_updated(ranks: Ranks, spec: str) -> None:
    ranks.run(tied, 2, spec=spec)


def shared_layer(rank: int, spec: str) -> None:
    """One module that stands twice in a list is called twice, and sharded once."""
    plan = ParallelPlan.parse(spec)
    alone = Layers().double()
    alone.layers[3] = alone.layers[1]
    model = copy.deepcopy(alone)
    parallel = data_parallel(model, plan, make_mesh(plan, "cpu"))
    x = torch.randn(4, 6, dtype=torch.float64)
    parallel(x.chunk(2)[rank]).square().mean().backward()
    alone(x).square().mean().backward()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), right.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", ["dp=2", "shard=2,zero=2", "shard=2,zero=3"])
def test_a_layer_that_stands_twice(ranks: Ranks, spec: str) -> None:
    ranks.run(shared_layer, 2, spec=spec)


def without_gradients(rank: int, spec: str) -> None:
    plan = ParallelPlan.parse(spec)
    mesh = make_mesh(plan, "cpu")
    alone = Choice().double()
    model = copy.deepcopy(alone)
    # As one unit, which all processes call whatever way they take.
    parallel = data_parallel(model, plan, mesh, units=(), unused_parameters=True)
    optimizer, right = optimizer_of(model, plan, mesh), sgd(list(alone.parameters()))
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    for ways in (("left", "right"), ("left", "left"), ("right", "right")):
        x = torch.randn(4, 6, dtype=torch.float64)
        parallel(x.chunk(2)[rank], ways[rank]).square().mean().backward()
        sum(alone(part, way).square().mean() / 2 for part, way in zip(x.chunk(2), ways, strict=True)).backward()
        for each in (optimizer, right):
            each.step()
            # Then no parameter lacks a gradient, in any of the two.
            each.zero_grad(set_to_none=False)
    assert_trained(model, alone, before)


@pytest.mark.parametrize("spec", KINDS)
def test_a_process_without_some_gradients(ranks: Ranks, spec: str) -> None:
    if spec[-1] in "23" and not HAS_UNUSED:
        pytest.skip("fully_shard has this from torch 2.13 on")
    ranks.run(without_gradients, 2, spec=spec)


def too_early(rank: int) -> None:
    plan = ParallelPlan(shard=2)
    saved = FSDPModule.set_reduce_scatter_unused_params if HAS_UNUSED else None
    if HAS_UNUSED:
        del FSDPModule.set_reduce_scatter_unused_params
    try:
        with pytest.raises(RuntimeError, match=r"unused_parameters: fully_shard needs torch 2\.13 for it"):
            data_parallel(Layers(), plan, make_mesh(plan, "cpu"), unused_parameters=True)
    finally:
        if HAS_UNUSED:
            FSDPModule.set_reduce_scatter_unused_params = saved


def test_torch_that_is_too_early(ranks: Ranks) -> None:
    ranks.run(too_early, 2)


def half_precision(rank: int) -> None:
    plan = ParallelPlan(shard=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone = Layers()
    model = copy.deepcopy(alone)
    parallel = data_parallel(model, plan, make_mesh(plan, "cpu"), mp_policy=policy)
    x = torch.randn(4, 6)
    out = parallel(x.chunk(2)[rank])
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    alone(x).square().mean().backward()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        # bfloat16 keeps 8 bits, of a chain of six products.
        torch.testing.assert_close(whole(mine.grad), right.grad, rtol=0.1, atol=0.05)
    for plan in (ParallelPlan(dp=2), ParallelPlan(shard=2, zero=1)):
        with pytest.raises(ValueError, match="mp_policy: expected None where fully_shard is not used"):
            data_parallel(Layers(), plan, make_mesh(plan, "cpu"), mp_policy=policy)
    with pytest.raises(TypeError, match=r"mp_policy: expected a MixedPrecisionPolicy, got torch\.bfloat16"):
        data_parallel(Layers(), plan, make_mesh(plan, "cpu"), mp_policy=torch.bfloat16)


def test_half_precision(ranks: Ranks) -> None:
    ranks.run(half_precision, 2)


def groups_of_options(rank: int) -> None:
    """A sharded optimizer keeps groups, defaults and schedules, and each process a part of the state."""
    plan = ParallelPlan(shard=2, zero=1)
    mesh = make_mesh(plan, "cpu")
    model = data_parallel(Layers(), plan, mesh)

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        biases = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": biases, "lr": 0.5}]
        return torch.optim.AdamW(groups, lr=0.25, betas=(0.5, 0.75))

    optimizer = sharded_optimizer(factory, list(model.parameters()), mesh.get_group("shard"))
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.25, 0.3, (0.5, 0.75)),
        (0.5, 1e-2, (0.5, 0.75)),
    ]
    model(torch.randn(2, 6)).sum().backward()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    optimizer.step()
    held = len(optimizer.optim.state)
    assert 0 < held < len(list(model.parameters()))
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.125, 0.25]


def test_groups_of_a_sharded_optimizer(ranks: Ranks) -> None:
    ranks.run(groups_of_options, 2)


def test_units() -> None:
    model = Layers()
    # The first and the third layer share a weight.
    assert sharding_units(model) == [model.layers[1], model.layers[3]]
    lm = language_model()
    assert sharding_units(lm) == list(lm.blocks)
    assert sharding_units(nn.Linear(2, 2)) == []


def buffers(rank: int) -> None:
    """Tables outside the state dict are not sent in every forward, statistics are."""
    plan = ParallelPlan(dp=2)
    mesh = make_mesh(plan, "cpu")
    lm = data_parallel(language_model(), plan, mesh)
    norm = data_parallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), plan, mesh)
    assert not lm.broadcast_buffers
    assert norm.broadcast_buffers


def test_buffers(ranks: Ranks) -> None:
    ranks.run(buffers, 2)
