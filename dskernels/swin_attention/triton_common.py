"""What the Triton kernels of Swin attention share: how a call is cut, where tokens lie, rotation, scores.

A program knows the cells of the grid of windows by their number and takes their tokens from the image where they lie:
partition, shift and merge are addresses, and what a cell has beyond the border is not there to be seen. Queries and
keys are rotated in float32 as they are loaded and rounded to the dtype of the inputs, since that is what tensor cores
take. Cosine attention divides the products, not what enters them: that spares the scores a rounding.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# What torch.nn.functional.normalize divides by at least.
SMALLEST_NORM = tl.constexpr(1e-12)

# Arguments of all kernels, as `Problem.geometry` has them; not one tuple, since Triton cannot be kept from compiling a
# kernel for what the numbers of a tuple happen to be.
GEOMETRY = ("image_height", "image_width", "grid_width", "cells_of_image", "top", "left")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, warps of a program, stages of the pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, bits of the inputs, and the head dimension, up to the one given. "cell" is the backward of whole cells,
# which "dq", "dkdv" and "dbias" do in parts where a window or a head is too large for it. A program fits the 99 KB of
# shared memory of consumer GPUs (sm_86, sm_89) and, without bias, rotation and cosines, compiles for sm_80 without
# spilling registers: the tests hold it to both. One table instead of a search at run time: that would cost seconds a
# shape, and change bits between runs.
TILES = {
    "forward": {
        16: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 1), 256: Tile(32, 32, 8, 1)},
        32: {32: Tile(64, 64, 8, 1), 64: Tile(64, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    },
    "cell": {
        16: {32: Tile(64, 64, 4, 1), 64: Tile(64, 64, 8, 1), 128: Tile(64, 64, 8, 1)},
        32: {32: Tile(64, 64, 8, 1)},
    },
    "dq": {
        16: {64: Tile(64, 64, 4, 1), 128: Tile(32, 64, 4, 1), 256: Tile(16, 32, 4, 1)},
        32: {32: Tile(64, 32, 8, 1), 64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    },
    "dkdv": {
        16: {64: Tile(64, 64, 8, 1), 128: Tile(32, 64, 8, 1), 256: Tile(32, 32, 8, 1)},
        32: {32: Tile(32, 64, 8, 1), 64: Tile(32, 32, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    },
    "dbias": {
        16: {64: Tile(64, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 32, 4, 1)},
        32: {32: Tile(64, 32, 8, 1), 64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    },
}
# The interpreter has no shared memory to fit. Small tiles have more edges to get right; unequal ones tell rows from
# columns.
_INTERPRETED_TILE = Tile(64, 32, 1, 1)
# The largest window whose scores are on chip as a whole.
_WHOLE_TOKENS = 64


def padded(size: int) -> int:
    """``size`` as a tile has it: a power of two, as Triton wants it, and 16 at least, as the tensor cores do."""
    return max(16, int(triton.next_power_of_2(size)))


def tile_for(kernel: str, dtype: torch.dtype, tokens: int, width: int) -> Tile | None:
    """The tile of one of the kernels of `TILES`, no larger than a window needs; None where the kernel is not for it."""
    tiles = TILES[kernel][8 * dtype.itemsize]
    tile = next((tile for widest, tile in tiles.items() if width <= widest), None)
    if tile is None or (kernel == "cell" and tokens > _WHOLE_TOKENS):
        return None
    if INTERPRETED and tokens > _WHOLE_TOKENS:
        tile = _INTERPRETED_TILE
    queries, keys = min(tile.queries, padded(tokens)), min(tile.keys, padded(tokens))
    return tile._replace(
        queries=queries, keys=keys, warps=max(1, tile.warps * queries * keys // tile.queries // tile.keys)
    )


@triton.jit
def tokens_of(
    cell, first, geometry, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The tokens of a cell from place ``first`` of the window on.

    Returns:
        The image of the cell, and the row and column of the image at which the cell begins, int64; row and column of
        each token in the cell, int64 if addresses inside of a cell are ``WIDE``; its place in the window; and whether
        it is there.
    """
    image_height, image_width, grid_width, cells_of_image, top, left = geometry
    cell_row = cell % cells_of_image // grid_width * HEIGHT - top
    cell_column = cell % cells_of_image % grid_width * WIDTH - left
    place = first + tl.arange(0, BLOCK)
    row, column = place // WIDTH, place % WIDTH
    # Row and column compared at once, in fields of 12 bits whose highest one tells what is below 0: a program holds
    # this number for every column of its scores, and registers are what it has least of.
    both = row * 4096 + column
    low = tl.maximum(-cell_row, 0) * 4096 + tl.maximum(-cell_column, 0)
    high = tl.minimum(image_height - cell_row, HEIGHT) * 4096 - 4096
    high += tl.minimum(image_width - cell_column, WIDTH) - 1
    there = (((both - low) | (high - both)) & 0x800800) == 0
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    image = cell // cells_of_image
    return image.to(tl.int64), cell_row.to(tl.int64), cell_column.to(tl.int64), row, column, place, there


