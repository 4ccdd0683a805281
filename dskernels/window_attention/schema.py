"""The operators ``dskernels::window_attention`` and ``dskernels::window_attention_backward`` as torch sees them.

Definition, default (the reference), shapes for tracing, gradient, autocast rule and operation count.
Compiled kernels join when ``dskernels._C`` is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import not_again, register_autocast, register_gradient
from dskernels._library import LIBRARY, define, empty_in_layout_of
from dskernels.window_attention.batching import fold_into_batch
from dskernels.window_attention.reference import (
    compute_dtype,
    window_attention_backward_reference,
    window_attention_reference,
)

_TABLES = "Tensor? cos, Tensor? sin, Tensor? positions, Tensor? bias, Tensor? sink"
_OPTIONS = "SymInt? left, SymInt? right, SymInt query_offset, float scale, float softcap, bool interleaved"

FORWARD = f"(Tensor q, Tensor k, Tensor v, {_TABLES}, {_OPTIONS}) -> (Tensor out, Tensor lse)"
BACKWARD = (
    f"(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TABLES}, {_OPTIONS},"
    " bool bias_needs_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias)"
)

forward_op = define("window_attention", FORWARD, keep=True)
backward_op = define("window_attention_backward", BACKWARD)

LIBRARY.impl("window_attention", window_attention_reference, "CompositeExplicitAutograd")
LIBRARY.impl("window_attention_backward", window_attention_backward_reference, "CompositeExplicitAutograd")


@torch.library.register_fake(forward_op, lib=LIBRARY)
def forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    out = empty_in_layout_of(q, (batch, heads, queries, v.shape[3]))
    return out, q.new_empty((batch, heads, queries), dtype=compute_dtype(q))


@torch.library.register_fake(backward_op, lib=LIBRARY)
def backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias_needs_grad = rest[-1]
    grad_bias = lse.new_empty((*q.shape[:3], k.shape[2]) if bias_needs_grad else (0,))
    grads = (empty_in_layout_of(q, q.shape), empty_in_layout_of(k, k.shape), empty_in_layout_of(v, v.shape))
    return (*grads, grad_bias)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cos, sin, positions, bias, sink, *ctx.options = inputs
    # Most losses do not use lse: its missing gradient stays None, which the kernels skip.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cos, sin, positions, bias, sink)


def backward_by(
    operator: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of the forward operator, those of q, k, v and bias by backward ``operator``."""
    q, k, v, out, lse, cos, sin, positions, bias, sink = ctx.saved_tensors
    wants_q, wants_k, wants_v, _, _, _, wants_bias, wants_sink, *options = ctx.needs_input_grad
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = operator(grad_out, grad_lse, q, k, v, out, lse, cos, sin, positions, bias, sink, *ctx.options, wants_bias)
    wants = (wants_q, wants_k, wants_v, wants_bias)
    grad_q, grad_k, grad_v, grad_bias = (g if wanted else None for g, wanted in zip(grads, wants, strict=True))
    grad_sink = sink_gradient(grad_out, grad_lse, out, lse, sink) if wants_sink else None
    return (grad_q, grad_k, grad_v, None, None, None, grad_bias, grad_sink, *(None for _ in options))


def sink_gradient(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The gradient of ``sink`` ``[Hq]`` for ``out`` ``[B, Hq, N, Dv]`` and ``lse`` ``[B, Hq, N]``."""
    # The sink's weight is p = exp(sink - lse) and its value is 0, so d loss / d sink is the sum of -p * delta.
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    # Not a weight of 0 times delta: where there is no softmax the gradient of out may hold anything, NaN too.
    weighted = torch.where(lse == -torch.inf, 0, torch.exp(sink[:, None] - lse) * delta)
    return -weighted.sum((0, 2)).to(sink.dtype)


register_gradient(
    forward_op,
    functools.partial(backward_by, backward_op),
    setup_context=save_for_backward,
    vmap=fold_into_batch,
    autocasts=3,
    lib=LIBRARY,
)


double_backward = not_again("window_attention")
register_gradient(backward_op, double_backward, vmap=fold_into_batch, lib=LIBRARY)


register_autocast(forward_op, 3, LIBRARY)


def count_seen_pairs(queries: int, keys: int, left: int | None, right: int | None, query_offset: int) -> int:
    """How many (query, key) pairs a window lets through, in closed form."""

    def pairs_up_to(distance: int) -> int:
        # Query i sees clip(i + query_offset + distance + 1, 0, keys) of the keys j <= i + query_offset + distance.
        first = query_offset + distance + 1
        return _sum_of_clipped(first + queries - 1, keys) - _sum_of_clipped(first - 1, keys)

    if left is not None and right is not None and left + right < 0:
        return 0
    below_right = queries * keys if right is None else pairs_up_to(right)
    below_left = 0 if left is None else pairs_up_to(-left - 1)
    return below_right - below_left


def _sum_of_clipped(last: int, keys: int) -> int:
    # The sum of clip(x, 0, keys) over all integers x <= last.
    rising = min(max(last, 0), keys)
    return rising * (rising + 1) // 2 + max(last - keys, 0) * keys


def _attention_flop(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], left: int | None, right: int | None, offset: int, width: int
) -> int:
    pairs = count_seen_pairs(q_shape[2], k_shape[2], left, right, offset)
    return 2 * q_shape[0] * q_shape[1] * pairs * width


@register_flop_formula(torch.ops.dskernels.window_attention)
def forward_flop(q: Any, k: Any, v: Any, *options: Any, **_: Any) -> int:
    """Operations of the forward; the Triton operators share it."""
    _cos, _sin, _positions, _bias, _sink, left, right, offset, *_rest = options
    # Scores and output; a multiply-add counts 2, as everywhere in torch's counter.
    return _attention_flop(q, k, left, right, offset, q[3] + v[3])


@register_flop_formula(torch.ops.dskernels.window_attention_backward)
def backward_flop(
    grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any, **_: Any
) -> int:
    _cos, _sin, _positions, _bias, _sink, left, right, offset, *_rest = options
    # Scores again, dq and dk over the head's width; dv and dp over the value's.
    return _attention_flop(q, k, left, right, offset, 3 * q[3] + 2 * v[3])
