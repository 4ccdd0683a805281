"""Window attention over a cache in Triton: a split of the keys a program, and a second pass that joins the splits.

The query heads of a key head, and their queries, are the rows of one tile, so that a cached key is read once for all of
them. A decoding step has few such tiles, and long windows: as in Dao et al., "Flash-Decoding", 2023, the keys of a tile
are split between programs, whose sums a second kernel joins in a fixed order. How many splits there are follows from
shapes alone; each program finds its part from the length of its sequence, which is on the device.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels._library import empty_in_layout_of
from dskernels.window_attention.triton_common import LOG2E, Tile, on_device_of, padded, tanh

# By whether keys are rotated in the loop, bits of the operands, and the wider of the two head dimensions, up to the one
# given: as in `triton_common.TILES`, and held to the same. A rotation needs twice the loads, and their buffers. Of the
# rows of a tile there are as many as it has use for, 16 at least.
TILES = {
    False: {
        16: {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 8, 3), 256: Tile(32, 32, 8, 2)},
        32: {128: Tile(32, 32, 8, 2), 256: Tile(16, 16, 8, 2)},
    },
    True: {
        16: {64: Tile(64, 64, 8, 2), 128: Tile(64, 32, 8, 2), 256: Tile(32, 32, 8, 1)},
        32: {64: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    },
}
# Programs that fill a large GPU, and keys below which a split of its own costs more than it saves.
_PROGRAMS = 256
_SPLIT_KEYS = 256
# No length comes near it, so a bound beyond it says the same, and sums of two fit in int32.
_FARTHEST = 2**30 - 1


@triton.jit
def _load_turned(
    x, rows, columns, column_stride, mask, cos, sin, place, table_rows, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The tile at ``x[rows, columns]`` in float32, rotated at ``place``; 0 where masked.

    The other half of each pair is a second load of the same lines, which need no exchange between threads.
    """
    values = tl.load(x + rows[:, None] + columns[None, :] * column_stride, mask=mask, other=0.0).to(tl.float32)
    if HALF > 0:
        if INTERLEAVED:
            leads, pair, partner = columns % 2 == 0, columns // 2, columns ^ 1
        else:
            leads = columns < HALF
            pair = tl.where(leads, columns, columns - HALF)
            partner = tl.where(leads, columns + HALF, columns - HALF)
        turned = mask & (columns < 2 * HALF)[None, :]
        others = tl.load(x + rows[:, None] + partner[None, :] * column_stride, mask=turned, other=0.0).to(tl.float32)
        # Positions on a GPU are not looked at beforehand, which would wait for it: one outside the table gives NaN.
        known = ((place >= 0) & (place < table_rows))[:, None]
        at = place.to(tl.int64)[:, None] * HALF + pair[None, :]
        c = tl.where(known, tl.load(cos + at, mask=turned & known, other=1.0), float("nan"))
        s = tl.load(sin + at, mask=turned & known, other=0.0)
        values = values * c + tl.where(leads[None, :], -others, others) * s
    return values