@triton.jit
def address_of(x, tokens, strides, columns):
    """The addresses of components ``columns`` of tokens in ``[B, H, W, C]``.

    A cell's is int64, since a tensor may span more than 2**31 elements; what is added to it is as wide as it has to be.
    """
    image, cell_row, cell_column, row, column, _, _ = tokens
    x += image * strides[0] + cell_row * strides[1] + cell_column * strides[2]
    at = row * strides[1] + column * strides[2]
    return x + (at[:, None] + columns.to(row.dtype)[None, :] * strides[3])


@triton.jit
def load_tile(x, tokens, strides, columns, mask):
    """Components ``columns`` of tokens, and 0 where masked: what is there may be NaN, or not be there."""
    return tl.load(address_of(x, tokens, strides, columns), mask=mask, other=0.0)


@triton.jit
def load_sums(largest, inverse_total, delta, at, queries):
    """What the first kernel left of some queries; of those that are not there, zeros."""
    at += queries[5]
    row_largest = tl.load(largest + at, mask=queries[6], other=0.0)
    row_inverse = tl.load(inverse_total + at, mask=queries[6], other=0.0)
    return row_largest, row_inverse, tl.load(delta + at, mask=queries[6], other=0.0)


@triton.jit
def load_seen(grad_out, strides, queries, columns, inverse_total, D: tl.constexpr):
    """Gradients of the outputs; what comes back to a row that sees nothing counts for nothing, be it NaN."""
    mask = (queries[6] & (inverse_total != 0))[:, None] & (columns < D)[None, :]
    return load_tile(grad_out, queries, strides, columns, mask)


