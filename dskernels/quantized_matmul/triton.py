"""quantized_matmul in Triton: the product with codes, in one pass or split, and the gradient of x.

A step of the product is a tile of columns of one group, by `tl.dot` in the type of the codes: int8 by int8 into int32,
or x's own float by codes, which float16 and bfloat16 hold exactly, into float32. Scales are applied to sums, in
float32: to that of a step where groups share them, to that of all columns where channels do.

Few rows make few tiles, too few for the processors of a GPU. So the steps of a tile are split between programs, which
leave their sums in memory for a second kernel to add up in a fixed order: no atomics, and the same bits on every run.
Sums of int8 products stay integers until all are added, so that neither the split nor the tile shows in the result.
Splitting also bounds them: no program takes more columns than int32 holds the products of.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import math
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels._library import autocast_disabled
from dskernels.quantized_matmul.triton_codes import (
    columns_of_scale,
    dequantize,
    quantize_blocks,
    quantize_rows,
    weight_codes,
    zero_points,
)
from dskernels.quantized_matmul.weight import INT4_SCHEMES, SCHEMES


class Tile(NamedTuple):
    """How the product is cut: rows of x and of the weight, columns of a step, warps of a program, stages of loads."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By what the operands are, and rows of x up to the one given; the last one serves all others. A program fits the 99 KB
# of shared memory of consumer GPUs (sm_86, sm_89) and compiles for sm_80 without spilling registers: the tests hold it
# to both. One table instead of a search at run time: that would cost seconds a shape, and change bits between runs.
TILES = {
    "int8": {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 128, 4, 3), 128: Tile(128, 128, 64, 8, 3)},
    "int4": {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 128, 4, 3), 128: Tile(128, 128, 64, 8, 3)},
    "half": {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 64, 4, 3), 128: Tile(128, 128, 64, 8, 3)},
    "float": {16: Tile(16, 64, 32, 4, 2), 32: Tile(32, 64, 32, 4, 2)},
    "fp8": {16: Tile(16, 64, 128, 4, 3), 64: Tile(64, 64, 64, 4, 3), 128: Tile(128, 128, 64, 8, 2)},
}
# The interpreter has no shared memory to fit. Small tiles have more edges to get right; unequal ones tell rows from
# columns.
_INTERPRETED_TILE = Tile(16, 32, 64, 1, 1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What a step must have at least for `tl.dot` of int8.
_LEAST_DEPTH = 32
# Steps below which a split of its own costs more than it saves.
_SPLIT_STEPS = 4
# Columns whose int8 products, 127 * 128 at most, int32 holds the sum of.
EXACT_COLUMNS = 2**17
_JOINED_COLUMNS = 256


@triton.jit
def _store_result(total, out, row_scale, unlift, channel_scale, bias, row, column, rows, columns):
    """``total * row_scale * channel_scale * unlift + bias``, as far as they are there, rounded once into ``out``."""
    inside, wide = row < rows, column < columns
    result = total.to(tl.float32)
    if row_scale is not None:
        result = result * tl.load(row_scale + row, mask=inside, other=0.0)[:, None]
    if channel_scale is not None:
        result = result * tl.load(channel_scale + column, mask=wide, other=0.0)[None, :]
    if unlift is not None:
        result = result * tl.load(unlift + row, mask=inside, other=0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside[:, None] & wide[None, :])


@triton.jit
def _int4_product(x_tile, codes, zero):
    """``x_tile @ (codes - zero).T`` in float32, exact where x is int8."""
    if x_tile.dtype == tl.int8:
        product = tl.dot(x_tile, tl.trans(codes.to(tl.int8)), out_dtype=tl.int32)
        # A product a row and column, not a subtraction a code; nor would int8 hold every difference.
        product -= tl.sum(x_tile.to(tl.int32), 1)[:, None] * zero[None, :]
    else:
        codes = codes.to(x_tile.dtype) - zero.to(x_tile.dtype)[:, None]
        product = tl.dot(x_tile, tl.trans(codes), input_precision="ieee")
    return product.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "steps_of_split", "splits", "tiles"])
