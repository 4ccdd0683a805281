"""Window attention over packed sequences in Triton: the kernels of `triton` and `triton_backward`, told of offsets.

To them packed tokens are a batch of one. A program finds out on the device which sequence its tile belongs to, and then
works as on a sequence that is alone (`triton_common.sequence_of`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dskernels.window_attention.triton import launch_forward
from dskernels.window_attention.triton_backward import launch_dkdv, launch_dq
from dskernels.window_attention.triton_common import Packing, Problem, on_device_of, rotated


def _as_batch(x: Tensor) -> Tensor:
    """``[T, H, D]`` as ``[1, H, T, D]``, without a copy."""
    return x.transpose(0, 1).unsqueeze(0)


def _packings(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, k: Tensor) -> tuple[Packing, Packing]:
    """Where queries and keys are rotated: the last query of a sequence stands at its last key, and that at itself."""
    offsets_q, offsets_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return Packing(offsets_q, offsets_k, k.shape[0]), Packing(offsets_k, offsets_k, k.shape[0])


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    left: int | None,
    right: int | None,
    interleaved: bool,
) -> Problem:
    # As far as any two tokens can be apart: no bound beyond it says more, and it leaves the kernels int32.
    farthest = q.shape[0] + k.shape[0] + 1
    start = -farthest if left is None else max(-farthest, min(farthest, -left))
    stop = farthest if right is None else max(-farthest, min(farthest, right + 1))
    of_q, of_k = _packings(cu_seqlens_q, cu_seqlens_k, k)
    x = Problem(_as_batch(q), _as_batch(k), _as_batch(v), None, 0, start, stop, of_q.offsets, of_k.offsets)
    if cos is None or sin is None:
        return x
    turned_q, turned_k = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x.q, x.k))
    return x._replace(
        q=rotated(x.q, turned_q, cos, sin, None, 0, interleaved, packing=of_q),
        k=rotated(x.k, turned_k, cos, sin, None, 0, interleaved, packing=of_k),
    )


def window_attention_varlen_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of `dskernels.window_attention_varlen`."""
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, v.shape[2]))
    lse = q.new_empty((heads, tokens), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    with on_device_of(q):
        x = _problem(q, k, v, cu_seqlens_q, cu_seqlens_k, cos, sin, left, right, interleaved)
        launch_forward(x, sink, _as_batch(out), lse, scale, softcap)
    return out, lse


def window_attention_varlen_backward_triton(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from those of ``out`` and ``lse``."""
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    if q.shape[0] == 0 or k.shape[0] == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    with on_device_of(q):
        x = _problem(q, k, v, cu_seqlens_q, cu_seqlens_k, cos, sin, left, right, interleaved)
        to_q, to_k = _as_batch(grad_q), _as_batch(grad_k)
        if cos is not None:
            # Gradients that are still to be rotated back are kept in float32: they are rounded once, at the end.
            to_q, to_k = (torch.empty(y.shape, dtype=torch.float32, device=y.device) for y in (x.q, x.k))
        given = _as_batch(grad_out), None if grad_lse is None else grad_lse.unsqueeze(0)
        # The kernels read it without strides; a transform of torch.func may hand over a view.
        lse = lse.contiguous()
        delta = launch_dq(x, *given, _as_batch(out), lse, to_q, None, scale, softcap)
        launch_dkdv(x, given[0], lse, delta, to_k, _as_batch(grad_v), scale, softcap)
        if cos is not None and sin is not None:
            of_q, of_k = _packings(cu_seqlens_q, cu_seqlens_k, k)
            rotated(to_q, _as_batch(grad_q), cos, sin, None, 0, interleaved, packing=of_q, back=True)
            rotated(to_k, _as_batch(grad_k), cos, sin, None, 0, interleaved, packing=of_k, back=True)
    return grad_q, grad_k, grad_v
