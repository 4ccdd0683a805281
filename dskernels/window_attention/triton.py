"""Window attention in Triton: the kernel of the forward pass.

Forward and backward follow Dao, "FlashAttention-2", 2023, section 2.3, with both loops bounded by the window: a tile of
queries visits the keys that one of its rows sees and no other, a tile of keys the queries that see one of its keys.
No atomics: every result is written by one program, in one order.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from dskernels.window_attention.triton_common import (
    LOG2E,
    Problem,
    head_of,
    keys_seen,
    load_tile,
    sequence_of,
    store_tile,
    strides_of,
    tanh,
    tile_count,
    window_of,
)


@triton.jit(do_not_specialize=["tiles", "sequences", "queries", "keys", "start", "stop"])
def _window_attention_fwd_kernel(
    q,
    k,
    v,
    bias,
    sink,
    offsets_q,
    offsets_k,
    out,
    lse,
    q_strides,
    k_strides,
    v_strides,
    bias_strides,
    out_strides,
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
    """``out`` and ``lse`` of one tile of queries of one head."""
    tile, batch, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles // heads, tl.program_id(0) // tiles % heads
    all_queries, q_begin, k_begin = queries, 0, 0
    if offsets_q is not None:
        tile, q_begin, queries, k_begin, keys, past_end = sequence_of(
            tile, offsets_q, offsets_k, sequences, queries, keys, BLOCK_M
        )
        start, stop = window_of(queries, keys, start, stop)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < queries
    columns, value_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    width, value_width = (columns < D)[None, :], (value_columns < DV)[None, :]
    own_low, own_high = keys_seen(rows, rows, keys, start, stop)
    live = inside & (own_low < own_high)
    q_tile = load_tile(head_of(q, q_strides, batch, head, q_begin), q_strides, rows, columns, live[:, None] & width)
    k_head = head_of(k, k_strides, batch, head // GROUP, k_begin)
    v_head = head_of(v, v_strides, batch, head // GROUP, k_begin)
    if bias is not None:
        bias_head = head_of(bias, bias_strides, batch, head)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sink is not None:
        # One more score, of a key without a value.
        logit = tl.load(sink + head)
        if offsets_q is not None:
            logit = tl.where(past_end, float("-inf"), logit)
        largest = tl.zeros([BLOCK_M], tl.float32) + logit
        total += tl.where(logit == float("-inf"), 0.0, 1.0)
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    low, high = keys_seen(tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, queries) - 1, keys, start, stop)
    for n in range(low, high, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        wanted = key < high
        ahead = key[None, :] - rows[:, None]
        seen = (ahead >= start) & (ahead < stop) & wanted[None, :]
        k_tile = load_tile(k_head, k_strides, key, columns, wanted[:, None] & width)
        v_tile = load_tile(v_head, v_strides, key, value_columns, wanted[:, None] & value_width)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if CAPPED:
            score = softcap * tanh(score / softcap)
        if bias is not None:
            score += load_tile(bias_head, bias_strides, rows, key, seen & inside[:, None])
        score = tl.where(seen, score, float("-inf"))
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

    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    # A blind row meets the values of its neighbours in the product, which may be NaN, with weights of 0.
    result = tl.where((live & ~nothing)[:, None], accumulator / total[:, None], 0.0)
    out_head = head_of(out, out_strides, batch, head, q_begin)
    store_tile(out_head, out_strides, rows, value_columns, inside[:, None] & value_width, result)
    at = (batch * heads + head).to(tl.int64) * all_queries + q_begin + rows
    tl.store(lse + at, tl.where(nothing, float("-inf"), largest + tl.log(total)), mask=inside)


def launch_forward(
    x: Problem, sink: Tensor | None, out: Tensor, lse: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Fills ``out`` and ``lse``, and returns them."""
    batch, heads, queries, _ = x.q.shape
    tile = x.tile("forward")
    tiles = tile_count(queries, x.offsets_q, tile.queries)
    _window_attention_fwd_kernel[(batch * heads * tiles,)](
        x.q,
        x.k,
        x.v,
        x.bias,
        sink,
        x.offsets_q,
        x.offsets_k,
        out,
        lse,
        x.q.stride(),
        x.k.stride(),
        x.v.stride(),
        strides_of(x.bias),
        out.stride(),
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
    return out, lse
