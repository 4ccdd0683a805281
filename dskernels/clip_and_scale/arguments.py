"""The arguments of clip_and_scale: what the public functions check, and how a list of gradients is sorted out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import why_no_kernel
from dskernels.checks import is_number, shape_of, wrong_type, wrong_value
from dskernels.clip_and_scale.sharding import Local, Shards, local_part
from dskernels.clip_and_scale.table import Table, tensor_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Tensors(NamedTuple):
    """Strided tensors of this process.

    Attributes:
        table: those that are dense floats on the CPU, where a backend takes tables; else None.
        others: the others.
    """

    table: Table | None
    others: list[Tensor]


class Part(NamedTuple):
    """Gradients whose sums are added up over the same process groups.

    Attributes:
        read: whose norm counts.
        written: what is scaled; the same tensors but for sparse gradients with several entries of one place, and
            DTensors whose sum is still to be taken.
        shards: the groups over which the sum of the local ones has to be added up.
    """

    read: Tensors
    written: Tensors
    shards: Shards


class Gradients:
    """A list of gradients, sorted out when a backend asks for it, and kept alive for what points into it."""

    def __init__(self, grads: list[Tensor | None]) -> None:
        self._grads = grads
        self._parts: dict[bool, list[Part]] = {}

    def parts(self, *, in_tables: bool) -> list[Part]:
        """The gradients by process groups; those that are dense on the CPU in tables or not."""
        if in_tables not in self._parts:
            tabled = self._parts.get(True, [])
            # To sort out takes a while, and for some DTensors communication: not twice where the tables hold nothing.
            if not tabled or any(_has_table(part) for part in tabled):
                tabled = _parts(self._grads, in_tables)
            self._parts[in_tables] = tabled
        return self._parts[in_tables]

    def check_writable(self) -> None:
        """Whether each element has a place of its own in memory."""
        # What shares memory is in no table, and that list is short where tables can be had.
        in_tables = why_no_kernel("table_power_sum", "CPU") is None
        for part in self.parts(in_tables=in_tables):
            for tensor in part.written.others:
                if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                    # The piece of a DTensor and the values of a sparse tensor are not in the list themselves.
                    name = next((f"grads[{i}]" for i, grad in enumerate(self._grads) if grad is tensor), "grads")
                    strides = f"strides {list(tensor.stride())} for shape {shape_of(tensor)}"
                    raise wrong_value(name, "a place in memory for each element", strides)


class ClipCall(NamedTuple):
    """The validated arguments of a call."""

    grads: Gradients
    max_norm: float | None
    loss_scale: float | Tensor | None
    norm_type: float
    error_if_nonfinite: bool


def prepare(
    grads: Tensor | Iterable[Tensor | None],
    *,
    max_norm: float | None = None,
    loss_scale: float | Tensor | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> ClipCall:
    """The call of `dskernels.clip_and_scale_`."""
    call = prepare_norm(grads, loss_scale=loss_scale, norm_type=norm_type)
    if max_norm is not None:
        if not is_number(max_norm):
            raise wrong_type("max_norm", "a number or None", max_norm)
        if not max_norm >= 0:
            raise wrong_value("max_norm", "a number not below 0, or None", max_norm)
    if not isinstance(error_if_nonfinite, bool):
        raise wrong_type("error_if_nonfinite", "a bool", error_if_nonfinite)
    call.grads.check_writable()
    return call._replace(max_norm=max_norm, error_if_nonfinite=error_if_nonfinite)


def prepare_norm(
    grads: Tensor | Iterable[Tensor | None], *, loss_scale: float | Tensor | None = None, norm_type: float = 2.0
) -> ClipCall:
    """The call of `dskernels.grad_norm`."""
    grads = [grads] if isinstance(grads, Tensor) else list(grads)
    _check_loss_scale(loss_scale)
    if not is_number(norm_type):
        raise wrong_type("norm_type", "a number", norm_type)
    if not norm_type > 0:
        raise wrong_value("norm_type", "a positive number or inf", norm_type)
    return ClipCall(Gradients(grads), None, loss_scale, float(norm_type), False)


def _check_loss_scale(loss_scale: float | Tensor | None) -> None:
    if isinstance(loss_scale, Tensor):
        if loss_scale.numel() != 1 or not loss_scale.is_floating_point():
            raise wrong_value("loss_scale", "one floating point number", f"{shape_of(loss_scale)}, {loss_scale.dtype}")
    elif loss_scale is not None:
        if not is_number(loss_scale):
            raise wrong_type("loss_scale", "a number, a tensor or None", loss_scale)
        if not 0 < loss_scale < math.inf:
            raise wrong_value("loss_scale", "a positive finite number", loss_scale)


def _parts(grads: list[Tensor | None], in_tables: bool) -> list[Part]:
    table = tensor_table(grads) if in_tables else None
    rest = range(len(grads)) if table is None else table.rest
    groups: dict[Shards, list[Local]] = {Shards(): []}
    seen: set[int] = set()
    for place in rest:
        grad = grads[place]
        if grad is None or id(grad) in seen:
            continue
        seen.add(id(grad))
        if not isinstance(grad, Tensor):
            raise wrong_type(f"grads[{place}]", "a tensor or None", grad)
        local = local_part(grad, place)
        if local.read.dtype not in DTYPES:
            raise wrong_value(f"grads[{place}]", "dtype float32, bfloat16, float16 or float64", local.read.dtype)
        groups.setdefault(local.shards, []).append(local)
    parts = []
    if table is not None:
        plain = Tensors(table, [])
        parts.append(Part(plain, plain, Shards()))
    for shards, pieces in groups.items():
        read = _tensors([piece.read for piece in pieces], in_tables)
        same = all(piece.read is piece.written for piece in pieces)
        written = read if same else _tensors([piece.written for piece in pieces], in_tables)
        parts.append(Part(read, written, shards))
    return parts


def _has_table(part: Part) -> bool:
    return any(side.table is not None and side.table.tensors for side in (part.read, part.written))


def _tensors(tensors: list[Tensor], in_tables: bool) -> Tensors:
    if not in_tables or not tensors:
        return Tensors(None, tensors)
    table = tensor_table(tensors)
    return Tensors(table, [tensors[place] for place in table.rest])
