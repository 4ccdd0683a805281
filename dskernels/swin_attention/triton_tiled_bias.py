"""Swin attention in Triton: the gradient of the bias of larger windows and heads, tile by tile."""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from dskernels.swin_attention.triton_backward import weights_of
from dskernels.swin_attention.triton_common import (
    GEOMETRY,
    head_at,
    load_bias,
    load_operand,
    load_seen,
    load_sums,
    load_tile,
    products_of,
    tokens_of,
)


@triton.jit(do_not_specialize=[*GEOMETRY, "heads", "cells", "cells_of_program"])
def swin_attention_bwd_dbias_kernel(
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
    largest,
    inverse_total,
    delta,
    bias_sums,
    grad_out_strides,
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
    """The sum over some cells, ``[programs, heads, N, N]``, of the gradient of a tile of the bias."""
    TOKENS: tl.constexpr = HEIGHT * WIDTH
    ROWS: tl.constexpr = (TOKENS + BLOCK_M - 1) // BLOCK_M
    TILES: tl.constexpr = ROWS * ((TOKENS + BLOCK_N - 1) // BLOCK_N)
    COSINE: tl.constexpr = logit_scale is not None
    geometry = (image_height, image_width, grid_width, cells_of_image, top, left)
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % heads
    chunk = tl.program_id(0) // TILES // heads
    first_query, first_key = tile % ROWS * BLOCK_M, tile // ROWS * BLOCK_N
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
    row, column = first_query + tl.arange(0, BLOCK_M), first_key + tl.arange(0, BLOCK_N)
    if bias is not None:
        bias += head.to(tl.int64) * bias_strides[0]
    bias_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_cell = chunk * cells_of_program
    for cell in range(first_cell, tl.minimum(first_cell + cells_of_program, cells)):
        queries = tokens_of(cell, first_query, geometry, HEIGHT, WIDTH, WIDE, BLOCK_M)
        keys = tokens_of(cell, first_key, geometry, HEIGHT, WIDTH, WIDE, BLOCK_N)
        q_tile, _q_swapped, q_inverse = load_operand(
            q, qkv_strides, queries, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        k_tile, _k_swapped, k_inverse = load_operand(
            k, qkv_strides, keys, columns, cos, sin, D, HALF, INTERLEAVED, COSINE
        )
        v_mask = keys[6][:, None] & (columns < D)[None, :]
        v_tile = load_tile(v, keys, qkv_strides, columns, v_mask)
        sums_at = (cell * heads + head).to(tl.int64) * TOKENS
        row_largest, row_inverse, row_delta = load_sums(largest, inverse_total, delta, sums_at, queries)
        do_tile = load_seen(do_head, grad_out_strides, queries, columns, row_inverse, D)
        added = 0.0
        if bias is not None:
            added = load_bias(bias, bias_strides, queries, keys, TOKENS)
        products = products_of(q_tile, k_tile, q_inverse, k_inverse, COSINE)
        pairs = queries[6][:, None] & keys[6][None, :]
        p = weights_of(products, added, pairs, row_largest, row_inverse, factor)
        bias_sum += p * (tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee") - row_delta[:, None])
    bias_sums += (chunk * heads + head).to(tl.int64) * TOKENS * TOKENS
    tl.store(
        bias_sums + row[:, None] * TOKENS + column[None, :],
        bias_sum,
        mask=(row < TOKENS)[:, None] & (column < TOKENS)[None, :],
    )
