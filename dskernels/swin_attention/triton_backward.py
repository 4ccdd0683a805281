"""Swin attention in Triton: the backward pass of windows whose scores are on chip as a whole.

The softmax is computed again, which costs less than to read it. A program walks over some cells for one head: the
gradients of their queries, keys and values are written once, those of the bias and of the logit scale summed up in
registers. A last sum over programs, in a fixed order and with no atomics, gives the same bits on every run.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels.swin_attention.triton_common import (
    GEOMETRY,
    LOG2E,
    SMALLEST_NORM,
    Problem,
    cells_of_program,
    head_at,
    load_bias,
    load_operand,
    load_tile,
    norm_of,
    products_of,
    rotation_of,
    store_tile,
    tokens_of,
)

# Fewer programs leave a GPU idle; more cells make the sums of a program, which it writes once, no cheaper to speak of.
_PROGRAMS, _MOST_CELLS = 1024, 32


@triton.jit
def weights_of(products, added, pairs, largest, inverse_total, factor):
    """The softmax's weights of a tile; ``largest`` and ``inverse_total`` of a row that sees nothing are 0."""
    score = tl.where(pairs, products * factor + added, float("-inf"))
    # Subtracted before it is scaled to base 2: large scores keep their digits.
    return tl.where(pairs, tl.exp2((score - largest[:, None]) * LOG2E) * inverse_total[:, None], 0.0)


@triton.jit
def unit(tile, inverse, COSINE: tl.constexpr):
    """A tile as the gradients of its partners take it: of length 1 in cosine attention."""
    if COSINE:
        tile = (tile.to(tl.float32) * inverse[:, None]).to(tile.dtype)
    return tile


@triton.jit
def accumulate(ds, operand, swapped, inverse, grad, grad_swapped, HALF: tl.constexpr, COSINE: tl.constexpr):
    """Adds ``ds @ operand`` to ``grad``, and to ``grad_swapped`` the same with the components of pairs swapped.

    The second product spares a swap of what is in registers, which `turned_back` needs.
    """
    ds = ds.to(operand.dtype)
    grad = tl.dot(ds, unit(operand, inverse, COSINE), grad, input_precision="ieee")
    if HALF > 0:
        grad_swapped = tl.dot(ds, unit(swapped, inverse, COSINE), grad_swapped, input_precision="ieee")
    return grad, grad_swapped


