"""The norm of gradients and their scaling in Triton: one launch a pass for all tensors of a dtype.

What the kernels work on is a table of chunks, made on the host from the list and copied to the device once a call:
address, number of elements and the distance between two, int64 ``[3, chunks]``. Whether anything is to be scaled, and
by what, the second pass reads from the memory of the device, so that nobody waits for the first. No atomics: each chunk
has its own sum, and these are added up in one order.

Each element is converted to float64, and powers and sums are of that: 1e20 squared is beyond float32, 1e-30 squared is
nothing in it. The other way, to scale each block by a power of two near its largest element, takes a reduction before
the first square of every block. By their data sheets, an A100 or H100 converts and multiplies faster than its memory
delivers, even 16-bit types; a GPU with a 64th of float32's rate (sm_86, sm_89) may take two to three times as long for
these, of a pass that is little of a training step. A maximum needs no float64, nor does the scaling.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a chunk. A tensor of a few million fills a GPU, and the table of large ones is less than a thousandth of
# what it points to.
CHUNK = 32768
WARPS = 8
# Elements that a program loads at a time, by whether vectors can be loaded; more would spill registers.
BLOCKS = {True: 4096, False: 2048}
# Bytes that a thread loads at once, where addresses allow it.
_VECTOR = 16
# The densest dimension makes runs of a strided tensor if it has so many elements, else the longest: a run takes 24
# bytes of table.
_SHORT_RUN = 64

INF = tl.constexpr(math.inf)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@triton.jit
def _chunk(table, index, chunks, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Address, number of elements and stride of a chunk."""
    x = tl.load(table + index).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x, tl.load(table + chunks + index).to(tl.int32), tl.load(table + 2 * chunks + index)


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


