"""A model for tests of how models are split over ranks, and what is compared."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import dskernels
from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel.tensor import canonical_layout

VOCABULARY = 28


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def language_model(**options: Any) -> SlidingWindowLM:
    torch.manual_seed(1)
    options = {"num_heads": 8, "num_kv_heads": 4, "hidden_dim": 24, "window": 7, "max_positions": 64, **options}
    model = SlidingWindowLM(VOCABULARY, 16, 2, **options).double()
    with torch.no_grad():
        for block in model.blocks:
            # Gains of 1 and small residuals would hide what is wrong with them.
            for parameter in block.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(length))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, length: int) -> Tensor:
    inputs, targets = batch(length)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def canonical(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layout = canonical_layout(model)
    ordered = {name: layout[name][0](x) if name in layout else x for name, x in tensors.items()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in ordered.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not any(grad is None for grad in found.values())
    return canonical(model, found)  # type: ignore[arg-type]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return canonical(model, {name: parameter.detach() for name, parameter in model.named_parameters()})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        said = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12, msg=said)


def train(model: nn.Module, lengths: list[int]) -> list[Tensor]:
    """Losses and clipped norms of a step of each length; gradients of the last one stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    for length in lengths:
        optimizer.zero_grad()
        loss = loss_of(model, length)
        loss.backward()
        norm, _ = dskernels.clip_and_scale_([x.grad for x in model.parameters()], max_norm=0.5)
        optimizer.step()
        said += [loss.detach(), norm]
    return said
