"""What tests of pipelines share: a model, batches, and the comparison with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel.pipeline import Pipeline, split_stages, stage_indices

VOCAB = 31


def make_model(layers: int) -> SlidingWindowLM:
    torch.manual_seed(7)
    model = SlidingWindowLM(VOCAB, 16, layers, 2, window=5, max_positions=64, hidden_dim=24)
    return model.double()


def make_batch(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_pipeline(
    model: SlidingWindowLM,
    mesh: DeviceMesh,
    *,
    per_rank: int = 1,
    wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
    **options: Any,
) -> Pipeline:
    ranks = mesh.size()
    indices = stage_indices(mesh.get_local_rank(), ranks, per_rank)
    # A copy each, as processes that hold one stage have.
    stages = [wrap(copy.deepcopy(split_stages(model, ranks * per_rank, index))) for index in indices]
    return Pipeline(stages, mesh, loss_fn=loss_fn, **options)


def parameters_of(pipeline: Pipeline) -> dict[str, nn.Parameter]:
    return {
        name.removeprefix("module."): parameter
        for module in pipeline.modules
        for name, parameter in module.named_parameters()
    }


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_equal_gradients(pipeline: Pipeline, model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    for name, parameter in parameters_of(pipeline).items():
        assert parameter.grad is not None, name
        torch.testing.assert_close(full(parameter.grad), expected[name].grad, rtol=1e-10, atol=1e-14, msg=name)


def world(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
