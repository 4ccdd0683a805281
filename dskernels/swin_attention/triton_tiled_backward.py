"""Swin attention in Triton: the backward pass of larger windows and heads, tile by tile.

Three kernels, each of which computes the scores of its tiles again: the gradient of a tile of queries, over the keys of
their cell, which also leaves the sums of the softmax to the others; that of a tile of keys and values, over the queries
of their cell; and that of a tile of the bias, over some cells, which a last sum over programs joins in a fixed order.
Equations as in Dao, "FlashAttention-2", 2023, section 2.3.2.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels.swin_attention.triton_backward import accumulate, joined, new_sums, turned_back, weights_of
from dskernels.swin_attention.triton_common import (
    GEOMETRY,
    LOG2E,
    Problem,
    Tile,
    cells_of_program,
    head_at,
    load_bias,
    load_operand,
    load_seen,
    load_sums,
    load_tile,
    products_of,
    store_tile,
    tokens_of,
)
from dskernels.swin_attention.triton_tiled_bias import swin_attention_bwd_dbias_kernel

# Of the gradient of the bias: a cell more a program is a sum less to write and to read.
_PROGRAMS, _MOST_CELLS = 1024, 32


@triton.jit(do_not_specialize=[*GEOMETRY, "heads"])
def _swin_attention_bwd_dq_kernel(
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
    largest,
    inverse_total,
    delta,
    scale_sums,
    grad_out_strides,
    grad_qkv_strides,
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
    """The gradient of a tile of queries; and for the other kernels, of each row, what its softmax is computed from."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    TILES: tl.constexpr = (TOKENS + BLOCK_M - 1) // BLOCK_M
    COSINE: tl.constexpr = logit_scale is not None
    geometry = (image_height, image_width, grid_width, cells_of_image, top, left)
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % heads
    cell = tl.program_id(0) // TILES // heads
    columns = tl.arange(0, BLOCK_D)
    width = (columns < D)[None, :]
    q = head_at(qkv, head, qkv_strides, D)
    k = head_at(q, heads, qkv_strides, D)
    v = head_at(k, heads, qkv_strides, D)
    factor = scale
    if COSINE:
        factor = tl.load(logit_scale + head)
    if HALF > 0:
        cos += head * table_stride
        sin += head * table_stride
    if bias is not None:
        bias += head.to(tl.int64) * bias_strides[0]
    queries = tokens_of(cell, tile * BLOCK_M, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
    q_tile, _q_swapped, q_inverse = load_operand(
        q, qkv_strides, queries, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
    )
    do_head = head_at(grad_out, head, grad_out_strides, D)
    do_tile = load_tile(do_head, queries, grad_out_strides, columns, queries[6][:, None] & width)

    row_largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row_delta = tl.zeros([BLOCK_M], tl.float32)
    for first_key in range(0, TOKENS, BLOCK_N):
        keys = tokens_of(cell, first_key, geometry, HEIGHT, WIDTH, WIDE, BLOCK_N)
        k_tile, _k_swapped, k_inverse = load_operand(
            k, qkv_strides, keys, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        v_tile = load_tile(v, keys, qkv_strides, columns, keys[6][:, None] & width)
        added = 0.0
        if bias is not None:
            added = load_bias(bias, bias_strides, queries, keys, TOKENS)
        score = products_of(q_tile, k_tile, q_inverse, k_inverse, COSINE) * factor + added
        score = tl.where(keys[6][None, :], score, float("-inf"))
        now_largest = tl.maximum(row_largest, tl.max(score, 1))
        # -inf - -inf is NaN: a row that has seen nothing yet is shifted by 0.
        shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        shrink = tl.exp2((row_largest - shift) * LOG2E)
        p = tl.exp2((score - shift[:, None]) * LOG2E)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        row_delta = row_delta * shrink + tl.sum(p * dp, 1)
        row_largest = now_largest

    is_blind = total == 0
    row_largest = tl.where(is_blind, 0.0, row_largest)
    row_inverse = tl.where(is_blind, 0.0, 1 / tl.where(is_blind, 1.0, total))
    row_delta = tl.where(is_blind, 0.0, row_delta * row_inverse)
    do_tile = tl.where(is_blind[:, None], 0.0, do_tile).to(do_tile.dtype)
    at = (cell * heads + head).to(tl.int64) * TOKENS + queries[5]
    tl.store(largest + at, row_largest, mask=queries[6])
    tl.store(inverse_total + at, row_inverse, mask=queries[6])
    tl.store(delta + at, row_delta, mask=queries[6])

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq_swapped = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_sum = tl.zeros([BLOCK_M], tl.float32)
    for first_key in range(0, TOKENS, BLOCK_N):
        keys = tokens_of(cell, first_key, geometry, HEIGHT, WIDTH, WIDE, BLOCK_N)
        k_tile, k_swapped, k_inverse = load_operand(
            k, qkv_strides, keys, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        v_tile = load_tile(v, keys, qkv_strides, columns, keys[6][:, None] & width)
        added = 0.0
        if bias is not None:
            added = load_bias(bias, bias_strides, queries, keys, TOKENS)
        products = products_of(q_tile, k_tile, q_inverse, k_inverse, COSINE)
        pairs = queries[6][:, None] & keys[6][None, :]
        p = weights_of(products, added, pairs, row_largest, row_inverse, factor)
        ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - row_delta[:, None])
        if scale_sums is not None:
            scale_sum += tl.sum(ds * products, 1)
        dq, dq_swapped = accumulate(ds, k_tile, k_swapped, k_inverse, dq, dq_swapped, HALF, COSINE)

    dq = turned_back(
        dq * factor, dq_swapped * factor, q, qkv_strides, queries, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
    )
    dq_head = head_at(grad_qkv, head, grad_qkv_strides, D)
    store_tile(dq_head, queries, grad_qkv_strides, columns, queries[6][:, None] & width, dq)
    if scale_sums is not None:
        tl.store(scale_sums + (cell * TILES + tile).to(tl.int64) * heads + head, tl.sum(scale_sum, 0))


@triton.jit(do_not_specialize=[*GEOMETRY, "heads"])
def _swin_attention_bwd_dkdv_kernel(
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
    largest,
    inverse_total,
    delta,
    grad_out_strides,
    grad_qkv_strides,
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
    """The gradients of a tile of keys and values."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    TILES: tl.constexpr = (TOKENS + BLOCK_N - 1) // BLOCK_N
    COSINE: tl.constexpr = logit_scale is not None
    geometry = (image_height, image_width, grid_width, cells_of_image, top, left)
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % heads
    cell = tl.program_id(0) // TILES // heads
    columns = tl.arange(0, BLOCK_D)
    q = head_at(qkv, head, qkv_strides, D)
    k = head_at(q, heads, qkv_strides, D)
    v = head_at(k, heads, qkv_strides, D)
    do_head = head_at(grad_out, head, grad_out_strides, D)
    factor = scale
    if COSINE:
        factor = tl.load(logit_scale + head)
    if HALF > 0:
        cos += head * table_stride
        sin += head * table_stride
    if bias is not None:
        bias += head.to(tl.int64) * bias_strides[0]
    sums_at = (cell * heads + head).to(tl.int64) * TOKENS
    keys = tokens_of(cell, tile * BLOCK_N, geometry, HEIGHT, WIDTH, WIDE, BLOCK_N)
    mask = keys[6][:, None] & (columns < D)[None, :]
    k_tile, _k_swapped, k_inverse = load_operand(k, qkv_strides, keys, columns, cos, sin, D, HALF, INTERLEAVED, COSINE)
    v_tile = load_tile(v, keys, qkv_strides, columns, mask)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_swapped = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for first_query in range(0, TOKENS, BLOCK_M):
        queries = tokens_of(cell, first_query, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
        q_tile, q_swapped, q_inverse = load_operand(
            q, qkv_strides, queries, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        row_largest, row_inverse, row_delta = load_sums(largest, inverse_total, delta, sums_at, queries)
        do_tile = load_seen(do_head, grad_out_strides, queries, columns, row_inverse, D)
        added = 0.0
        if bias is not None:
            added = load_bias(bias, bias_strides, queries, keys, TOKENS)
        products = products_of(q_tile, k_tile, q_inverse, k_inverse, COSINE)
        pairs = queries[6][:, None] & keys[6][None, :]
        p = weights_of(products, added, pairs, row_largest, row_inverse, factor)
        dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, dv, input_precision="ieee")
        ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - row_delta[:, None])
        dk, dk_swapped = accumulate(tl.trans(ds), q_tile, q_swapped, q_inverse, dk, dk_swapped, HALF, COSINE)

    dk = turned_back(
        dk * factor, dk_swapped * factor, k, qkv_strides, keys, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
    )
    dk_head = head_at(grad_qkv, heads + head, grad_qkv_strides, D)
    store_tile(dk_head, keys, grad_qkv_strides, columns, mask, dk)
    store_tile(head_at(dk_head, heads, grad_qkv_strides, D), keys, grad_qkv_strides, columns, mask, dv)


def _tile(x: Problem, kernel: str) -> Tile:
    tile = x.tile(kernel)
    assert tile is not None
    return tile


def launch_tiles(
    x: Problem, grad_out: Tensor, grad_qkv: Tensor, bias_needs_grad: bool, logit_scale_needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Fills ``grad_qkv``, and returns the gradients of bias and logit_scale, empty where they are not needed."""
    sums = torch.empty(3, x.cells, x.heads, x.tokens, dtype=torch.float32, device=x.qkv.device).unbind()
    tile = _tile(x, "dq")
    tiles = triton.cdiv(x.tokens, tile.queries)
    scale_sums = new_sums(x, x.cells * tiles, needed=logit_scale_needs_grad)
    _swin_attention_bwd_dq_kernel[(x.cells * x.heads * tiles,)](
        *x.arguments(),
        grad_out,
        grad_qkv,
        *sums,
        scale_sums,
        grad_out.stride(),
        grad_qkv.stride(),
        **x.constants(tile, grad_out),
    )
    tile = _tile(x, "dkdv")
    _swin_attention_bwd_dkdv_kernel[(x.cells * x.heads * triton.cdiv(x.tokens, tile.keys),)](
        *x.arguments(),
        grad_out,
        grad_qkv,
        *sums,
        grad_out.stride(),
        grad_qkv.stride(),
        **x.constants(tile, grad_out),
    )
    bias_sums = None
    if bias_needs_grad:
        tile = _tile(x, "dbias")
        tiles = triton.cdiv(x.tokens, tile.queries) * triton.cdiv(x.tokens, tile.keys)
        cells = cells_of_program(x.cells, x.heads * tiles, _PROGRAMS, _MOST_CELLS)
        programs = triton.cdiv(x.cells, cells)
        bias_sums = new_sums(x, programs, x.tokens, x.tokens, needed=True)
        swin_attention_bwd_dbias_kernel[(programs * x.heads * tiles,)](
            *x.arguments(),
            grad_out,
            *sums,
            bias_sums,
            grad_out.stride(),
            x.cells,
            cells,
            **x.constants(tile, grad_out),
        )
    return joined(x, bias_sums), joined(x, scale_sums)
