"""Swin attention in plain PyTorch: the windowed formula that the compiled kernels are held to.

A shifted grid needs no roll and no region mask: its windows are cut where they cross the border of the image, so the
image is padded up to whole windows on all sides, and what is padding is not attended. Forward and backward are computed
in float32 (float64 for float64 inputs) and rounded once at the end.

Shape suffixes: B batch, G windows of the grid, H heads, N and M tokens of a window, D components of a head.
"""
# ruff: noqa: N815 - shape suffixes are capitals, in fields too

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import autocast_disabled
from dskernels.rope import rotate

# What torch.nn.functional.normalize divides by at least.
_SMALLEST_NORM = 1e-12


class Window(NamedTuple):
    """Rows and columns of a window, and how far into the image the grid of windows starts."""

    height: int
    width: int
    shift_height: int
    shift_width: int


def _grid(window: Window, height: int, width: int) -> tuple[int, int, int, int]:
    """What the image is padded with at the top and the left, and how many windows there are down and across."""
    top, left = -window.shift_height % window.height, -window.shift_width % window.width
    return top, left, -(-(height + top) // window.height), -(-(width + left) // window.width)


def partition(x: Tensor, window: Window) -> Tensor:
    """``[B, H, W, C]`` as windows ``[B, G, N, C]``, row by row; zeros where a window reaches beyond the image."""
    top, left, rows, columns = _grid(window, x.shape[1], x.shape[2])
    bottom, right = rows * window.height - top - x.shape[1], columns * window.width - left - x.shape[2]
    x = torch.nn.functional.pad(x, (0, 0, left, right, top, bottom))
    # An axis at a time: of sizes that are symbols, those of a whole view are proved equal at great length.
    x = x.unflatten(1, (rows, window.height)).unflatten(3, (columns, window.width))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def merge(x: Tensor, window: Window, height: int, width: int) -> Tensor:
    """What `partition` took apart: windows ``[B, G, N, C]`` as an image ``[B, height, width, C]``."""
    top, left, rows, columns = _grid(window, height, width)
    x = x.unflatten(1, (rows, columns)).unflatten(3, (window.height, window.width))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, top : top + height, left : left + width]


class _Operands(NamedTuple):
    # As they enter the products: wide, normalized, rotated. `present` is false for padding; the norms are None without
    # cosine attention.
    q_BGHND: Tensor
    k_BGHMD: Tensor
    v_BGHMD: Tensor
    present_G1N1: Tensor
    rope_HND: tuple[Tensor, Tensor] | None
    normalized: tuple[Tensor, Tensor] | None
    norms: tuple[Tensor, Tensor] | None


def compute_dtype(qkv: Tensor) -> torch.dtype:
    return torch.float64 if qkv.dtype == torch.float64 else torch.float32


def _operands(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, window: Window, cosine: bool, interleaved: bool
) -> _Operands:
    dtype = compute_dtype(qkv)
    inside = torch.ones((1, *qkv.shape[1:3], 1), dtype=torch.bool, device=qkv.device)
    present_G1N1 = partition(inside, window)[0].unsqueeze(1)
    windows = partition(qkv, window).to(dtype).unflatten(-1, (3, heads, -1))
    q_BGHND, k_BGHMD, v_BGHMD = windows.permute(3, 0, 1, 4, 2, 5)
    normalized = norms = None
    if cosine:
        # Bounded before the root, whose derivative at 0 is infinite: the keys of padding may all be zeros.
        squares = (x.square().sum(-1, keepdim=True).clamp_min(_SMALLEST_NORM**2) for x in (q_BGHND, k_BGHMD))
        norms = tuple(square.sqrt() for square in squares)
        normalized = (q_BGHND / norms[0], k_BGHMD / norms[1])
        q_BGHND, k_BGHMD = normalized
    rope_HND = None
    if cos is not None and sin is not None:
        rope_HND = (cos.to(dtype), sin.to(dtype))
        q_BGHND, k_BGHMD = (rotate(x, *rope_HND, interleaved) for x in (q_BGHND, k_BGHMD))
    return _Operands(q_BGHND, k_BGHMD, v_BGHMD, present_G1N1, rope_HND, normalized, norms)


