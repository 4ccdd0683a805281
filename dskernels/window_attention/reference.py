"""Window attention in plain PyTorch: the dense, masked formula that the compiled kernels are held to.

Forward and backward follow Dao, "FlashAttention-2", 2023, section 2.3 (the row-wise logarithm of the sum of
exponentials, and the backward built on it); the rotation follows Su et al., "RoFormer", 2021, equation 34.
Everything is computed in float32 (float64 for float64 inputs) and rounded once at the end.

Shape suffixes: B batch, H key heads, G query heads of a key head, N queries, M keys, D components of a head.
"""
# ruff: noqa: N815 - shape suffixes are capitals, in fields too

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import autocast_disabled, to_layout_of
from dskernels.rope import rotate


class Visibility(NamedTuple):
    """Who sees whom: pair by pair, and for each query and each key whether there is any pair at all."""

    pair_NM: Tensor
    query_N1: Tensor
    key_M1: Tensor


def visibility(
    queries: int, keys: int, left: int | None, right: int | None, query_offset: int, device: torch.device
) -> Visibility:
    """Key ``j`` is seen by query ``i`` iff ``-left <= j - (i + query_offset) <= right``; None is unbounded."""
    position_N1 = torch.arange(queries, device=device)[:, None] + query_offset
    distance_NM = torch.arange(keys, device=device) - position_N1
    pair_NM = torch.ones_like(distance_NM, dtype=torch.bool)
    if left is not None:
        pair_NM = pair_NM & (distance_NM >= -left)
    if right is not None:
        pair_NM = pair_NM & (distance_NM <= right)
    return Visibility(pair_NM, pair_NM.any(1)[:, None], pair_NM.any(0)[:, None])


class Operands(NamedTuple):
    # Query, key and value as they enter the products: wide, grouped by key head, rotated, cleaned of what is not seen.
    q_BHGND: Tensor
    k_BH1MD: Tensor
    v_BH1MD: Tensor
    rope_q: tuple[Tensor, Tensor] | None
    rope_k: tuple[Tensor, Tensor] | None