@triton.jit
def turned_back(
    grad,
    grad_swapped,
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
    """The gradient of queries or keys ``x`` from that of what `load_operand` made of them."""
    if HALF > 0:
        c, s = rotation_of(tokens, columns, cos, sin, HALF, INTERLEAVED)
        grad = grad * c - grad_swapped * s
    if COSINE:
        mask = tokens[6][:, None] & (columns < D)[None, :]
        tile = load_tile(x, tokens, strides, columns, mask).to(tl.float32)
        norm = norm_of(tile)
        inverse = 1 / tl.maximum(norm, SMALLEST_NORM)
        tile *= inverse[:, None]
        # Below the smallest norm the divisor is a constant.
        along = tl.where(norm > SMALLEST_NORM, tl.sum(tile * grad, 1), 0.0)
        grad = (grad - tile * along[:, None]) * inverse[:, None]
    return grad


@triton.jit(do_not_specialize=[*GEOMETRY, "heads", "cells", "cells_of_program"])
def _swin_attention_bwd_cell_kernel(
    qkv,
    cos,
    sin,
    bias,
    logit_scale,
    qkv_strides,
    bias_strides,
    table_stride,
    image_height,
    image_width,
    grid_width,
    cells_of_image,
    top,
    left,
    heads,
    scale,
    grad_out,
    grad_qkv,
    bias_sums,
    scale_sums,
    grad_out_strides,
    grad_qkv_strides,
    cells,
    cells_of_program,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``grad_qkv`` of one head in some cells, and their sums ``[programs, heads, ...]``; of square tiles."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    COSINE: tl.constexpr = logit_scale is not None
    geometry = (image_height, image_width, grid_width, cells_of_image, top, left)
    chunk, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    first_cell = chunk * cells_of_program
    columns = tl.arange(0, BLOCK_D)
    q = head_at(qkv, head, qkv_strides, D)
    k = head_at(q, heads, qkv_strides, D)
    v = head_at(k, heads, qkv_strides, D)
    do_head = head_at(grad_out, head, grad_out_strides, D)
    dq_head = head_at(grad_qkv, head, grad_qkv_strides, D)
    dk_head = head_at(dq_head, heads, grad_qkv_strides, D)
    dv_head = head_at(dk_head, heads, grad_qkv_strides, D)
    factor = scale
    if COSINE:
        factor = tl.load(logit_scale + head)
    if HALF > 0:
        cos += head * table_stride
        sin += head * table_stride
    places = tl.arange(0, BLOCK_M)
    added = 0.0
    if bias is not None:
        tokens = tokens_of(first_cell, 0, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
        added = load_bias(bias + head.to(tl.int64) * bias_strides[0], bias_strides, tokens, tokens, TOKENS)
    bias_sum = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    scale_sum = tl.zeros([BLOCK_M], tl.float32)

    for cell in range(first_cell, tl.minimum(first_cell + cells_of_program, cells)):
        tokens = tokens_of(cell, 0, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
        there = tokens[6]
        mask = there[:, None] & (columns < D)[None, :]
        pairs = there[:, None] & there[None, :]
        q_tile, q_swapped, q_inverse = load_operand(
            q, qkv_strides, tokens, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        k_tile, k_swapped, k_inverse = load_operand(
            k, qkv_strides, tokens, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        v_tile = load_tile(v, tokens, qkv_strides, columns, mask)
        do_tile = load_tile(do_head, tokens, grad_out_strides, columns, mask)
        products = products_of(q_tile, k_tile, q_inverse, k_inverse, COSINE)
        score = tl.where(pairs, products * factor + added, float("-inf"))
        largest = tl.max(score, 1)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.exp2((score - largest[:, None]) * LOG2E), 1)
        is_blind = total == 0
        inverse_total = tl.where(is_blind, 0.0, 1 / tl.where(is_blind, 1.0, total))
        # What comes back to a row that sees nothing counts for nothing, be it NaN.
        do_tile = tl.where(is_blind[:, None], 0.0, do_tile).to(do_tile.dtype)
        p = weights_of(products, added, pairs, largest, inverse_total, factor)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision="ieee")
        store_tile(dv_head, tokens, grad_qkv_strides, columns, mask, dv)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if bias_sums is not None:
            bias_sum += ds
        if scale_sums is not None:
            scale_sum += tl.sum(ds * products, 1)
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dq, dq_swapped = accumulate(ds, k_tile, k_swapped, k_inverse, zeros, zeros, HALF, COSINE)
        dq = turned_back(
            dq * factor, dq_swapped * factor, q, qkv_strides, tokens, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        store_tile(dq_head, tokens, grad_qkv_strides, columns, mask, dq)
        dk, dk_swapped = accumulate(tl.trans(ds), q_tile, q_swapped, q_inverse, zeros, zeros, HALF, COSINE)
        dk = turned_back(
            dk * factor, dk_swapped * factor, k, qkv_strides, tokens, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        store_tile(dk_head, tokens, grad_qkv_strides, columns, mask, dk)

    if bias_sums is not None:
        bias_sums += tl.program_id(0).to(tl.int64) * TOKENS * TOKENS
        inside = places < TOKENS
        at = places[:, None] * TOKENS + places[None, :]
        tl.store(bias_sums + at, bias_sum, mask=inside[:, None] & inside[None, :])
    if scale_sums is not None:
        tl.store(scale_sums + tl.program_id(0), tl.sum(scale_sum, 0))


def new_sums(x: Problem, programs: int, *shape: int, needed: bool) -> Tensor | None:
    """Room for the sums of some programs a head, ``[programs, heads, *shape]``."""
    return torch.empty(programs, x.heads, *shape, dtype=torch.float32, device=x.qkv.device) if needed else None


def joined(x: Problem, sums: Tensor | None) -> Tensor:
    """The sum over programs, in a fixed order."""
    return torch.empty(0, dtype=torch.float32, device=x.qkv.device) if sums is None else sums.sum(0)


def launch_cells(
    x: Problem, grad_out: Tensor, grad_qkv: Tensor, bias_needs_grad: bool, logit_scale_needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Fills ``grad_qkv``, and returns the gradients of bias and logit_scale, empty where they are not needed."""
    tile = x.tile("cell")
    assert tile is not None
    cells = cells_of_program(x.cells, x.heads, _PROGRAMS, _MOST_CELLS)
    programs = triton.cdiv(x.cells, cells)
    bias_sums = new_sums(x, programs, x.tokens, x.tokens, needed=bias_needs_grad)
    scale_sums = new_sums(x, programs, needed=logit_scale_needs_grad)
    _swin_attention_bwd_cell_kernel[(programs * x.heads,)](
        *x.arguments(),
        grad_out,
        grad_qkv,
        bias_sums,
        scale_sums,
        grad_out.stride(),
        grad_qkv.stride(),
        x.cells,
        cells,
        **x.constants(tile, grad_out, grad_qkv),
    )
    return joined(x, bias_sums), joined(x, scale_sums)
