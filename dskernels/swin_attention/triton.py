"""Swin attention in Triton: the kernel of the forward pass, and what the operators call.

A program computes some queries of a cell for one head and, so that a bias is loaded once for many, walks over several
cells. Windows of up to 64 tokens are one tile, whose softmax is taken at once; of larger ones a program takes a tile of
queries over tiles of keys, as in Dao, "FlashAttention-2", 2023, section 2.3. No atomics: every result is written by one
program, in one order.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels.swin_attention.triton_backward import launch_cells
from dskernels.swin_attention.triton_common import (
    GEOMETRY,
    LOG2E,
    Problem,
    cells_of_program,
    head_at,
    load_bias,
    load_operand,
    load_tile,
    products_of,
    store_tile,
    tokens_of,
)
from dskernels.swin_attention.triton_tiled_backward import launch_tiles

# Beyond some cells a program has nothing more to save, and below some programs a GPU is not busy.
_PROGRAMS, _MOST_CELLS = 2048, 8


@triton.jit(do_not_specialize=[*GEOMETRY, "heads", "cells", "cells_of_program"])
def _swin_attention_fwd_kernel(
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
    out,
    out_strides,
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
    """``out`` of a tile of queries of one head, in some cells."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    TILES: tl.constexpr = (TOKENS + BLOCK_M - 1) // BLOCK_M
    WHOLE: tl.constexpr = BLOCK_M >= TOKENS and BLOCK_N >= TOKENS
    COSINE: tl.constexpr = logit_scale is not None
    geometry = (image_height, image_width, grid_width, cells_of_image, top, left)
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % heads
    first_cell = tl.program_id(0) // TILES // heads * cells_of_program
    columns = tl.arange(0, BLOCK_D)
    width = (columns < D)[None, :]
    q = head_at(qkv, head, qkv_strides, D)
    k = head_at(q, heads, qkv_strides, D)
    v = head_at(k, heads, qkv_strides, D)
    out_head = head_at(out, head, out_strides, D)
    factor = scale
    if COSINE:
        factor = tl.load(logit_scale + head)
    if HALF > 0:
        cos += head * table_stride
        sin += head * table_stride
    if bias is not None:
        bias += head.to(tl.int64) * bias_strides[0]
        if WHOLE:
            tokens = tokens_of(first_cell, 0, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
            bias_tile = load_bias(bias, bias_strides, tokens, tokens, TOKENS)

    for cell in range(first_cell, tl.minimum(first_cell + cells_of_program, cells)):
        queries = tokens_of(cell, tile * BLOCK_M, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
        q_tile, _q_swapped, q_inverse = load_operand(
            q, qkv_strides, queries, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for first_key in range(0, TOKENS, BLOCK_N):
            keys = tokens_of(cell, first_key, geometry, HEIGHT, WIDTH, WIDE, BLOCK_N)
            k_tile, _k_swapped, k_inverse = load_operand(
                k, qkv_strides, keys, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
            )
            v_tile = load_tile(v, keys, qkv_strides, columns, keys[6][:, None] & width)
            score = products_of(q_tile, k_tile, q_inverse, k_inverse, COSINE) * factor
            if bias is not None:
                if WHOLE:
                    score += bias_tile
                else:
                    score += load_bias(bias, bias_strides, queries, keys, TOKENS)
            score = tl.where(keys[6][None, :], score, float("-inf"))
            now_largest = tl.maximum(largest, tl.max(score, 1))
            # -inf - -inf is NaN: a row that has seen nothing yet is shifted by 0.
            shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
            # Subtracted before it is scaled to base 2: large scores keep their digits.
            shrink = tl.exp2((largest - shift) * LOG2E)
            p = tl.exp2((score - shift[:, None]) * LOG2E)
            total = total * shrink + tl.sum(p, 1)
            accumulator = accumulator * shrink[:, None]
            accumulator = tl.dot(p.to(v_tile.dtype), v_tile, accumulator, input_precision="ieee")
            largest = now_largest
        nothing = (total == 0)[:, None]
        # A blind row meets the values of the others in the product, which may be NaN, with weights of 0.
        result = tl.where(nothing, 0.0, accumulator / tl.where(nothing, 1.0, total[:, None]))
        store_tile(out_head, queries, out_strides, columns, queries[6][:, None] & width, result)


def swin_attention_triton(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    logit_scale: Tensor | None,
    heads: int,
    window_height: int,
    window_width: int,
    shift_height: int,
    shift_width: int,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """``out`` of `dskernels.swin_attention`."""
    window = window_height, window_width, shift_height, shift_width
    x = Problem(qkv, cos, sin, bias, logit_scale, heads, *window, scale, interleaved)
    out = qkv.new_empty((*qkv.shape[:3], qkv.shape[3] // 3))
    if out.numel() == 0:
        return out
    tile = x.tile("forward")
    assert tile is not None
    cells = cells_of_program(x.cells, heads, _PROGRAMS, _MOST_CELLS)
    programs = triton.cdiv(x.cells, cells) * heads * triton.cdiv(x.tokens, tile.queries)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(qkv):
        _swin_attention_fwd_kernel[(programs,)](
            *x.arguments(), out, out.stride(), x.cells, cells, **x.constants(tile, out)
        )
    return out


def swin_attention_backward_triton(
    grad_out: Tensor,
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    logit_scale: Tensor | None,
    heads: int,
    window_height: int,
    window_width: int,
    shift_height: int,
    shift_width: int,
    scale: float,
    interleaved: bool,
    bias_needs_grad: bool,
    logit_scale_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv, and of bias and logit_scale where they are needed, from that of ``out``."""
    window = window_height, window_width, shift_height, shift_width
    x = Problem(qkv, cos, sin, bias, logit_scale, heads, *window, scale, interleaved)
    grad_qkv = qkv.new_empty(qkv.shape)
    bias_needs_grad = bias is not None and bias_needs_grad
    logit_scale_needs_grad = logit_scale is not None and logit_scale_needs_grad
    if grad_qkv.numel() == 0:
        grad_bias = qkv.new_zeros((heads, x.tokens, x.tokens) if bias_needs_grad else (0,), dtype=torch.float32)
        return grad_qkv, grad_bias, qkv.new_zeros(heads if logit_scale_needs_grad else 0, dtype=torch.float32)
    launch = launch_tiles if x.tile("cell") is None else launch_cells
    with torch.cuda.device_of(qkv):
        grad_bias, grad_logit_scale = launch(x, grad_out, grad_qkv, bias_needs_grad, logit_scale_needs_grad)
    return grad_qkv, grad_bias, grad_logit_scale
