"""What the tests of dsaccel.parallel share: a small model, and how to put its parts together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel import ParallelModel
from dsaccel.parallel.tensor import canonical_layout


def language_model(seed: int = 1, layers: int = 4, **options: Any) -> SlidingWindowLM:
    """Layers in float64, with gains that are not all 1."""
    torch.manual_seed(seed)
    model = SlidingWindowLM(32, 16, layers, 2, window=5, max_positions=64, hidden_dim=24, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def gathered(parts: ParallelModel, attribute: str | None = None) -> dict[str, Tensor]:
    """The parameters here, or their gradients, whole and in the layout of the model before it was made parallel."""
    layouts = {}
    found = {}
    for stage in parts.stages:
        layouts.update(canonical_layout(stage))
    for name, parameter in parts.named_parameters():
        tensor = whole(parameter if attribute is None else getattr(parameter, attribute))
        found[name] = layouts[name][0](tensor) if name in layouts else tensor
    return found
