"""The norm of gradients and their scaling in plain PyTorch, tensor by tensor: what the kernels are held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def power_sum_reference(tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """The sum of ``|x| ** power`` (the maximum for inf) and the number of x that are not finite: float64 ``[1, 2]``."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        # The finite-ness of elements, not of the sum: large gradients are not broken ones.
        broken = (~tensor.isfinite()).sum()
        if math.isinf(power):
            value = tensor.abs().max().double()
            totals[0] = torch.maximum(totals[0], value.to(device))
        else:
            value = tensor.double().abs().pow(power).sum()
            totals[0] += value.to(device)
        totals[1] += broken.to(device)
    return totals[None]


def scale_reference_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all tensors by ``factor`` in place, rounding once, unless it is 1; no device is waited for."""
    if factor.device.type == "cpu" and factor == 1:
        return
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        by = factor.to(tensor.device, wide)
        # On a device each element gets itself where nothing is to change.
        tensor.copy_(torch.where(by == 1, tensor, (tensor.to(wide) * by).to(tensor.dtype)))
