"""The two passes over gradients, whoever adds up and multiplies: one that reads, and one that reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dskernels.clip_and_scale.arguments import ClipCall, Part, Tensors
from dskernels.clip_and_scale.reference import power_sum_reference, scale_reference_
from dskernels.clip_and_scale.sharding import add_up
from dskernels.clip_and_scale.table import table_power_sum_op, table_scale_op

PowerSum = Callable[[list[Tensor], float, torch.device], Tensor]
Scale = Callable[[list[Tensor], Tensor, Tensor], None]


class Measured(NamedTuple):
    """What the first pass finds: float64 scalars on one device.

    Attributes:
        norm: of the unscaled gradients.
        is_finite: whether all elements are, bool.
    """

    norm: Tensor
    is_finite: Tensor


def measure(call: ClipCall, parts: list[Part], power_sum: PowerSum = power_sum_reference) -> Measured:
    """The norm over all parts of a call; ``power_sum`` serves the tensors that are in no table."""
    maximum, device = math.isinf(call.norm_type), _device(parts)
    own = [_totals(part.read, call.norm_type, device, power_sum) for part in parts]
    totals = torch.stack(add_up(own, [part.shards for part in parts], maximum))
    total, broken = (totals.amax(0) if maximum else totals.sum(0)).unbind()
    # A maximum does not tell a NaN; the other sums do.
    total = torch.where((broken > 0) & total.isfinite(), torch.nan, total) if maximum else total
    norm = total if maximum else total ** (1 / call.norm_type)
    if call.loss_scale is not None:
        norm = norm / _on(device, call.loss_scale)
    return Measured(norm, broken == 0)


def result_of(measured: Measured) -> tuple[Tensor, Tensor]:
    """The norm and the flag as users get them: float32."""
    return measured.norm.float(), 1.0 - measured.is_finite.float()


def scale_(call: ClipCall, parts: list[Part], measured: Measured, scale: Scale = scale_reference_) -> None:
    """Unscales and clips the gradients in place, unless that would change nothing or something is not finite."""
    norm, is_finite = measured
    factor = torch.ones_like(norm)
    if call.max_norm is not None:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        factor = (call.max_norm / (norm + 1e-6)).clamp(max=1.0)
    if call.loss_scale is not None:
        factor = factor / _on(norm.device, call.loss_scale)
    for part in parts:
        table = part.written.table
        # Both are numbers on the CPU, or a wait that nobody can be spared who mixes devices.
        if table is not None and table.tensors and is_finite and factor != 1:
            table_scale_op(table.runs, float(factor))
            # Written past autograd, which must not take them for what a graph has kept.
            torch.autograd.graph.increment_version(table.tensors)
        if part.written.others:
            scale(part.written.others, factor, is_finite)


def _device(parts: list[Part]) -> torch.device:
    others = (tensor.device for part in parts for tensor in part.read.others)
    return next((device for device in others if device.type != "cpu"), torch.device("cpu"))


def _on(device: torch.device, number: float | Tensor) -> float | Tensor:
    if not isinstance(number, Tensor):
        return number
    # What is copied to the host without waiting may be read before it is there.
    return number.to(device, torch.float64, non_blocking=device.type != "cpu").reshape(())


def _totals(tensors: Tensors, power: float, device: torch.device, power_sum: PowerSum) -> Tensor:
    totals = power_sum(tensors.others, power, device)
    if tensors.table is None or not tensors.table.tensors:
        return totals
    total, has_nonfinite = table_power_sum_op(tensors.table.runs, power)
    own = torch.tensor([total, float(has_nonfinite)], dtype=torch.float64).to(device, non_blocking=True)
    return torch.maximum(totals, own) if math.isinf(power) else totals + own
