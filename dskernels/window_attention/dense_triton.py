"""Window attention over whole batches in Triton: the kernels of `triton` and `triton_backward`, told of a window."""

from __future__ import annotations

import torch
from torch import Tensor

from dskernels._library import empty_in_layout_of
from dskernels.window_attention.triton import launch_forward
from dskernels.window_attention.triton_backward import launch_dkdv, launch_dq
from dskernels.window_attention.triton_common import narrowed, on_device_of, rotated


def window_attention_triton(
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
    """``out`` and ``lse`` of `dskernels.window_attention`."""
    batch, heads, queries, _ = q.shape
    out = empty_in_layout_of(q, (batch, heads, queries, v.shape[3]))
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    with on_device_of(q):
        x = narrowed(q, k, v, cos, sin, positions, bias, left, right, query_offset, interleaved)
        return launch_forward(x, sink, out, lse, scale, softcap)


def window_attention_backward_triton(
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
    grad_q, grad_k, grad_v = (empty_in_layout_of(x, x.shape) for x in (q, k, v))
    # Zero where no tile comes by: beyond the window.
    grad_bias = lse.new_zeros((*q.shape[:3], k.shape[2]) if bias_needs_grad else (0,))
    with on_device_of(q):
        x = narrowed(q, k, v, cos, sin, positions, bias, left, right, query_offset, interleaved)
        keys = x.k.shape[2]
        if keys == 0 or q.numel() == 0:
            return grad_q.zero_(), grad_k.zero_(), grad_v.zero_(), grad_bias
        if keys < k.shape[2]:
            grad_k.zero_()
            grad_v.zero_()
        seen_grad_k, seen_grad_v = (grad.narrow(2, x.first_key, keys) for grad in (grad_k, grad_v))
        seen_grad_bias = grad_bias.narrow(3, x.first_key, keys) if bias_needs_grad else None
        # Gradients that are still to be rotated back are kept in float32: they are rounded once, at the end.
        to_q = grad_q if cos is None else torch.empty(q.shape, dtype=torch.float32, device=q.device)
        to_k = seen_grad_k if cos is None else torch.empty(x.k.shape, dtype=torch.float32, device=q.device)
        delta = launch_dq(x, grad_out, grad_lse, out, lse, to_q, seen_grad_bias, scale, softcap)
        launch_dkdv(x, grad_out, lse, delta, to_k, seen_grad_v, scale, softcap)
        if cos is not None and sin is not None:
            table = (cos, sin, positions)
            rotated(to_q, grad_q, *table, query_offset, interleaved, back=True)
            rotated(to_k, seen_grad_k, *table, x.first_key, interleaved, back=True)
    return grad_q, grad_k, grad_v, grad_bias