@triton.jit(do_not_specialize=["key_heads", "row_tiles", "splits", "queries", "slots", "left", "right", "table_rows"])
def _window_attention_decode_kernel(
    q,
    k,
    v,
    lengths,
    cos,
    sin,
    sink,
    out,
    lse,
    part_sums,
    part_largest,
    part_total,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    key_heads,
    row_tiles,
    splits,
    queries,
    slots,
    left,
    right,
    table_rows,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEYS_ROTATED: tl.constexpr,
    CAPPED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One split of the keys of one tile of rows: ``out`` and ``lse`` where it is ``WHOLE``, else its part of them."""
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits % row_tiles
    pair = tl.program_id(0) // splits // row_tiles
    batch, key_head = (pair // key_heads).to(tl.int64), pair % key_heads
    # All heads of a query lie together: a tile has few queries, and so few keys.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = row // GROUP, key_head * GROUP + row % GROUP
    inside = query < queries
    length = tl.load(lengths + batch).to(tl.int32)
    position = length - queries + query
    live = inside & (position >= 0)
    first = tl.maximum(length - queries + tile * BLOCK_M // GROUP, 0)
    last = tl.minimum(length - queries + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, length - 1)
    low = tl.maximum(tl.maximum(first - left, length - slots), 0)
    high = tl.minimum(last + right + 1, length)
    # An empty window, or no query at all, sees nothing, whatever the bounds say.
    high = tl.where((left + right < 0) | (last < first), low, high)
    part = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), splits), BLOCK_N) * BLOCK_N
    low += split * part
    high = tl.minimum(high, low + part)

    columns, value_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    width, value_width = (columns < D)[None, :], (value_columns < DV)[None, :]
    # Tensor cores take two operands of one dtype; where those of queries and cache differ, both become float32.
    operand = q.dtype.element_ty if q.dtype == k.dtype else tl.float32
    q_rows = batch * q_strides[0] + head.to(tl.int64) * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q_tile = _load_turned(
        q, q_rows, columns, q_strides[3], live[:, None] & width, cos, sin, position, table_rows, HALF, INTERLEAVED
    ).to(operand)
    k_head = k + batch * k_strides[0] + key_head.to(tl.int64) * k_strides[1]
    v_head = v + batch * v_strides[0] + key_head.to(tl.int64) * v_strides[1]

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sink is not None:
        # One more score, of a key without a value, in one of the splits.
        logit = tl.load(sink + head, mask=inside & (split == 0), other=float("-inf"))
        largest = logit
        total = tl.where(logit == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for n in range(low, high, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        wanted = key < high
        slot = (key % slots).to(tl.int64)
        ahead = key[None, :] - position[:, None]
        seen = (ahead >= -left) & (ahead <= right) & wanted[None, :] & live[:, None]
        k_tile = _load_turned(
            k_head,
            slot * k_strides[2],
            columns,
            k_strides[3],
            wanted[:, None] & width,
            cos,
            sin,
            key,
            table_rows,
            0 if KEYS_ROTATED else HALF,
            INTERLEAVED,
        ).to(operand)
        v_at = slot[:, None] * v_strides[2] + value_columns[None, :] * v_strides[3]
        v_tile = tl.load(v_head + v_at, mask=wanted[:, None] & value_width, other=0.0).to(operand)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if CAPPED:
            score = softcap * tanh(score / softcap)
        score = tl.where(seen, score, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(score, 1))
        # -inf - -inf is NaN: a row that has seen nothing yet is shifted by 0.
        shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        shrink = tl.exp2((largest - shift) * LOG2E)
        p = tl.exp2((score - shift[:, None]) * LOG2E)
        total = total * shrink + tl.sum(p, 1)
        sums = tl.dot(p.to(operand), v_tile, sums * shrink[:, None], input_precision="ieee")
        largest = now_largest

    # A row that sees nothing here meets its neighbours' values in the product, which may be NaN, with weights of 0.
    sees = live & (tl.maximum(position - left, low) < tl.minimum(position + right + 1, high))
    sums = tl.where(sees[:, None], sums, 0.0)
    stored = inside[:, None] & value_width
    if WHOLE:
        nothing = total == 0
        total = tl.where(nothing, 1.0, total)
        out_rows = batch * out_strides[0] + head.to(tl.int64) * out_strides[1] + query.to(tl.int64) * out_strides[2]
        out_at = out_rows[:, None] + value_columns[None, :] * out_strides[3]
        tl.store(out + out_at, (sums / total[:, None]).to(out.dtype.element_ty), mask=stored)
        lse_at = (batch * key_heads * GROUP + head) * queries + query
        tl.store(lse + lse_at, tl.where(nothing, float("-inf"), largest + tl.log(total)), mask=inside)
    else:
        at = (pair.to(tl.int64) * splits + split) * queries * GROUP + row
        tl.store(part_sums + at[:, None] * DV + value_columns[None, :], sums, mask=stored)
        tl.store(part_largest + at, largest, mask=inside)
        tl.store(part_total + at, total, mask=inside)


@triton.jit(do_not_specialize=["key_heads", "splits", "queries"])
def _window_attention_decode_join_kernel(
    part_sums,
    part_largest,
    part_total,
    out,
    lse,
    out_strides,
    key_heads,
    splits,
    queries,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """``out`` and ``lse`` of one row from its splits, in their order."""
    rows = queries * GROUP
    row, pair = tl.program_id(0) % rows, tl.program_id(0) // rows
    query, head = row // GROUP, (pair % key_heads) * GROUP + row % GROUP
    batch = (pair // key_heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_DV)
    begin = pair.to(tl.int64) * splits * rows + row
    largest = tl.full([], float("-inf"), tl.float32)
    for s in range(0, splits, BLOCK_S):
        split = s + tl.arange(0, BLOCK_S)
        of_split = tl.load(part_largest + begin + split.to(tl.int64) * rows, mask=split < splits, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(of_split, 0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([BLOCK_DV], tl.float32)
    for s in range(0, splits, BLOCK_S):
        split = s + tl.arange(0, BLOCK_S)
        at = begin + split.to(tl.int64) * rows
        of_split = tl.load(part_largest + at, mask=split < splits, other=float("-inf"))
        weight = tl.exp2((of_split - shift) * LOG2E)
        total += tl.sum(weight * tl.load(part_total + at, mask=split < splits, other=0.0), 0)
        held = (split < splits)[:, None] & (columns < DV)[None, :]
        values = tl.load(part_sums + at[:, None] * DV + columns[None, :], mask=held, other=0.0)
        sums += tl.sum(weight[:, None] * values, 0)
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    out_at = batch * out_strides[0] + head.to(tl.int64) * out_strides[1] + query.to(tl.int64) * out_strides[2]
    tl.store(out + out_at + columns * out_strides[3], (sums / total).to(out.dtype.element_ty), mask=columns < DV)
    lse_at = (batch * key_heads * GROUP + head) * queries + query
    tl.store(lse + lse_at, tl.where(nothing, float("-inf"), largest + tl.log(total)))


def decode_tile(rows: int, width: int, dtype: torch.dtype, turns: bool) -> Tile:
    """The tile for ``rows`` of a key head; ``width`` is the wider head dimension, ``dtype`` that of the operands."""
    tile = next(tile for widest, tile in TILES[turns][8 * dtype.itemsize].items() if width <= widest)
    return tile._replace(queries=min(tile.queries, padded(rows)))


def split_count(tiles: int, slots: int, queries: int, left: int | None) -> int:
    """How many programs share the keys of a tile: from shapes alone, so that nobody waits for a length."""
    most_keys = slots if left is None else max(0, min(slots, left + queries))
    return max(1, min(int(triton.cdiv(most_keys, _SPLIT_KEYS)), int(triton.cdiv(_PROGRAMS, max(1, tiles)))))


def _bounded(distance: int | None) -> int:
    return _FARTHEST if distance is None else max(-_FARTHEST, min(_FARTHEST, distance))


def window_attention_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    interleaved: bool,
    keys_rotated: bool,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of `dskernels.window_attention_decode`."""
    batch, heads, queries, width = q.shape
    key_heads, slots, value_width = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    out = empty_in_layout_of(q, (batch, heads, queries, value_width))
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    rows = heads // key_heads * queries
    operand = q.dtype if q.dtype == k_cache.dtype else torch.float32
    tile = decode_tile(rows, max(width, value_width), operand, cos is not None and not keys_rotated)
    row_tiles = triton.cdiv(rows, tile.queries)
    tiles = batch * key_heads * row_tiles
    splits = split_count(tiles, slots, queries, left)
    parts: list[Tensor | None] = [None, None, None]
    if splits > 1:
        # [B, Hkv, splits, rows], and the sums with the components of the values after it.
        shape = (batch, key_heads, splits, rows)
        parts = [lse.new_empty((*shape, value_width)), lse.new_empty(shape), lse.new_empty(shape)]
    sizes = {"GROUP": heads // key_heads, "DV": value_width, "BLOCK_DV": padded(value_width)}
    with on_device_of(q):
        _window_attention_decode_kernel[(tiles * splits,)](
            q,
            k_cache,
            v_cache,
            cache_lengths.contiguous(),
            cos,
            sin,
            sink,
            out,
            lse,
            *parts,
            q.stride(),
            k_cache.stride(),
            v_cache.stride(),
            out.stride(),
            key_heads,
            row_tiles,
            splits,
            queries,
            slots,
            _bounded(left),
            _bounded(right),
            0 if cos is None else cos.shape[0],
            scale,
            softcap,
            **sizes,
            D=width,
            BLOCK_D=padded(width),
            HALF=0 if cos is None else cos.shape[1],
            INTERLEAVED=interleaved,
            KEYS_ROTATED=keys_rotated,
            CAPPED=softcap != 0,
            WHOLE=splits == 1,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            of_all = (key_heads, splits, queries)
            _window_attention_decode_join_kernel[(batch * key_heads * rows,)](
                *parts, out, lse, out.stride(), *of_all, **sizes, BLOCK_S=16, num_warps=4
            )
    return out, lse
