"""What the layouts of several formats have in common: codes of 4 bits, groups of columns, checks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dskernels.checks import shape_of, wrong_value

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Rows that are unpacked at a time, so that what stands in between is small beside a layer.
_BLOCK_ROWS = 128


def pack(codes: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 ``[N, K]``, two in a byte: uint8 ``[N, ceil(K / 2)]``, even columns in the low halves."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack`: uint8 ``[N, columns]``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, :columns]


def bytes_of(words: Tensor) -> Tensor:
    """uint8 ``[R, 4 * C]`` of int32 ``[R, C]``, lowest bits first; may share memory with ``words``."""
    # Flat first: rows or columns of one element may have any stride, which a view in another dtype does not take.
    return words.contiguous().reshape(-1).view(torch.uint8).view(words.shape[0], 4 * words.shape[1])


def words_of(codes: Tensor) -> Tensor:
    """The inverse: int32 ``[R, ceil(C / 4)]`` of uint8 ``[R, C]``, the last ones filled with 0."""
    # Padding copies, also where there is nothing to add: words do not begin everywhere in memory.
    flat = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).contiguous().reshape(-1)
    return flat.view(torch.int32).view(codes.shape[0], (codes.shape[1] + 3) // 4)


def unpack_words(words: Tensor) -> Tensor:
    """The eight codes of each int32, lowest bits first: uint8 ``[R, 8 * C]`` of ``[R, C]``."""
    return unpack(bytes_of(words), 8 * words.shape[1])


def pack_words(codes: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 ``[R, C]``, eight in an int32, the last one filled with 0: ``[R, ceil(C / 8)]``."""
    return words_of(pack(codes))


def by_rows(rows: int, columns: int, codes: Callable[[int, int], Tensor], device: torch.device) -> Tensor:
    """`pack` of codes that ``codes(first, end)`` gives for some rows at a time: uint8 ``[rows, ceil(columns / 2)]``."""
    packed = torch.empty((rows, (columns + 1) // 2), dtype=torch.uint8, device=device)
    for first in range(0, rows, _BLOCK_ROWS):
        end = min(first + _BLOCK_ROWS, rows)
        packed[first:end] = pack(codes(first, end))
    return packed


def columns_of_group(group_size: int, columns: int) -> int:
    """``group_size``, or all ``columns`` where it is -1.

    Raises:
        ValueError: `dskernels.QuantizedWeight` has no groups of that size.
    """
    if group_size in (-1, columns):
        return max(columns, 1)
    if group_size < 16 or group_size % 16 != 0:
        raise wrong_value("group_size", f"a multiple of 16, or -1 for all {columns} columns", group_size)
    return group_size


def group_order(name: str, group_of: Tensor, group_size: int) -> Tensor | None:
    """The columns, those of the first group first: what `dskernels.QuantizedWeight` calls ``input_order``.

    Args:
        name: of ``group_of`` in messages.
        group_of: integers ``[K]``, the group of each column.
        group_size: columns of a group; the last one may have fewer.

    Returns:
        int64 ``[K]``, or None where the columns are in that order already.

    Raises:
        ValueError: a group has another size.
    """
    columns = torch.arange(group_of.shape[0], device=group_of.device)
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order].to(torch.int64), columns // group_size):
        found = torch.unique(group_of, return_counts=True)
        groups, sizes = (values.tolist() for values in found)
        wrong = [f"{size} in group {group}" for group, size in zip(groups, sizes, strict=True) if size != group_size]
        expected = f"{group_size} columns in each of groups 0 to {(columns.shape[0] - 1) // group_size}"
        raise wrong_value(name, expected, ", ".join(wrong[:3]) or f"groups {groups[:3]}...")
    return None if torch.equal(order, columns) else order


def check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> None:
    """Raises a ``ValueError`` unless ``tensor`` has one of these dtypes and these sizes; -1 stands for any size."""
    if tensor.dtype not in dtypes:
        raise wrong_value(name, " or ".join(str(dtype) for dtype in dtypes), tensor.dtype)
    fits = tensor.dim() == len(sizes) and all(want in (-1, got) for want, got in zip(sizes, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size == -1 else str(size) for size in sizes)
        raise wrong_value(name, f"shape [{wanted}]", shape_of(tensor))
