"""torch's own loss scaler, of a scale that stays."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def grad_scaler(scale: float, device: str) -> torch.amp.GradScaler:
    """A GradScaler that has seen a loss, and keeps its scale."""
    scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=2**31 - 1)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def unscale_(scaler: torch.amp.GradScaler, optimizer: Optimizer, *, again: bool = False) -> None:
    """``scaler.unscale_``, for float16 gradients too, which the public method refuses.

    ``again``: although there was no ``update`` since the last time; that costs less than to call it.
    """
    if again:
        scaler._per_optimizer_states.clear()
    # The parameters of a problem have one dtype.
    if all(param.dtype != torch.float16 for group in optimizer.param_groups for param in group["params"][:1]):
        scaler.unscale_(optimizer)
        return
    scale = scaler._scale
    assert scale is not None
    found_inf = torch.full((), 0.0, device=scale.device)
    scaler._unscale_grads_(optimizer, scale.double().reciprocal().float(), found_inf, True)
