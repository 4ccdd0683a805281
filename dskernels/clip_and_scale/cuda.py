"""The norm of gradients and their scaling in CUDA C++: three launches a call, whatever the number and types of tensors.

The kernels are those of ``csrc/clip_and_scale/kernel.cu``, over the table of `dskernels.clip_and_scale.chunks`. One
launch leaves a row for each chunk, one makes of all rows the results and the factor, and one scales. The last reads the
factor from the memory of the device, so that nobody waits for it. No atomics: rows are added up in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dskernels._library import CUDA_LIBRARY, define
from dskernels.clip_and_scale.arguments import ClipCall
from dskernels.clip_and_scale.chunks import RUN_TYPES, ChunkTables
from dskernels.clip_and_scale.passes import Settled

# Only eager code reaches these: a table is the memory of one moment.
chunk_power_sums_op = define("chunk_power_sums", "(Tensor table, float power) -> Tensor", CUDA_LIBRARY)
clip_factor_op = define(
    "clip_factor",
    "(Tensor rows, float power, Tensor? loss_scale, float loss_scale_number, float? max_norm)"
    " -> (Tensor, Tensor, Tensor)",
    CUDA_LIBRARY,
)
chunk_scale_op = define("chunk_scale", "(Tensor table, Tensor factor) -> ()", CUDA_LIBRARY)


class CudaPasses:
    """The passes over the tensors of one call."""

    def __init__(self) -> None:
        self._tables = ChunkTables()

    def power_sum(self, tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
        """As `reference.power_sum_reference`, a row for each chunk, with a 1 where that is not finite."""
        table, groups = self._tables.of(tensors)
        if not groups:
            return torch.zeros(1, 2, dtype=torch.float64, device=device)
        rows: Tensor = chunk_power_sums_op(table, power)
        return rows

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiplies all tensors by ``factor`` in place, rounding once, unless it is 1."""
        table, groups = self._tables.of(tensors)
        if groups:
            chunk_scale_op(table, factor)
        # Written past autograd, which must not take them for what a graph has kept.
        torch.autograd.graph.increment_version(tensors)


def settle_cuda(call: ClipCall, rows: Tensor) -> Settled:
    """As `passes.settle_reference`."""
    scale = call.loss_scale
    if not isinstance(scale, Tensor):
        return Settled(*clip_factor_op(rows, call.norm_type, None, 1.0 if scale is None else scale, call.max_norm))
    if scale.device != rows.device or scale.dtype not in RUN_TYPES:
        # What is copied to the host without waiting may be read before it is there; the rows are on a GPU.
        scale = scale.to(rows.device, torch.float64, non_blocking=rows.device.type != "cpu")
    return Settled(*clip_factor_op(rows, call.norm_type, scale, 1.0, call.max_norm))
