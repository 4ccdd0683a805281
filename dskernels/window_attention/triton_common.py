"""What the Triton kernels of window attention share: tiles, addresses, the bounds of both loops, the rotation.

Queries and keys are rotated by a small kernel of its own before the products, and their gradients rotated back after
them. Inside the loop over keys a key would be rotated again for every query head and every tile of queries that sees
it, and would pass through registers on its way to the tensor cores; one more read and write of q and k is cheaper for
every window longer than a tile. Rotation is in float32, and what it writes has the dtype of the inputs, since that is
what the tensor cores take: with half-precision inputs the scores carry that one rounding.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, warps of a program, stages of the pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, bits of the inputs, and the wider of the two head dimensions, up to the one given. A program fits the 99 KB
# of shared memory of consumer GPUs (sm_86, sm_89) and, without a bias, compiles for sm_80 without spilling registers:
# the tests hold it to both. One table instead of a search at run time: that would cost seconds a shape, and change bits
# between runs.
TILES = {
    "forward": {
        16: {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
        32: {32: Tile(64, 32, 4, 2), 64: Tile(64, 32, 8, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 32, 8, 1)},
    },
    "dq": {
        16: {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
        32: {32: Tile(64, 32, 8, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 16, 8, 2)},
    },
    "dkdv": {
        16: {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
        32: {32: Tile(32, 64, 8, 2), 64: Tile(32, 32, 8, 2), 128: Tile(16, 32, 8, 2), 256: Tile(16, 16, 8, 1)},
    },
}
# The interpreter has no shared memory to fit. Small tiles have more edges to get right; unequal ones tell rows from
# columns.
_INTERPRETED_TILES = {"forward": Tile(64, 32, 1, 1), "dq": Tile(64, 32, 1, 1), "dkdv": Tile(32, 64, 1, 1)}
_ROTATED_ROWS = 32

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def tile_for(kernel: str, dtype: torch.dtype, width: int) -> Tile:
    """The tile of kernel ``"forward"``, ``"dq"`` or ``"dkdv"``; ``width`` is the wider head dimension."""
    if INTERPRETED:
        return _INTERPRETED_TILES[kernel]
    return next(tile for widest, tile in TILES[kernel][8 * dtype.itemsize].items() if width <= widest)


def padded(width: int) -> int:
    """``width`` as a tile has it: a power of two, as Triton wants it, and 16 at least, as the tensor cores do."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit
def head_of(x, strides, batch, head, begin=0):
    """The address of ``x[batch, head, begin]``; ``begin`` is int64, or the number 0.

    Addresses are int64 throughout: a tensor may span more than 2**31 elements.
    """
    return x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + begin * strides[2]


@triton.jit
def load_tile(x_head, strides, rows, columns, mask):
    """``x_head[rows, columns]``, and 0 where masked: what is there may be NaN, or not be there."""
    at = rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3]
    return tl.load(x_head + at, mask=mask, other=0.0)


@triton.jit
def store_tile(x_head, strides, rows, columns, mask, values):
    """Stores a tile in the dtype of ``x_head``."""
    at = rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3]
    tl.store(x_head + at, values.to(x_head.dtype.element_ty), mask=mask)


@triton.jit
def _offset_at(offsets, sequence, sequences, tokens):
    """Where ``sequence`` begins; the rest, past the last offset, ends with the tokens."""
    at = tl.load(offsets + sequence, mask=sequence <= sequences, other=0).to(tl.int64)
    # Nobody has looked at offsets on a GPU, which would wait for it: wrong ones stay within the tensors.
    return tl.where(sequence <= sequences, tl.minimum(tl.maximum(at, 0), tokens), tokens)