def _quantized_matmul_kernel(
    x,
    x_scale,
    qweight,
    scale,
    zero_point,
    row_scale,
    unlift,
    channel_scale,
    bias,
    out,
    x_stride,
    x_column_stride,
    rows,
    columns,
    depth,
    width,
    group_size,
    groups,
    steps_of_group,
    steps,
    steps_of_split,
    splits,
    tiles,
    INT4: tl.constexpr,
    FP8: tl.constexpr,
    REGULAR: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of ``out``; where that is not ``WHOLE``, one split of its sums.

    ``REGULAR``: a step ends where the next begins, whatever the groups, so that addresses are known to be aligned.
    """
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits
    # Tiles that read the same rows of the weight follow each other.
    row = tile % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = row < rows, column < columns
    x_row, column_64 = x + row.to(tl.int64) * x_stride, column.to(tl.int64)
    if x.dtype.element_ty == tl.int8 and not INT4:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = split * steps_of_split
    for step in range(first, tl.minimum(first + steps_of_split, steps)):
        group = step // steps_of_group
        if REGULAR:
            k, end = step * BLOCK_K, depth
        else:
            k = group * group_size + step % steps_of_group * BLOCK_K
            end = tl.minimum(group * group_size + group_size, depth)
        at = k + tl.arange(0, BLOCK_K)
        # What follows the end of a group counts for nothing, since x is 0 there.
        seen = row_inside[:, None] & (at < end)[None, :]
        x_tile = tl.load(x_row[:, None] + at.to(tl.int64)[None, :] * x_column_stride, mask=seen, other=0)
        codes = weight_codes(qweight, column, column_inside, k, width, INT4, FP8, BLOCK_N, BLOCK_K)
        if INT4:
            in_scale = column_64 * groups + group
            product = _int4_product(x_tile, codes, zero_points(zero_point, in_scale, column_inside))
            total += product * tl.load(scale + in_scale, mask=column_inside, other=0.0)[None, :]
        elif FP8:
            product = tl.dot(x_tile, tl.trans(codes))
            # One scale after the other: the product of two small ones may be nothing.
            product *= tl.load(x_scale + row.to(tl.int64) * groups + group, mask=row_inside, other=0.0)[:, None]
            in_scale = column_64 // group_size * groups + group
            total += product * tl.load(scale + in_scale, mask=column_inside, other=0.0)[None, :]
        else:
            total = tl.dot(
                x_tile, tl.trans(codes.to(x_tile.dtype)), total, input_precision="ieee", out_dtype=total.dtype
            )
    if WHOLE:
        _store_result(total, out, row_scale, unlift, channel_scale, bias, row, column, rows, columns)
    else:
        at = (split.to(tl.int64) * rows + row)[:, None] * columns + column[None, :]
        tl.store(out + at, total, mask=row_inside[:, None] & column_inside[None, :])


@triton.jit(do_not_specialize=["rows", "splits", "tiles"])
def _quantized_matmul_join_kernel(
    parts, row_scale, unlift, channel_scale, bias, out, rows, columns, splits, tiles, BLOCK_N: tl.constexpr
):
    """Some columns of one row of ``out`` from the sums of all splits, in their order."""
    row = tl.program_id(0) // tiles + tl.arange(0, 1)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    part = parts + row.to(tl.int64)[:, None] * columns + column[None, :]
    if parts.dtype.element_ty == tl.int32:
        # All of them together may be beyond int32.
        total = tl.zeros([1, BLOCK_N], tl.int64)
    else:
        total = tl.zeros([1, BLOCK_N], tl.float32)
    for _ in range(splits):
        total += tl.load(part, mask=(column < columns)[None, :], other=0)
        part += rows.to(tl.int64) * columns
    _store_result(total, out, row_scale, unlift, channel_scale, bias, row, column, rows, columns)


class Cut(NamedTuple):
    """A product as its kernel goes about it.

    Attributes:
        tile: of the table, no deeper than a group needs.
        groups: of columns that share a scale.
        steps_of_group: how many each of them takes.
        splits: how many programs share a tile.
    """

    tile: Tile
    groups: int
    steps_of_group: int
    splits: int

    @property
    def steps(self) -> int:
        return self.groups * self.steps_of_group

    @property
    def steps_of_split(self) -> int:
        return -(-self.steps // self.splits)


def tile_for(operands: str, rows: int, group_size: int) -> Tile:
    """The tile of the table for ``rows`` of x; ``operands`` is one of its keys."""
    tiles = TILES[operands]
    tile = next((tile for most, tile in tiles.items() if rows <= most), tiles[max(tiles)])
    if INTERPRETED:
        tile = _INTERPRETED_TILE
    return tile._replace(depth=min(tile.depth, max(_LEAST_DEPTH, triton.next_power_of_2(group_size))))


def split_count(tiles: int, steps: int, depth: int, processors: int) -> int:
    """How many programs share the steps of a tile: from shapes and the number of processors alone.

    Args:
        tiles: of the result.
        steps: of each.
        depth: columns of a step.
        processors: of the GPU; each holds two programs.
    """
    needed = -(-steps // (EXACT_COLUMNS // depth))
    useful = min(steps // _SPLIT_STEPS, 2 * processors // tiles)
    splits = max(1, needed, useful)
    # As many as have steps, each of them having the same number but the last.
    return -(-steps // -(-steps // splits)) if steps else 1


def cut_for(operands: str, rows: int, columns: int, depth: int, group_size: int, processors: int) -> Cut:
    """How to take the product of ``[rows, depth]`` and the codes of ``[columns, depth]``."""
    tile = tile_for(operands, rows, group_size)
    groups, steps_of_group = triton.cdiv(depth, group_size), triton.cdiv(group_size, tile.depth)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    return Cut(tile, groups, steps_of_group, split_count(tiles, groups * steps_of_group, tile.depth, processors))


class Operands(NamedTuple):
    """x as the product takes it: ``[M, K]``, and what its sums are multiplied by."""

    x: Tensor
    block_scale: Tensor | None = None
    row_scale: Tensor | None = None
    unlift: Tensor | None = None


def _operands(rows: Tensor, scheme: str, input_scale: Tensor | None) -> tuple[str, Operands]:
    """What is multiplied, as a key of `TILES` and as tensors."""
    if scheme == "fp8_block":
        return "fp8", Operands(*quantize_blocks(rows))
    if scheme.endswith("weight_only"):
        return ("float" if rows.dtype == torch.float32 else "half"), Operands(rows)
    codes, row_scale, unlift = quantize_rows(rows, input_scale)
    return scheme[:4], Operands(codes, None, row_scale, unlift)


def _processors(x: Tensor) -> int:
    # The interpreter's number makes small products be split.
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def _launch(
    operands: Operands,
    cut: Cut,
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    scheme: str,
    group_size: int,
) -> None:
    """Fills ``out`` ``[M, N]``."""
    (rows, depth), columns = operands.x.shape, qweight.shape[0]
    tile, is_int4 = cut.tile, scheme in INT4_SCHEMES
    finish = operands.row_scale, operands.unlift, scale if scheme.startswith("int8") else None, bias
    target = out
    if cut.splits > 1:
        is_exact = operands.x.dtype == torch.int8 and not is_int4
        sums = torch.int32 if is_exact else torch.float32
        target = torch.empty(cut.splits, rows, columns, dtype=sums, device=out.device)
    tiles = triton.cdiv(rows, tile.rows)
    _quantized_matmul_kernel[(tiles * triton.cdiv(columns, tile.columns) * cut.splits,)](
        operands.x,
        operands.block_scale,
        qweight,
        scale,
        zero_point,
        *finish,
        target,
        *operands.x.stride(),
        rows,
        columns,
        depth,
        qweight.shape[1],
        group_size,
        cut.groups,
        cut.steps_of_group,
        cut.steps,
        cut.steps_of_split,
        cut.splits,
        tiles,
        INT4=is_int4,
        FP8=scheme == "fp8_block",
        REGULAR=cut.groups <= 1 or group_size % tile.depth == 0,
        WHOLE=cut.splits == 1,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    if cut.splits > 1:
        tiles = triton.cdiv(columns, _JOINED_COLUMNS)
        _quantized_matmul_join_kernel[(rows * tiles,)](
            target, *finish, out, rows, columns, cut.splits, tiles, BLOCK_N=_JOINED_COLUMNS, enable_fp_fusion=False
        )


def quantized_matmul_triton(
    x: Tensor,
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    input_scale: Tensor | None,
    input_order: Tensor | None,
    bias: Tensor | None,
    scheme: int,
    group_size: int,
) -> Tensor:
    """The product of `dskernels.quantized_matmul`.

    A scale of its own for each row of x, or one for all of them, and integers up to the end: a row of int8_dynamic or
    int8_static has the same bits in every batch. In the other schemes sums are of float32, whose order follows from
    tile and split, and with them from the number of rows.
    """
    name, columns, depth = SCHEMES[scheme], qweight.shape[0], x.shape[-1]
    out = x.new_empty((*x.shape[:-1], columns))
    if out.numel() == 0:
        return out
    rows = x.reshape(math.prod(x.shape[:-1]), depth)
    if input_order is not None:
        rows = rows[:, input_order]
    group_size = columns_of_scale(name, group_size, depth)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(x):
        kind, operands = _operands(rows, name, input_scale)
        cut = cut_for(kind, rows.shape[0], columns, depth, group_size, _processors(x))
        _launch(operands, cut, qweight, scale, zero_point, bias, out, name, group_size)
    return out


def quantized_matmul_backward_triton(
    grad: Tensor,
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    input_order: Tensor | None,
    scheme: int,
    group_size: int,
    in_features: int,
) -> Tensor:
    """``grad @ W``, the gradient of ``x``, with ``W`` rounded to the dtype of ``grad`` as tensor cores take it."""
    with torch.cuda.device_of(grad):
        weight = dequantize(qweight, scale, zero_point, input_order, scheme, group_size, in_features, grad.dtype)
    with autocast_disabled(grad.device.type):
        rows = grad.reshape(math.prod(grad.shape[:-1]), qweight.shape[0])
        return (rows @ weight).reshape(*grad.shape[:-1], in_features)