@triton.jit(do_not_specialize=["first", "chunks"])
def _power_sum_kernel(
    table,
    partials,
    first,
    chunks,
    POWER: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``partials[0]`` of a chunk: the sum of its powers, or the maximum; ``partials[1]``: 1 if it is not finite."""
    index = first + tl.program_id(0)
    x, count, stride = _chunk(table, index, chunks, ELEMENT, ALIGNED)
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
    tl.store(partials + index, of_chunk.to(tl.float64))
    tl.store(partials + chunks + index, tl.max(broken.to(tl.int32), 0).to(tl.float64))


@triton.jit(do_not_specialize=["first", "chunks"])
def _scale_kernel(
    table, factor, is_finite, first, chunks, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiplies the elements of a chunk by ``factor`` in place; touches none if that is 1, or not ``is_finite``."""
    exact = tl.load(factor)
    if (tl.load(is_finite) != 0) & (exact != 1.0):
        index = first + tl.program_id(0)
        x, count, stride = _chunk(table, index, chunks, ELEMENT, ALIGNED)
        by = exact if x.dtype.element_ty == tl.float64 else exact.to(tl.float32)
        whole = count // BLOCK * BLOCK
        for begin in range(0, whole, BLOCK):
            at = _place(x, begin, stride, ALIGNED, BLOCK)
            tl.store(at, (_wide(tl.load(at)) * by).to(ELEMENT))
        if whole < count:
            rest = tl.arange(0, BLOCK) < count - whole
            at = _place(x, whole, stride, ALIGNED, BLOCK)
            tl.store(at, (_wide(tl.load(at, mask=rest, other=0.0)) * by).to(ELEMENT), mask=rest)


class Group(NamedTuple):
    """Chunks that one launch serves.

    Attributes:
        dtype: of their elements.
        is_aligned: whether these lie one after the other, from an address on that vectors may be loaded from.
        first: the first chunk of the table.
        chunks: how many there are.
    """

    dtype: torch.dtype
    is_aligned: bool
    first: int
    chunks: int


class Chunks(NamedTuple):
    """The memory of a list of tensors.

    Attributes:
        table: int64 ``[3, chunks]`` on their device: addresses, counts, strides.
        groups: which of them go together.
    """

    table: Tensor
    groups: list[Group]


class TritonPasses:
    """Both passes over the tensors of one call, which share a table where they are over the same list."""

    def __init__(self) -> None:
        self._made: list[tuple[Sequence[Tensor], Chunks]] = []

    def power_sum(self, tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
        """As `reference.power_sum_reference`, with a 1 for each chunk that is not finite."""
        table, groups = self._chunks(tensors)
        if not groups:
            return torch.zeros(2, dtype=torch.float64, device=device)
        chunks = table.shape[1]
        partials = torch.empty(2, chunks, dtype=torch.float64, device=device)
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device_of(table):
            for group in groups:
                _power_sum_kernel[(group.chunks,)](
                    table, partials, group.first, chunks, POWER=power, **_constants(group), num_warps=WARPS
                )
        return partials.amax(1) if math.isinf(power) else partials.sum(1)

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor, is_finite: Tensor) -> None:
        """Multiplies all tensors by ``factor`` in place, rounding once, unless it is 1 or not ``is_finite``."""
        table, groups = self._chunks(tensors)
        with torch.cuda.device_of(table):
            for group in groups:
                _scale_kernel[(group.chunks,)](
                    table, factor, is_finite, group.first, table.shape[1], **_constants(group), num_warps=WARPS
                )
        # Written past autograd, which must not take them for what a graph has kept.
        torch.autograd.graph.increment_version(tensors)

    def _chunks(self, tensors: Sequence[Tensor]) -> Chunks:
        for known, chunks in self._made:
            if known is tensors:
                return chunks
        self._made.append((tensors, chunks_of(tensors)))
        return self._made[-1][1]


def _constants(group: Group) -> dict[str, object]:
    return {"ELEMENT": TYPES[group.dtype], "ALIGNED": group.is_aligned, "BLOCK": BLOCKS[group.is_aligned]}


def chunks_of(tensors: Sequence[Tensor]) -> Chunks:
    """The table of tensors of one device; it points into them, and the caller keeps them alive."""
    # Thousands of small tensors cost what this loop does.
    runs: dict[torch.dtype, list[int]] = {}
    for tensor in tensors:
        of_dtype = runs.get(tensor.dtype)
        if of_dtype is None:
            of_dtype = runs[tensor.dtype] = []
        if tensor.is_contiguous():
            of_dtype += (tensor.data_ptr(), tensor.numel(), 1)
        else:
            of_dtype += _strided_runs(tensor)
    groups, pieces, first = [], [torch.empty(3, 0, dtype=torch.int64, device="cpu")], 0
    for dtype, numbers in runs.items():
        all_runs = torch.frombuffer(array("q", numbers), dtype=torch.int64).view(-1, 3)
        address, _, stride = all_runs.unbind(1)
        aligned = (stride == 1) & (address % _VECTOR == 0)
        for is_aligned in (True, False):
            piece = _cut(all_runs[aligned == is_aligned], dtype.itemsize)
            if piece.shape[1] > 0:
                pieces.append(piece)
                groups.append(Group(dtype, is_aligned, first, piece.shape[1]))
                first += piece.shape[1]
    table = torch.cat(pieces, 1)
    if groups and tensors[0].is_cuda:
        # From pinned memory nobody waits for the copy; torch hands that memory out again once it is done.
        table = table.pin_memory().to(tensors[0].device, non_blocking=True)
    return Chunks(table, groups)


def _strided_runs(tensor: Tensor) -> list[int]:
    """Address, number of elements and stride of runs that cover a tensor; in what order does not matter."""
    dims: list[tuple[int, int]] = []  # stride, size
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            # Dims that continue each other are one.
            dims[-1] = dims[-1][0], dims[-1][1] * size
        elif size > 1:
            dims.append((stride, size))
    inner = dims[0] if dims[0][1] >= _SHORT_RUN else max(dims, key=lambda dim: dim[1])
    dims.remove(inner)
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        offsets = (offsets[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    address = tensor.data_ptr() + offsets * tensor.element_size()
    return torch.stack((address, *(torch.full_like(offsets, x) for x in (inner[1], inner[0]))), 1).flatten().tolist()


def _cut(runs: Tensor, itemsize: int) -> Tensor:
    """Runs ``[R, 3]`` in chunks ``[3, C]`` of at most `CHUNK` elements, and one at least."""
    address, count, stride = runs.unbind(1)
    pieces = (count + CHUNK - 1) // CHUNK
    run = torch.repeat_interleave(pieces)
    begin = (torch.arange(run.shape[0], device="cpu") - (pieces.cumsum(0) - pieces)[run]) * CHUNK
    stride = stride[run]
    return torch.stack((address[run] + begin * stride * itemsize, (count[run] - begin).clamp(max=CHUNK), stride))
