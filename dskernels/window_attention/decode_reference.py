"""Decode attention in plain PyTorch: the formula of `reference` over the slots of a cache.

Shape suffixes: B batch, H key heads, G query heads of a key head, N queries, S slots, D components of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dskernels._library import autocast_disabled, to_layout_of
from dskernels.checks import is_readable, wrong_value
from dskernels.rope import rotate
from dskernels.window_attention.reference import (
    Operands,
    Visibility,
    compute_dtype,
    group_heads,
    masked_softmax,
)


def check_lengths(lengths: list[int], queries: int, slots: int, left: int | None, rows: int | None) -> None:
    """Whether sequences of these lengths lie in the cache, and in the table of ``rows`` positions."""
    for number, length in enumerate(lengths):
        if length < 0:
            raise wrong_value(f"cache_lengths[{number}]", "a number of tokens", length)
        if rows is not None and length > rows:
            raise IndexError(
                f"rope: the last token of sequence {number} stands at position {length - 1}, "
                f"the table holds {rows} positions"
            )
        # What a query still sees must not have been overwritten.
        if queries > 0 and length > slots and (left is None or left + queries > slots):
            needed = "all tokens" if left is None else f"the last {left + queries}"
            expected = f"up to {slots} tokens, the slots of the cache, since {queries} queries may see {needed}"
            raise wrong_value(f"cache_lengths[{number}]", expected, length)


def _assert_lengths(lengths: Tensor, queries: int, slots: int, left: int | None, rows: int | None) -> None:
    """The same for a graph, which learns the values when it runs."""
    most = rows
    if queries > 0 and (left is None or left + queries > slots):
        most = slots if most is None else min(slots, most)
    fits = lengths >= 0 if most is None else (lengths >= 0) & (lengths <= most)
    torch._assert_async(fits.all(), f"window_attention_decode: cache_lengths: expected 0 to {most} tokens")


def _positions(lengths: Tensor, queries: int, slots: int) -> tuple[Tensor, Tensor]:
    """The position of each query ``[B, N]`` and of what each slot holds ``[B, S]``; negative is none."""
    last_B1 = lengths.long()[:, None] - 1
    queries_BN = last_B1 + torch.arange(1 - queries, 1, device=lengths.device)
    # Of the positions that share a slot it holds the last.
    slots_BS = last_B1 - (last_B1 - torch.arange(slots, device=lengths.device)) % max(slots, 1)
    return queries_BN, slots_BS


def _visibility(queries_BN: Tensor, slots_BS: Tensor, left: int | None, right: int | None) -> Visibility:
    distance_BNS = slots_BS[:, None, :] - queries_BN[:, :, None]
    pair_BNS = (slots_BS >= 0)[:, None, :] & (queries_BN >= 0)[:, :, None]
    if left is not None:
        pair_BNS = pair_BNS & (distance_BNS >= -left)
    if right is not None:
        pair_BNS = pair_BNS & (distance_BNS <= right)
    # Broadcast over heads and the heads of a group.
    return Visibility(
        pair_BNS[:, None, None], pair_BNS.any(2)[:, None, None, :, None], pair_BNS.any(1)[:, None, :, None]
    )


def window_attention_decode_reference(
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
    rows = None if cos is None else cos.shape[0]
    if is_readable(cache_lengths):
        check_lengths(cache_lengths.tolist(), q.shape[2], k_cache.shape[2], left, rows)
    elif torch.compiler.is_compiling():
        _assert_lengths(cache_lengths, q.shape[2], k_cache.shape[2], left, rows)
    queries_BN, slots_BS = _positions(cache_lengths, q.shape[2], k_cache.shape[2])
    seen = _visibility(queries_BN, slots_BS, left, right)
    dtype = compute_dtype(q)
    with autocast_disabled(q.device.type):
        # Zero where nobody looks: 0 * NaN is NaN in a product, so what is unseen must be gone before it.
        q_BHGND = torch.where(seen.query_N1, group_heads(q, k_cache.shape[1]).to(dtype), 0)
        k_BHSD = torch.where(seen.key_M1, k_cache.to(dtype), 0)
        v_BHSD = torch.where(seen.key_M1, v_cache.to(dtype), 0)
        if cos is not None and sin is not None:
            cos, sin = cos.to(dtype), sin.to(dtype)
            # What stands nowhere is zero by now, and stays so in any rotation.
            rows_BN, rows_BS = queries_BN.clamp(min=0), slots_BS.clamp(min=0)
            q_BHGND = rotate(q_BHGND, cos[rows_BN][:, None, None], sin[rows_BN][:, None, None], interleaved)
            if not keys_rotated:
                k_BHSD = rotate(k_BHSD, cos[rows_BS][:, None], sin[rows_BS][:, None], interleaved)
        x = Operands(q_BHGND, k_BHSD.unsqueeze(2), v_BHSD.unsqueeze(2), None, None)
        soft = masked_softmax(x, None, sink, seen, scale, softcap)
        out_BHGND = torch.where(soft.alive_BHGN1 & seen.query_N1, soft.p_BHGNM @ x.v_BH1MD, 0)
    return to_layout_of(q, out_BHGND.flatten(1, 2).to(q.dtype)), soft.lse_BHGN.flatten(1, 2).contiguous()
