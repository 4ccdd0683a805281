"""Window attention in Triton: the kernels of the backward pass.

One kernel for the gradient of q, over the keys that a tile of queries sees, and one for those of k and v, over the
queries that see a tile of keys. Scores are computed twice, once in each, which needs no atomics: results are the same
bits on every run. Equations as in Dao, "FlashAttention-2", 2023, section 2.3.2.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels.window_attention.triton_common import (
    LOG2E,
    Problem,
    head_of,
    keys_seen,
    load_tile,
    queries_seeing,
    sequence_of,
    store_tile,
    strides_of,
    tanh,
    tile_count,
    window_of,
)


@triton.jit
def _weights_and_slope(product, bias, seen, lse, scale, softcap, CAPPED: tl.constexpr):
    """The softmax's weights of a tile from its products, and the slope of the cap (1 without one)."""
    score = product * scale
    slope = tl.full(product.shape, 1.0, tl.float32)
    if CAPPED:
        bend = tanh(score / softcap)
        score = softcap * bend
        slope = 1 - bend * bend
    score = tl.where(seen, score + bias, float("-inf"))
    return tl.where(seen, tl.exp2((score - lse) * LOG2E), 0.0), slope


@triton.jit(do_not_specialize=["tiles", "sequences", "queries", "keys", "start", "stop"])
def _window_attention_bwd_dq_kernel(
    grad_out,
    grad_lse,
    q,
    k,
    v,
    out,
    lse,
    bias,
    offsets_q,
    offsets_k,
    delta,
    grad_q,
    grad_bias,
    grad_out_strides,
    grad_lse_strides,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    bias_strides,
    grad_q_strides,
    grad_bias_strides,
    tiles,
    sequences,
    heads,
    queries,
    keys,
    start,
    stop,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradient of a tile of queries, theirs of the bias where asked for, and ``delta`` for the next kernel."""
    tile, batch, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles // heads, tl.program_id(0) // tiles % heads
    all_queries, q_begin, k_begin = queries, 0, 0
    if offsets_q is not None:
        tile, q_begin, queries, k_begin, keys, _ = sequence_of(
            tile, offsets_q, offsets_k, sequences, queries, keys, BLOCK_M
        )
        start, stop = window_of(queries, keys, start, stop)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < queries
    columns, value_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at = (batch * heads + head).to(tl.int64) * all_queries + q_begin + rows
    row_lse = tl.load(lse + at, mask=inside, other=float("-inf"))
    own_low, own_high = keys_seen(rows, rows, keys, start, stop)
    live = inside & (own_low < own_high) & (row_lse != float("-inf"))
    row_lse = tl.where(live, row_lse, 0.0)
    width, value_width = (columns < D)[None, :], (value_columns < DV)[None, :]
    live_values = live[:, None] & value_width
    q_tile = load_tile(head_of(q, q_strides, batch, head, q_begin), q_strides, rows, columns, live[:, None] & width)
    do_head = head_of(grad_out, grad_out_strides, batch, head, q_begin)
    out_head = head_of(out, out_strides, batch, head, q_begin)
    do_tile = load_tile(do_head, grad_out_strides, rows, value_columns, live_values)
    out_tile = load_tile(out_head, out_strides, rows, value_columns, live_values)
    k_head = head_of(k, k_strides, batch, head // GROUP, k_begin)
    v_head = head_of(v, v_strides, batch, head // GROUP, k_begin)
    if bias is not None:
        bias_head = head_of(bias, bias_strides, batch, head)
    if grad_bias is not None:
        grad_bias_head = head_of(grad_bias, grad_bias_strides, batch, head)
    row_delta = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    if grad_lse is not None:
        # d lse / d score is P, so its gradient joins where delta leaves.
        lse_at = batch.to(tl.int64) * grad_lse_strides[0] + head.to(tl.int64) * grad_lse_strides[1]
        lse_at += (rows.to(tl.int64) + q_begin) * grad_lse_strides[2]
        row_delta -= tl.load(grad_lse + lse_at, mask=live, other=0.0)
    tl.store(delta + at, row_delta, mask=inside)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    low, high = keys_seen(tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, queries) - 1, keys, start, stop)
    for n in range(low, high, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        wanted = key < high
        ahead = key[None, :] - rows[:, None]
        seen = (ahead >= start) & (ahead < stop) & wanted[None, :] & live[:, None]
        k_tile = load_tile(k_head, k_strides, key, columns, wanted[:, None] & width)
        v_tile = load_tile(v_head, v_strides, key, value_columns, wanted[:, None] & value_width)
        added = 0.0
        if bias is not None:
            added = load_tile(bias_head, bias_strides, rows, key, seen)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        p, slope = _weights_and_slope(product, added, seen, row_lse[:, None], scale, softcap, CAPPED)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        ds = tl.where(seen, p * (dp - row_delta[:, None]), 0.0)
        if grad_bias is not None:
            store_tile(grad_bias_head, grad_bias_strides, rows, key, seen, ds)
        if CAPPED:
            # Where nothing is seen the slope may be NaN.
            ds = tl.where(p == 0, 0.0, ds * slope)
        accumulator = tl.dot(ds.to(k_tile.dtype), k_tile, accumulator, input_precision="ieee")

    # A blind row meets the keys of its neighbours in the product, which may be NaN, with weights of 0.
    result = tl.where(live[:, None], accumulator * scale, 0.0)
    grad_q_head = head_of(grad_q, grad_q_strides, batch, head, q_begin)
    store_tile(grad_q_head, grad_q_strides, rows, columns, inside[:, None] & width, result)


@triton.jit(do_not_specialize=["tiles", "sequences", "queries", "keys", "start", "stop"])
def _window_attention_bwd_dkdv_kernel(
    grad_out,
    q,
    k,
    v,
    lse,
    bias,
    offsets_q,
    offsets_k,
    delta,
    grad_k,
    grad_v,
    grad_out_strides,
    q_strides,
    k_strides,
    v_strides,
    bias_strides,
    grad_k_strides,
    grad_v_strides,
    tiles,
    sequences,
    key_heads,
    queries,
    keys,
    start,
    stop,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradients of a tile of keys and values, over all query heads of the group; tiles lie as [key, query]."""
    tile, batch = tl.program_id(0) % tiles, tl.program_id(0) // tiles // key_heads
    key_head = tl.program_id(0) // tiles % key_heads
    all_queries, q_begin, k_begin = queries, 0, 0
    if offsets_q is not None:
        tile, k_begin, keys, q_begin, queries, _ = sequence_of(
            tile, offsets_k, offsets_q, sequences, keys, queries, BLOCK_N
        )
        start, stop = window_of(queries, keys, start, stop)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    own_low, own_high = queries_seeing(key, key, queries, start, stop)
    wanted = (key < keys) & (own_low < own_high)
    columns, value_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    width, value_width = (columns < D)[None, :], (value_columns < DV)[None, :]
    k_head = head_of(k, k_strides, batch, key_head, k_begin)
    v_head = head_of(v, v_strides, batch, key_head, k_begin)
    k_tile = load_tile(k_head, k_strides, key, columns, wanted[:, None] & width)
    v_tile = load_tile(v_head, v_strides, key, value_columns, wanted[:, None] & value_width)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    low, high = queries_seeing(tile * BLOCK_N, tl.minimum(tile * BLOCK_N + BLOCK_N, keys) - 1, queries, start, stop)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_head = head_of(q, q_strides, batch, head, q_begin)
        do_head = head_of(grad_out, grad_out_strides, batch, head, q_begin)
        for m in range(low, high, BLOCK_M):
            rows = m + tl.arange(0, BLOCK_M)
            at = (batch * key_heads * GROUP + head).to(tl.int64) * all_queries + q_begin + rows
            live = rows < high
            row_lse = tl.load(lse + at, mask=live, other=0.0)
            row_delta = tl.load(delta + at, mask=live, other=0.0)
            if bias is not None:
                # A bias of -inf can blind a query of the range too; only then do its loads wait for lse.
                live = live & (row_lse != float("-inf"))
                row_lse = tl.where(live, row_lse, 0.0)
            ahead = key[:, None] - rows[None, :]
            seen = (ahead >= start) & (ahead < stop) & wanted[:, None] & live[None, :]
            q_tile = load_tile(q_head, q_strides, rows, columns, live[:, None] & width)
            do_tile = load_tile(do_head, grad_out_strides, rows, value_columns, live[:, None] & value_width)
            added = 0.0
            if bias is not None:
                visible = tl.trans(seen.to(tl.int8)) != 0
                bias_head = head_of(bias, bias_strides, batch, head)
                added = tl.trans(load_tile(bias_head, bias_strides, rows, key, visible))
            product = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            p, slope = _weights_and_slope(product, added, seen, row_lse[None, :], scale, softcap, CAPPED)
            dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            ds = tl.where(seen, p * (dp - row_delta[None, :]), 0.0)
            if CAPPED:
                ds = tl.where(p == 0, 0.0, ds * slope)
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")

    dk = tl.where(wanted[:, None], dk * scale, 0.0)
    dv = tl.where(wanted[:, None], dv, 0.0)
    inside = (key < keys)[:, None]
    grad_k_head = head_of(grad_k, grad_k_strides, batch, key_head, k_begin)
    grad_v_head = head_of(grad_v, grad_v_strides, batch, key_head, k_begin)
    store_tile(grad_k_head, grad_k_strides, key, columns, inside & width, dk)
    store_tile(grad_v_head, grad_v_strides, key, value_columns, inside & value_width, dv)


def launch_dq(
    x: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    grad_bias: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Fills ``grad_q`` and ``grad_bias``, and returns ``delta`` for the other kernel."""
    batch, heads, queries, _ = x.q.shape
    delta = torch.empty_like(lse)
    tile = x.tile("dq")
    tiles = tile_count(queries, x.offsets_q, tile.queries)
    _window_attention_bwd_dq_kernel[(batch * heads * tiles,)](
        grad_out,
        grad_lse,
        x.q,
        x.k,
        x.v,
        out,
        lse,
        x.bias,
        x.offsets_q,
        x.offsets_k,
        delta,
        grad_q,
        grad_bias,
        grad_out.stride(),
        (0, 0, 0) if grad_lse is None else grad_lse.stride(),
        x.q.stride(),
        x.k.stride(),
        x.v.stride(),
        out.stride(),
        strides_of(x.bias),
        grad_q.stride(),
        strides_of(grad_bias),
        tiles,
        x.sequences,
        heads,
        queries,
        x.k.shape[2],
        x.start,
        x.stop,
        scale,
        softcap,
        **x.constants(softcap),
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return delta


def launch_dkdv(
    x: Problem,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    scale: float,
    softcap: float,
) -> None:
    batch, key_heads, keys, _ = x.k.shape
    tile = x.tile("dkdv")
    tiles = tile_count(keys, x.offsets_k, tile.keys)
    _window_attention_bwd_dkdv_kernel[(batch * key_heads * tiles,)](
        grad_out,
        x.q,
        x.k,
        x.v,
        lse,
        x.bias,
        x.offsets_q,
        x.offsets_k,
        delta,
        grad_k,
        grad_v,
        grad_out.stride(),
        x.q.stride(),
        x.k.stride(),
        x.v.stride(),
        strides_of(x.bias),
        grad_k.stride(),
        grad_v.stride(),
        tiles,
        x.sequences,
        key_heads,
        x.q.shape[2],
        keys,
        x.start,
        x.stop,
        scale,
        softcap,
        **x.constants(softcap),
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