@triton.jit
def store_tile(x, tokens, strides, columns, mask, values):
    """Stores a tile in the dtype of ``x``."""
    tl.store(address_of(x, tokens, strides, columns), values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_bias(bias, bias_strides, queries, keys, TOKENS: tl.constexpr):
    """The bias of a tile, in float32, and 0 beyond the window."""
    row, column = queries[5], keys[5]
    wide = queries[3].dtype
    at = row.to(wide)[:, None] * bias_strides[1] + column.to(wide)[None, :] * bias_strides[2]
    inside = (row < TOKENS)[:, None] & (column < TOKENS)[None, :]
    return tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotation_of(tokens, columns, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Cosines and signed sines of a tile: rotated, component c is ``x[c] * cos[c] + x[partner of c] * sin[c]``."""
    if INTERLEAVED:
        pair = columns // 2
        is_first = columns % 2 == 0
    else:
        is_first = columns < HALF
        pair = tl.where(is_first, columns, columns - HALF)
    turns = tokens[6][:, None] & (columns < 2 * HALF)[None, :]
    at = tokens[5][:, None] * HALF + pair[None, :]
    c = tl.load(cos + at, mask=turns, other=1.0)
    s = tl.load(sin + at, mask=turns, other=0.0)
    return c, tl.where(is_first[None, :], -s, s)


@triton.jit
def load_operand(
    x,
    strides,
    tokens,
    columns,
    cos,
    sin,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COSINE: tl.constexpr,
):
    """A tile of queries or keys as it enters the products.

    Returns:
        The tile, rotated; the same with the components of each pair swapped (without rotation, the tile); and what its
        rows are to be multiplied by in the products: ``1 / |x|`` in cosine attention, else 1.
    """
    mask = tokens[6][:, None] & (columns < D)[None, :]
    tile = load_tile(x, tokens, strides, columns, mask)
    inverse = tl.full([tile.shape[0]], 1.0, tl.float32)
    if COSINE:
        inverse = 1 / tl.maximum(norm_of(tile), SMALLEST_NORM)
    swapped = tile
    if HALF > 0:
        if INTERLEAVED:
            partner = columns ^ 1
        else:
            partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
            if HALF % 8 == 0:
                # Which Triton does not see: eight at a time lie together.
                partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
        others = load_tile(x, tokens, strides, partner, mask & (columns < 2 * HALF)[None, :]).to(tl.float32)
        c, s = rotation_of(tokens, columns, cos, sin, HALF, INTERLEAVED)
        wide = tile.to(tl.float32)
        # Partners share a cosine, and their sines differ in sign.
        swapped = (others * c - wide * s).to(tile.dtype)
        tile = (wide * c + others * s).to(tile.dtype)
    return tile, swapped, inverse


@triton.jit
def norm_of(tile):
    wide = tile.to(tl.float32)
    return tl.sqrt(tl.sum(wide * wide, 1))


@triton.jit
def products_of(q, k, q_inverse, k_inverse, COSINE: tl.constexpr):
    """Dot products of queries and keys, or their cosines, in float32."""
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    if COSINE:
        products = products * q_inverse[:, None] * k_inverse[None, :]
    return products


@triton.jit
def head_at(x, head, strides, D: tl.constexpr):
    """The address of the first component of a head: of q in ``[B, H, W, 3 * C]``, or in ``[B, H, W, C]``."""
    return x + head.to(tl.int64) * D * strides[3]


class Problem(NamedTuple):
    """A call as the kernels see it; the tables have one layer, or one a head."""

    qkv: Tensor
    cos: Tensor | None
    sin: Tensor | None
    bias: Tensor | None
    logit_scale: Tensor | None
    heads: int
    window_height: int
    window_width: int
    shift_height: int
    shift_width: int
    scale: float
    interleaved: bool

    @property
    def tokens(self) -> int:
        return self.window_height * self.window_width

    @property
    def head_dim(self) -> int:
        return self.qkv.shape[3] // (3 * self.heads)

    @property
    def geometry(self) -> tuple[int, int, int, int, int, int]:
        """Size of the image, columns and cells of its grid, and how far the first cell stands above and left of it."""
        _, height, width, _ = self.qkv.shape
        top, left = -self.shift_height % self.window_height, -self.shift_width % self.window_width
        rows, columns = -(-(height + top) // self.window_height), -(-(width + left) // self.window_width)
        return height, width, columns, rows * columns, top, left

    @property
    def cells(self) -> int:
        """Of all images."""
        return self.qkv.shape[0] * self.geometry[3]

    def tile(self, kernel: str) -> Tile | None:
        return tile_for(kernel, self.qkv.dtype, self.tokens, self.head_dim)

    def _is_wide(self, *images: Tensor) -> bool:
        """Whether offsets inside of a cell, of one of the images or of qkv, or inside of the bias, are beyond int32."""
        height, width, depth = self.window_height, self.window_width, padded(self.head_dim)
        spans = [height * x.stride(1) + width * x.stride(2) + depth * x.stride(3) for x in (self.qkv, *images)]
        if self.bias is not None:
            spans.append(self.tokens * (self.bias.stride(1) + self.bias.stride(2)))
        return max(spans) >= 2**31

    def arguments(self) -> tuple[Any, ...]:
        """The inputs, in the order of every kernel."""
        cos, sin, logit_scale = (x if x is None else x.contiguous() for x in (self.cos, self.sin, self.logit_scale))
        bias_strides = (0, 0, 0) if self.bias is None else self.bias.stride()
        table_stride = 0 if cos is None or cos.shape[0] == 1 else cos.stride(0)
        strides = self.qkv.stride(), bias_strides, table_stride
        return self.qkv, cos, sin, self.bias, logit_scale, *strides, *self.geometry, self.heads, self.scale

    def constants(self, tile: Tile, *images: Tensor) -> dict[str, Any]:
        """What a kernel is compiled for; ``images`` are what it takes besides the inputs."""
        return {
            "HEIGHT": self.window_height,
            "WIDTH": self.window_width,
            "D": self.head_dim,
            "BLOCK_D": padded(self.head_dim),
            "HALF": 0 if self.cos is None else self.cos.shape[2],
            "INTERLEAVED": self.interleaved,
            "WIDE": self._is_wide(*images),
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def cells_of_program(cells: int, heads: int, programs: int, most: int) -> int:
    """How many cells a program walks over so that ``programs`` or more are left; from shapes alone, up to ``most``."""
    return max(1, min(most, cells * heads // programs))
