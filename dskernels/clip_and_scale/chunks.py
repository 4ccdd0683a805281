"""Where the elements of a list of tensors lie, as the kernels for GPUs take it: a table of chunks of memory.

It is made on the host from the list and copied to the device once a call. From pinned memory nobody waits for the copy.
A CUDA graph holds that copy and repeats it: torch neither frees nor hands out again what pinned memory it gave out
during a capture while the graph lives. So a graph works on the same gradients each time, and those have to stay where
they were.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a chunk. A tensor of a few million fills a GPU, and the table of large ones is less than a thousandth of
# what it points to.
CHUNK = 32768
# As RunType in csrc/common/tensor_table.h.
RUN_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# Bytes that a thread loads at once, where addresses allow it.
_VECTOR = 16
# The densest dimension makes runs of a strided tensor if it has so many elements, else the longest: a run takes 32
# bytes of table.
_SHORT_RUN = 64


class Group(NamedTuple):
    """Chunks that follow each other in the table and are alike.

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
        table: int64 ``[chunks, 4]`` on their device: address, number of elements, distance between two, `RUN_TYPES`.
        groups: which of them one launch can serve whose kernel is of one type.
    """

    table: Tensor
    groups: list[Group]


class ChunkTables:
    """The tables of the lists of one call, which its passes share where they are over the same list."""

    def __init__(self) -> None:
        self._made: list[tuple[Sequence[Tensor], Chunks]] = []

    def of(self, tensors: Sequence[Tensor]) -> Chunks:
        """The chunks of a list, which the caller keeps alive and as it is."""
        for known, chunks in self._made:
            if known is tensors:
                return chunks
        self._made.append((tensors, chunks_of(tensors)))
        return self._made[-1][1]


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
    groups, pieces, first = [], [torch.empty(0, 4, dtype=torch.int64, device="cpu")], 0
    for dtype, numbers in runs.items():
        all_runs = torch.frombuffer(array("q", numbers), dtype=torch.int64).view(-1, 3)
        address, _, stride = all_runs.unbind(1)
        aligned = (stride == 1) & (address % _VECTOR == 0)
        for is_aligned in (True, False):
            piece = _cut(all_runs[aligned == is_aligned], dtype)
            if piece.shape[0] > 0:
                pieces.append(piece)
                groups.append(Group(dtype, is_aligned, first, piece.shape[0]))
                first += piece.shape[0]
    table = torch.cat(pieces)
    if groups and tensors[0].is_cuda:
        # Torch hands pinned memory out again once the copy is done.
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


def _cut(runs: Tensor, dtype: torch.dtype) -> Tensor:
    """Runs ``[R, 3]`` in chunks ``[C, 4]`` of at most `CHUNK` elements, and one at least."""
    address, count, stride = runs.unbind(1)
    pieces = (count + CHUNK - 1) // CHUNK
    run = torch.repeat_interleave(pieces)
    begin = (torch.arange(run.shape[0], device="cpu") - (pieces.cumsum(0) - pieces)[run]) * CHUNK
    stride = stride[run]
    address = address[run] + begin * stride * dtype.itemsize
    return torch.stack(
        (address, (count[run] - begin).clamp(max=CHUNK), stride, torch.full_like(run, RUN_TYPES[dtype])), 1
    )