def _factor(logit_scale: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor | float:
    return scale if logit_scale is None else logit_scale.to(dtype)[:, None, None]


def _weights(x: _Operands, bias: Tensor | None, factor: Tensor | float) -> Tensor:
    scores_BGHNM = x.q_BGHND @ x.k_BGHMD.mT * factor
    if bias is not None:
        scores_BGHNM = scores_BGHNM + bias.to(scores_BGHNM.dtype)
    # Padding is excluded by -inf, never by a large number.
    seen_G11M = x.present_G1N1.mT
    scores_BGHNM = torch.where(seen_G11M, scores_BGHNM, -torch.inf)
    # A row of nothing but -inf is computed from zeros instead, and its weights replaced: finite numbers in between keep
    # its gradient finite. Rows of padding see real tokens; what they give is cut off, so let them be zeros, too.
    alive_BGHN1 = (scores_BGHNM > -torch.inf).any(-1, keepdim=True) | scores_BGHNM.isnan().any(-1, keepdim=True)
    alive_BGHN1 = alive_BGHN1 & x.present_G1N1
    p_BGHNM = torch.where(alive_BGHN1, scores_BGHNM, 0).softmax(-1)
    return torch.where(alive_BGHN1 & seen_G11M, p_BGHNM, 0)


def swin_attention_reference(
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
    """``out`` of `dskernels.swin_attention`; differentiable any number of times."""
    window = Window(window_height, window_width, shift_height, shift_width)
    with autocast_disabled(qkv.device.type):
        x = _operands(qkv, cos, sin, heads, window, logit_scale is not None, interleaved)
        p_BGHNM = _weights(x, bias, _factor(logit_scale, scale, compute_dtype(qkv)))
        out_BGNC = (p_BGHNM @ x.v_BGHMD).transpose(2, 3).flatten(-2)
        return merge(out_BGNC, window, qkv.shape[1], qkv.shape[2]).to(qkv.dtype).contiguous()


def swin_attention_backward_reference(
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
    window = Window(window_height, window_width, shift_height, shift_width)
    dtype = compute_dtype(qkv)
    with autocast_disabled(qkv.device.type):
        x = _operands(qkv, cos, sin, heads, window, logit_scale is not None, interleaved)
        factor = _factor(logit_scale, scale, dtype)
        p_BGHNM = _weights(x, bias, factor)
        do_BGHND = partition(grad_out, window).to(dtype).unflatten(-1, (heads, -1)).transpose(2, 3)
        dp_BGHNM = do_BGHND @ x.v_BGHMD.mT
        ds_BGHNM = p_BGHNM * (dp_BGHNM - (p_BGHNM * dp_BGHNM).sum(-1, keepdim=True))
        # 0 * NaN: what is not finite in a window is nothing to the pairs of places that the window lacks.
        ds_BGHNM = torch.where(x.present_G1N1 & x.present_G1N1.mT, ds_BGHNM, 0)
        grads_bias = bias is not None and bias_needs_grad
        grad_bias = ds_BGHNM.sum((0, 1)) if grads_bias else ds_BGHNM.new_empty(0)
        dq_BGHND, dk_BGHMD = ds_BGHNM @ x.k_BGHMD, ds_BGHNM.mT @ x.q_BGHND
        dv_BGHMD = p_BGHNM.mT @ do_BGHND
        # scores = factor * <q, k>, so the sum of ds * <q, k> is the sum of <dq, q> before dq gets the factor.
        needed = logit_scale is not None and logit_scale_needs_grad
        grad_logit_scale = (dq_BGHND * x.q_BGHND).sum((0, 1, 3, 4)) if needed else ds_BGHNM.new_empty(0)
        grads = [dq_BGHND * factor, dk_BGHMD * factor]
        if x.rope_HND is not None:
            cos_HND, sin_HND = x.rope_HND
            grads = [rotate(g, cos_HND, -sin_HND, interleaved) for g in grads]
        if x.normalized is not None and x.norms is not None:
            grads = [
                (g - torch.where(norm > _SMALLEST_NORM, y * (y * g).sum(-1, keepdim=True), 0)) / norm
                for g, y, norm in zip(grads, x.normalized, x.norms, strict=True)
            ]
        windows = torch.stack((*grads, dv_BGHMD), 2)
        grad_BGNC = windows.permute(0, 1, 4, 2, 3, 5).flatten(-3)
        grad_qkv = merge(grad_BGNC, window, qkv.shape[1], qkv.shape[2]).to(qkv.dtype).contiguous()
    return grad_qkv, grad_bias, grad_logit_scale
