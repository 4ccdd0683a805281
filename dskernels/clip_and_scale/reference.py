"""The norm of gradients and their scaling in plain PyTorch, tensor by tensor: what the kernels are held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def power_sum_reference(tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """The sum of ``|x| ** power`` (the maximum for inf) and the number of x that are not finite: float64 ``[2]``."""
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
    return totals


def scale_reference_(tensors: Sequence[Tensor], factor: Tensor, is_finite: Tensor) -> None:
    """Multiplies all tensors by ``factor`` in place where ``is_finite``, rounding once; no device is waited for."""
    if factor.device.type == "cpu" and (not is_finite or factor == 1):
        return
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        scaled = (tensor.to(wide) * factor.to(tensor.device, wide)).to(tensor.dtype)
        # On a device, where something is not finite each element gets itself.
        tensor.copy_(torch.where(is_finite.to(tensor.device), scaled, tensor))