@triton.jit
def sequence_of(tile, offsets, others, sequences, tokens, other_tokens, BLOCK: tl.constexpr):
    """The sequence that a tile of packed tokens belongs to, and what it needs to know of it.

    Sequence s has the tiles from ``offsets[s] // BLOCK + s`` on, which are enough for it and at most one too many. So
    the number of all tiles follows from the shapes (`tile_count`), the sequence is found by bisection, and nobody has
    to wait for the lengths, or launch as many tiles for a short sequence as for the longest. The tokens past the last
    offset are one more sequence, without partners. The same as in vLLM's unified attention (``find_seq_idx``).

    Args:
        tile: number of the tile among all.
        offsets: where sequences begin among the tokens that are tiled.
        others: the same for those that they meet: keys for queries, queries for keys.

    Returns:
        The tile's number in its sequence; first token (int64) and length of the sequence; the same two of its others,
        with a length of 0 where the tile has nothing to compute; and whether these are the tokens past the end.
    """
    low, high = tl.full([], 0, tl.int32), sequences
    while low < high:
        middle = (low + high + 1) // 2
        reached = _offset_at(offsets, middle, sequences, tokens) // BLOCK + middle <= tile
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
    begin = _offset_at(offsets, low, sequences, tokens)
    other_begin = _offset_at(others, low, sequences, other_tokens)
    length = tl.maximum(_offset_at(offsets, low + 1, sequences, tokens) - begin, 0).to(tl.int32)
    other_length = tl.maximum(_offset_at(others, low + 1, sequences, other_tokens) - other_begin, 0).to(tl.int32)
    own_tile = tl.maximum(tile - (begin // BLOCK + low), 0).to(tl.int32)
    past_end = low == sequences
    other_length = tl.where(past_end | (own_tile * BLOCK >= length), 0, other_length)
    return own_tile, begin, length, other_begin, other_length, past_end


@triton.jit
def window_of(queries, keys, start, stop):
    """The window ``start <= j - p < stop`` of a sequence relative to its queries, as `relative_window` has it."""
    ahead = (keys - queries).to(tl.int64)
    start = tl.minimum(tl.maximum(start + ahead, -queries), keys)
    stop = tl.minimum(tl.maximum(stop + ahead, -queries), keys)
    return start.to(tl.int32), stop.to(tl.int32)


@triton.jit
def keys_seen(first, last, keys, start, stop):
    """The keys ``[low, high)`` that queries ``first`` to ``last`` see; key j is seen iff start <= j - i < stop.

    The windows of neighbours overlap or touch, so each key of the range is seen by one of the queries at least.
    """
    low = tl.maximum(first + start, 0)
    high = tl.minimum(last + stop, keys)
    return low, tl.where(start < stop, high, low)


@triton.jit
def queries_seeing(first, last, queries, start, stop):
    """The queries ``[low, high)`` that see one of keys ``first`` to ``last``."""
    low = tl.maximum(first - stop + 1, 0)
    high = tl.minimum(last - start + 1, queries)
    return low, tl.where(start < stop, high, low)


@triton.jit
def tanh(x):
    """Hyperbolic tangent, good to a few units in the last place; the interpreter has none, nor has every GPU."""
    square = x * x
    # Below 1/4 the exponentials cancel. Five terms of the series, Abramowitz and Stegun 4.5.64: the next is < 2**-24 x.
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    by_exponential = 1 - 2 / (tl.exp2(tl.abs(x) * (2 * LOG2E)) + 1)
    by_exponential = tl.where(x < 0, -by_exponential, by_exponential)
    return tl.where(tl.abs(x) < 0.25, series, by_exponential)


@triton.jit(do_not_specialize=["tiles", "sequences", "rows", "partners"])
def _window_attention_rotate_kernel(
    x,
    y,
    cos,
    sin,
    positions,
    offsets,
    partner_offsets,
    x_strides,
    y_strides,
    positions_stride,
    tiles,
    sequences,
    rows,
    partners,
    heads,
    table_rows,
    offset,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rotates row ``n`` of ``x`` at position ``n + offset``, or ``positions`` of it, into ``y``; or ``BACK``.

    Packed, the last row of a sequence stands at its last partner: the last query at the last key.
    """
    tile, batch, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles // heads, tl.program_id(0) // tiles % heads
    begin = 0
    if offsets is not None:
        tile, begin, rows, _, partners, past_end = sequence_of(
            tile, offsets, partner_offsets, sequences, rows, partners, BLOCK_N
        )
        offset = partners - rows
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < rows
    place = (n + offset).to(tl.int64)
    if offsets is not None:
        # Past the last offset there is no position. Nobody reads these rows but as gradients, and those are 0.
        place = tl.where(past_end, 0, place)
    if positions is not None:
        place = tl.load(positions + batch.to(tl.int64) * positions_stride + place, mask=inside, other=0)
    pair = tl.arange(0, BLOCK_HALF)
    # Positions on a GPU are not looked at beforehand, which would wait for it: one outside the table gives NaN.
    known = (inside & (place >= 0) & (place < table_rows))[:, None] & (pair < HALF)[None, :]
    at = place[:, None] * HALF + pair[None, :]
    c = tl.load(cos + at, mask=known, other=float("nan"))
    s = tl.load(sin + at, mask=known, other=float("nan"))
    if BACK:
        s = -s
    first = pair * 2 if INTERLEAVED else pair
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF
    last = 2 * HALF
    turned = inside[:, None] & (pair < HALF)[None, :]
    x_head, y_head = head_of(x, x_strides, batch, head, begin), head_of(y, y_strides, batch, head, begin)
    a = load_tile(x_head, x_strides, n, first, turned).to(tl.float32)
    b = load_tile(x_head, x_strides, n, second, turned).to(tl.float32)
    store_tile(y_head, y_strides, n, first, turned, a * c - b * s)
    store_tile(y_head, y_strides, n, second, turned, b * c + a * s)
    if last < D:
        tail = last + tl.arange(0, BLOCK_TAIL)
        kept = inside[:, None] & (tail < D)[None, :]
        store_tile(y_head, y_strides, n, tail, kept, load_tile(x_head, x_strides, n, tail, kept))


def relative_window(queries: int, keys: int, left: int | None, right: int | None, query_offset: int) -> tuple[int, int]:
    """``(start, stop)`` such that query i sees key j iff ``start <= j - i < stop``, in the range of int32."""

    def clamped(distance: int) -> int:
        # Beyond these no query sees more, or fewer, of the keys there are.
        return max(-queries, min(keys, distance))

    start = -queries if left is None else clamped(query_offset - left)
    stop = keys if right is None else clamped(query_offset + right + 1)
    return start, stop


class Problem(NamedTuple):
    """What a pass computes on: the keys that somebody sees, rotated tensors, and the window relative to those keys.

    Packed sequences are a batch of one, with offsets, and with the window relative to the position of a query.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    first_key: int
    start: int
    stop: int
    offsets_q: Tensor | None = None
    offsets_k: Tensor | None = None

    @property
    def sequences(self) -> int:
        return 0 if self.offsets_q is None else self.offsets_q.shape[0] - 1

    def tile(self, kernel: str) -> Tile:
        return tile_for(kernel, self.q.dtype, max(self.q.shape[3], self.v.shape[3]))

    def constants(self, softcap: float) -> dict[str, int | bool]:
        """What all kernels are compiled for."""
        width, value_width = self.q.shape[3], self.v.shape[3]
        return {
            "GROUP": self.q.shape[1] // self.k.shape[1],
            "D": width,
            "DV": value_width,
            "BLOCK_D": padded(width),
            "BLOCK_DV": padded(value_width),
            "CAPPED": softcap != 0,
        }


def tile_count(tokens: int, offsets: Tensor | None, block: int) -> int:
    """How many tiles ``tokens`` are cut into; packed, as `sequence_of` hands them out."""
    if offsets is None:
        return int(triton.cdiv(tokens, block))
    return tokens // block + offsets.shape[0]


def narrowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    bias: Tensor | None,
    left: int | None,
    right: int | None,
    query_offset: int,
    interleaved: bool,
) -> Problem:
    """Leaves out the keys that no query sees, so that nothing is spent on them, and rotates the rest."""
    queries, keys = q.shape[2], k.shape[2]
    start, stop = relative_window(queries, keys, left, right, query_offset)
    low, high = max(0, start), min(keys, queries - 1 + stop)
    low, high = (low, high) if low < high and start < stop else (0, 0)
    k, v = k.narrow(2, low, high - low), v.narrow(2, low, high - low)
    if bias is not None:
        bias = bias.narrow(3, low, high - low)
    if cos is not None and sin is not None:
        table = (cos, sin, positions)
        q = rotated(q, torch.empty(q.shape, dtype=q.dtype, device=q.device), *table, query_offset, interleaved)
        k = rotated(k, torch.empty(k.shape, dtype=k.dtype, device=k.device), *table, low, interleaved)
    return Problem(q, k, v, bias, low, start - low, stop - low)


class Packing(NamedTuple):
    """Packed sequences, the last token of each standing at the last of its partners."""

    offsets: Tensor
    partner_offsets: Tensor
    partners: int


def rotated(
    x: Tensor,
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    interleaved: bool,
    *,
    packing: Packing | None = None,
    back: bool = False,
) -> Tensor:
    """Writes ``x``, rotated, into ``y`` and returns it; row n stands at n + ``offset``, or as ``packing`` has it."""
    batch, heads, rows, width = x.shape
    half = cos.shape[1]
    if x.numel() == 0:
        return y
    offsets, partner_offsets, partners = (None, None, 0) if packing is None else packing
    tiles = tile_count(rows, offsets, _ROTATED_ROWS)
    _window_attention_rotate_kernel[(batch * heads * tiles,)](
        x,
        y,
        cos.contiguous(),
        sin.contiguous(),
        None if positions is None else positions.contiguous(),
        offsets,
        partner_offsets,
        x.stride(),
        y.stride(),
        0 if positions is None else positions.shape[1],
        tiles,
        0 if offsets is None else offsets.shape[0] - 1,
        rows,
        partners,
        heads,
        cos.shape[0],
        offset,
        D=width,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_TAIL=triton.next_power_of_2(max(1, width - 2 * half)),
        INTERLEAVED=interleaved,
        BACK=back,
        BLOCK_N=_ROTATED_ROWS,
    )
    return y


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def strides_of(x: Tensor | None) -> Sequence[int]:
    """The strides of a tensor of four dimensions that may not be there."""
    return (0, 0, 0, 0) if x is None else x.stride()
