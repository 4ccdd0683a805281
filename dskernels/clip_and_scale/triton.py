"""The norm of gradients and their scaling in Triton: one launch a pass for all tensors of a dtype.

What the kernels work on is a table of chunks (`dskernels.clip_and_scale.chunks`). By what to scale, if at all, the
second pass reads from the memory of the device, so that nobody waits for the first. No atomics: each chunk has its own
sum, and these are added up in one order.

Each element is converted to float64, and powers and sums are of that: 1e20 squared is beyond float32, 1e-30 squared is
nothing in it. The other way, to scale each block by a power of two near its largest element, takes a reduction before
the first square of every block. By their data sheets, an A100 or H100 converts and multiplies faster than its memory
delivers, even 16-bit types; a GPU with a 64th of float32's rate (sm_86, sm_89) may take two to three times as long for
these, of a pass that is little of a training step. A maximum needs no float64, nor does the scaling.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels.clip_and_scale.chunks import ChunkTables, Group

WARPS = 8
# Elements that a program loads at a time, by whether vectors can be loaded; more would spill registers.
BLOCKS = {True: 4096, False: 2048}
INF = tl.constexpr(math.inf)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@triton.jit
def _chunk(table, index, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Address, number of elements and stride of a chunk."""
    row = table + 4 * index.to(tl.int64)
    x = tl.load(row).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x, tl.load(row + 1).to(tl.int32), tl.load(row + 2)


@triton.jit
def _place(x, begin, stride, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The addresses of a block of a chunk; those of an aligned one follow each other."""
    offsets = begin + tl.arange(0, BLOCK)
    return x + offsets if ALIGNED else x + offsets.to(tl.int64) * stride


@triton.jit
def _wide(x):
    """In float32, or float64 if it is that."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def _raised(magnitude, POWER: tl.constexpr):
    """``magnitude ** POWER`` in float64."""
    if POWER == 1:
        result = magnitude
    elif POWER == 2:
        result = magnitude * magnitude
    elif POWER == 3:
        result = magnitude * magnitude * magnitude
    else:
        # As a tensor: a number would be rounded to float32.
        power = tl.full([], POWER, tl.float64)
        nothing = magnitude == 0
        result = tl.where(nothing, 0.0, tl.exp2(power * tl.log2(tl.where(nothing, 1.0, magnitude))))
    return result


@triton.jit
def _with_block(total, broken, x, POWER: tl.constexpr):
    """``total`` with ``|x| ** POWER`` added, or their maximum, and ``broken`` with where x is not finite."""
    magnitude = tl.abs(_wide(x))
    # Of elements, not of the sum; and false for a NaN.
    broken = broken | ~(magnitude < float("inf"))
    if POWER == INF:
        # What a maximum makes of a NaN differs between GPU and interpreter; the flag tells of it.
        total = tl.maximum(total, tl.where(magnitude == magnitude, magnitude, 0.0))
    else:
        total += _raised(magnitude.to(tl.float64), POWER)
    return total, broken


@triton.jit(do_not_specialize=["first"])
def _power_sum_kernel(
    table,
    rows,
    first,
    POWER: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The row of a chunk: the sum of its powers, or the maximum, and 1 if it is not finite."""
    index = first + tl.program_id(0)
    x, count, stride = _chunk(table, index, ELEMENT, ALIGNED)
    # A maximum is exact in any type.
    if POWER == INF and x.dtype.element_ty != tl.float64:
        total = tl.zeros([BLOCK], tl.float32)
    else:
        total = tl.zeros([BLOCK], tl.float64)
    broken = tl.zeros([BLOCK], tl.int1)
    # Whole blocks first: with a mask whose end is anywhere, elements would be loaded one by one.
    whole = count // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        total, broken = _with_block(total, broken, tl.load(_place(x, begin, stride, ALIGNED, BLOCK)), POWER)
    if whole < count:
        rest = tl.arange(0, BLOCK) < count - whole
        values = tl.load(_place(x, whole, stride, ALIGNED, BLOCK), mask=rest, other=0.0)
        total, broken = _with_block(total, broken, values, POWER)
    of_chunk = tl.max(total, 0) if POWER == INF else tl.sum(total, 0)
    row = rows + 2 * index.to(tl.int64)
    tl.store(row, of_chunk.to(tl.float64))
    tl.store(row + 1, tl.max(broken.to(tl.int32), 0).to(tl.float64))


@triton.jit(do_not_specialize=["first"])
def _scale_kernel(table, factor, first, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Multiplies the elements of a chunk by ``factor`` in place; touches none if that is 1."""
    exact = tl.load(factor)
    if exact != 1.0:
        index = first + tl.program_id(0)
        x, count, stride = _chunk(table, index, ELEMENT, ALIGNED)
        by = exact if x.dtype.element_ty == tl.float64 else exact.to(tl.float32)
        whole = count // BLOCK * BLOCK
        for begin in range(0, whole, BLOCK):
            at = _place(x, begin, stride, ALIGNED, BLOCK)
            tl.store(at, (_wide(tl.load(at)) * by).to(ELEMENT))
        if whole < count:
            rest = tl.arange(0, BLOCK) < count - whole
            at = _place(x, whole, stride, ALIGNED, BLOCK)
            tl.store(at, (_wide(tl.load(at, mask=rest, other=0.0)) * by).to(ELEMENT), mask=rest)


class TritonPasses:
    """Both passes over the tensors of one call."""

    def __init__(self) -> None:
        self._tables = ChunkTables()

    def power_sum(self, tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
        """As `reference.power_sum_reference`, a row for each chunk, with a 1 where that is not finite."""
        table, groups = self._tables.of(tensors)
        if not groups:
            return torch.zeros(1, 2, dtype=torch.float64, device=device)
        rows = torch.empty(table.shape[0], 2, dtype=torch.float64, device=device)
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device_of(table):
            for group in groups:
                _power_sum_kernel[(group.chunks,)](
                    table, rows, group.first, POWER=power, **_constants(group), num_warps=WARPS
                )
        return rows

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiplies all tensors by ``factor`` in place, rounding once, unless it is 1."""
        table, groups = self._tables.of(tensors)
        with torch.cuda.device_of(table):
            for group in groups:
                _scale_kernel[(group.chunks,)](table, factor, group.first, **_constants(group), num_warps=WARPS)
        # Written past autograd, which must not take them for what a graph has kept.
        torch.autograd.graph.increment_version(tensors)


def _constants(group: Group) -> dict[str, object]:
    return {"ELEMENT": TYPES[group.dtype], "ALIGNED": group.is_aligned, "BLOCK": BLOCKS[group.is_aligned]}
