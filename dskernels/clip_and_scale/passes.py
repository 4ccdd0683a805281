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


class Settled(NamedTuple):
    """What follows from the first pass: scalars on one device.

    Attributes:
        norm: of the unscaled gradients, float32.
        found_inf: 1 if an element is not finite, else 0, float32.
        factor: what to multiply all elements by, float64: 1 if that changes nothing, or must not.
    """

    norm: Tensor
    found_inf: Tensor
    factor: Tensor


PowerSum = Callable[[list[Tensor], float, torch.device], Tensor]
Settle = Callable[[ClipCall, Tensor], Settled]
Scale = Callable[[list[Tensor], Tensor], None]


def settle_reference(call: ClipCall, rows: Tensor) -> Settled:
    """The results of a call, of ``rows`` float64 ``[R, 2]`` of which each holds a sum (a maximum) and a flag."""
    maximum = math.isinf(call.norm_type)
    total, broken = (rows.amax(0) if maximum else rows.sum(0)).unbind()
    is_finite = broken == 0
    # A maximum does not tell a NaN; the other sums do.
    total = torch.where(is_finite | ~total.isfinite(), total, torch.nan) if maximum else total
    norm = total if maximum else total ** (1 / call.norm_type)
    scale = None if call.loss_scale is None else _on(rows.device, call.loss_scale)
    if scale is not None:
        norm = norm / scale
    factor = torch.ones_like(norm)
    if call.max_norm is not None:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        factor = (call.max_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale is not None:
        factor = factor / scale
    return Settled(norm.float(), 1.0 - is_finite.float(), torch.where(is_finite, factor, 1.0))


class Passes(NamedTuple):
    """Who makes the steps of a call over the tensors that are in no table.

    Attributes:
        power_sum: of a list of tensors, as `power_sum_reference`, in any number of rows.
        settle: as `settle_reference`.
        scale_: as `scale_reference_`.
    """

    power_sum: PowerSum = power_sum_reference
    settle: Settle = settle_reference
    scale_: Scale = scale_reference_


def measure(call: ClipCall, parts: list[Part], passes: Passes) -> Settled:
    """Reads all parts of a call."""
    device = _device(parts)
    rows = [_rows(part.read, call.norm_type, device, passes.power_sum) for part in parts]
    if any(part.shards.groups for part in parts):
        maximum = math.isinf(call.norm_type)
        totals = [each.amax(0) if maximum else each.sum(0) for each in rows]
        rows = [torch.stack(add_up(totals, [part.shards for part in parts], maximum))]
    return passes.settle(call, rows[0] if len(rows) == 1 else torch.cat(rows))


def scale_(parts: list[Part], factor: Tensor, passes: Passes) -> None:
    """Multiplies all gradients by ``factor`` in place, unless it is 1."""
    for part in parts:
        table = part.written.table
        # A number on the CPU, or a wait that nobody can be spared who mixes devices.
        if table is not None and table.tensors and factor != 1:
            table_scale_op(table.runs, float(factor))
            # Written past autograd, which must not take them for what a graph has kept.
            torch.autograd.graph.increment_version(table.tensors)
        if part.written.others:
            passes.scale_(part.written.others, factor)


def _device(parts: list[Part]) -> torch.device:
    others = (tensor.device for part in parts for tensor in part.read.others)
    return next((device for device in others if device.type != "cpu"), torch.device("cpu"))


def _on(device: torch.device, number: float | Tensor) -> float | Tensor:
    if not isinstance(number, Tensor):
        return number
    # What is copied to the host without waiting may be read before it is there.
    return number.to(device, torch.float64, non_blocking=device.type != "cpu").reshape(())


def _rows(tensors: Tensors, power: float, device: torch.device, power_sum: PowerSum) -> Tensor:
    rows = power_sum(tensors.others, power, device)
    if tensors.table is None or not tensors.table.tensors:
        return rows
    total, has_nonfinite = table_power_sum_op(tensors.table.runs, power)
    own = torch.tensor([[total, float(has_nonfinite)]], dtype=torch.float64).to(device, non_blocking=True)
    return own if not tensors.others else torch.cat((rows, own))