class _Softmax(NamedTuple):
    # The weights, lse, which rows have anything to attend to, and the slope of the cap (None without one).
    p_BHGNM: Tensor
    lse_BHGN: Tensor
    alive_BHGN1: Tensor
    slope_BHGNM: Tensor | None


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def group_heads(x: Tensor, key_heads: int) -> Tensor:
    grouped: Tensor = x.unflatten(1, (key_heads, x.shape[1] // key_heads))
    return grouped


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    seen: Visibility,
    offset: int,
    pairing: bool,
) -> Operands:
    dtype = compute_dtype(q)
    # Zero where nobody looks: 0 * NaN is NaN in a product, so what is unseen must be gone before it.
    q_BHGND = torch.where(seen.query_N1, group_heads(q, k.shape[1]).to(dtype), 0)
    k_BH1MD = torch.where(seen.key_M1, k.to(dtype), 0).unsqueeze(2)
    v_BH1MD = torch.where(seen.key_M1, v.to(dtype), 0).unsqueeze(2)
    if cos is None or sin is None:
        return Operands(q_BHGND, k_BH1MD, v_BH1MD, None, None)
    cos, sin = cos.to(dtype), sin.to(dtype)
    if positions is not None:
        cos, sin = (table[positions][:, None, None] for table in (cos, sin))
    rope_q = (cos.narrow(-2, offset, q.shape[2]), sin.narrow(-2, offset, q.shape[2]))
    rope_k = (cos.narrow(-2, 0, k.shape[2]), sin.narrow(-2, 0, k.shape[2]))
    return Operands(rotate(q_BHGND, *rope_q, pairing), rotate(k_BH1MD, *rope_k, pairing), v_BH1MD, rope_q, rope_k)


def masked_softmax(
    x: Operands, bias: Tensor | None, sink: Tensor | None, seen: Visibility, scale: float, softcap: float
) -> _Softmax:
    scores_BHGNM, slope_BHGNM = x.q_BHGND @ x.k_BH1MD.mT * scale, None
    if softcap:
        tanh_BHGNM = torch.tanh(scores_BHGNM / softcap)
        scores_BHGNM, slope_BHGNM = softcap * tanh_BHGNM, 1 - tanh_BHGNM.square()
    if bias is not None:
        bias_BHGNM = group_heads(bias, x.k_BH1MD.shape[1]).to(scores_BHGNM.dtype)
        scores_BHGNM = scores_BHGNM + torch.where(seen.pair_NM, bias_BHGNM, 0)
    # Masked scores are excluded by -inf, never by a large number.
    scores_BHGNM = torch.where(seen.pair_NM, scores_BHGNM, -torch.inf)
    if sink is not None:
        # One more column, which has a weight and no value.
        sink_HG11 = sink.to(scores_BHGNM.dtype).view(*scores_BHGNM.shape[1:3], 1, 1)
        column_BHGN1 = sink_HG11.expand(*scores_BHGNM.shape[:-1], 1)
        scores_BHGNM = torch.cat((scores_BHGNM, column_BHGN1), -1)
    # A row of nothing but -inf is computed from zeros instead, and its result replaced: finite numbers in between keep
    # its gradient finite.
    alive_BHGN1 = (scores_BHGNM > -torch.inf).any(-1, keepdim=True) | scores_BHGNM.isnan().any(-1, keepdim=True)
    scores_BHGNM = torch.where(alive_BHGN1, scores_BHGNM, 0)
    p_BHGNM = scores_BHGNM.softmax(-1)[..., : seen.pair_NM.shape[-1]]
    p_BHGNM = torch.where(seen.pair_NM & alive_BHGN1, p_BHGNM, 0)
    lse_BHGN = torch.where(alive_BHGN1[..., 0], scores_BHGNM.logsumexp(-1), -torch.inf)
    return _Softmax(p_BHGNM, lse_BHGN, alive_BHGN1, slope_BHGNM)


def window_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    query_offset: int,
    scale: float,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of `dskernels.window_attention`; differentiable any number of times."""
    seen = visibility(q.shape[2], k.shape[2], left, right, query_offset, q.device)
    with autocast_disabled(q.device.type):
        x = _operands(q, k, v, cos, sin, positions, seen, query_offset, interleaved)
        soft = masked_softmax(x, bias, sink, seen, scale, softcap)
        out_BHGND = torch.where(soft.alive_BHGN1 & seen.query_N1, soft.p_BHGNM @ x.v_BH1MD, 0)
    return to_layout_of(q, out_BHGND.flatten(1, 2).to(q.dtype)), soft.lse_BHGN.flatten(1, 2).contiguous()


def window_attention_backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    query_offset: int,
    scale: float,
    softcap: float,
    interleaved: bool,
    bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from those of ``out`` and ``lse``, and of the expanded bias where it is needed."""
    seen = visibility(q.shape[2], k.shape[2], left, right, query_offset, q.device)
    with autocast_disabled(q.device.type):
        x = _operands(q, k, v, cos, sin, positions, seen, query_offset, interleaved)
        key_heads = k.shape[1]
        # The paper's exp(score - lse), normalized afresh: lse near 1e4 has lost the digits that make P sum to 1.
        p_BHGNM, _, alive_BHGN1, slope_BHGNM = masked_softmax(x, bias, sink, seen, scale, softcap)
        alive_BHGN1 = alive_BHGN1 & seen.query_N1
        do_BHGND = torch.where(alive_BHGN1, group_heads(grad_out, key_heads).to(lse.dtype), 0)
        dp_BHGNM = do_BHGND @ x.v_BH1MD.mT
        # Equal to the paper's rowsum(dO * O), without the rounding of a half-precision O.
        delta_BHGN1 = (p_BHGNM * dp_BHGNM).sum(-1, keepdim=True)
        if grad_lse is not None:
            # d lse / d score is P, so its gradient joins where delta leaves.
            delta_BHGN1 = delta_BHGN1 - torch.where(alive_BHGN1, group_heads(grad_lse, key_heads)[..., None], 0)
        ds_BHGNM = p_BHGNM * (dp_BHGNM - delta_BHGN1)
        grad_bias = ds_BHGNM.flatten(1, 2) if bias_needs_grad else ds_BHGNM.new_empty(0)
        if slope_BHGNM is not None:
            ds_BHGNM = torch.where(p_BHGNM == 0, 0, ds_BHGNM * slope_BHGNM)
        ds_BHGNM = ds_BHGNM * scale
        dq_BHGND = ds_BHGNM @ x.k_BH1MD
        dk_BHMD = (ds_BHGNM.mT @ x.q_BHGND).sum(2)
        dv_BHMD = (p_BHGNM.mT @ do_BHGND).sum(2)
        if x.rope_q is not None and x.rope_k is not None:
            dq_BHGND = rotate(dq_BHGND, x.rope_q[0], -x.rope_q[1], interleaved)
            dk_BHMD = rotate(dk_BHMD.unsqueeze(2), x.rope_k[0], -x.rope_k[1], interleaved).squeeze(2)
    grad_q = to_layout_of(q, dq_BHGND.flatten(1, 2).to(q.dtype))
    return grad_q, to_layout_of(k, dk_BHMD.to(k.dtype)), to_layout_of(v, dv_BHMD.to(v.dtype)), grad_bias
