"""The operators ``dskernels::window_attention_varlen`` and ``dskernels::window_attention_varlen_backward``.

Definition, default (the reference), shapes for tracing, gradient, autocast rule and operation count, as in `schema`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import not_again, one_by_one, register_autocast, register_gradient
from dskernels._library import LIBRARY, define
from dskernels.window_attention.reference import compute_dtype
from dskernels.window_attention.schema import count_seen_pairs, sink_gradient
from dskernels.window_attention.varlen_reference import (
    window_attention_varlen_backward_reference,
    window_attention_varlen_reference,
)

_TABLES = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? cos, Tensor? sin, Tensor? sink"
_OPTIONS = "SymInt? left, SymInt? right, float scale, float softcap, bool interleaved"

FORWARD = f"(Tensor q, Tensor k, Tensor v, {_TABLES}, {_OPTIONS}) -> (Tensor out, Tensor lse)"
BACKWARD = (
    f"(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TABLES}, {_OPTIONS})"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)

varlen_forward_op = define("window_attention_varlen", FORWARD, keep=True)
varlen_backward_op = define("window_attention_varlen_backward", BACKWARD)

LIBRARY.impl("window_attention_varlen", window_attention_varlen_reference, "CompositeExplicitAutograd")
LIBRARY.impl(
    "window_attention_varlen_backward", window_attention_varlen_backward_reference, "CompositeExplicitAutograd"
)


@torch.library.register_fake(varlen_forward_op, lib=LIBRARY)
def forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, v.shape[2])), q.new_empty((heads, tokens), dtype=compute_dtype(q))


@torch.library.register_fake(varlen_backward_op, lib=LIBRARY)
def backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, cos, sin, sink, *ctx.options = inputs
    # Most losses do not use lse: its missing gradient stays None, which the kernels skip.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, cos, sin, sink)


def backward_by(
    operator: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of the forward operator, those of q, k and v by backward ``operator``."""
    q, k, v, out, lse, *tables = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = operator(grad_out, grad_lse, q, k, v, out, lse, *tables, *ctx.options)
    wanted = (g if wants else None for g, wants in zip(grads, ctx.needs_input_grad[:3], strict=True))
    grad_sink = None
    if ctx.needs_input_grad[7]:
        as_batch = (grad_lse if grad_lse is None else grad_lse[None], out.transpose(0, 1)[None], lse[None])
        grad_sink = sink_gradient(grad_out.transpose(0, 1)[None], *as_batch, tables[-1])
    return (*wanted, None, None, None, None, grad_sink, *(None for _ in ctx.options))


register_gradient(
    varlen_forward_op,
    functools.partial(backward_by, varlen_backward_op),
    setup_context=save_for_backward,
    vmap=one_by_one,
    autocasts=3,
    lib=LIBRARY,
)


double_backward = not_again("window_attention_varlen")
register_gradient(varlen_backward_op, double_backward, vmap=one_by_one, lib=LIBRARY)


register_autocast(varlen_forward_op, 3, LIBRARY)


def _attention_flop(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, left: int | None, right: int | None, width: int
) -> int:
    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, FakeTensor):
        # The lengths are values, which a trace does not have: what it gets is the most that they can come to.
        lengths = [(q.shape[0], k.shape[0])]
    else:
        lengths = list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True))
    pairs = sum(count_seen_pairs(queries, keys, left, right, keys - queries) for queries, keys in lengths)
    return 2 * q.shape[1] * pairs * width


@register_flop_formula(torch.ops.dskernels.window_attention_varlen, get_raw=True)
def forward_flop(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *options: Any, **_: Any
) -> int:
    """Operations of the forward; the Triton operators share it."""
    _cos, _sin, _sink, left, right, *_rest = options
    return _attention_flop(q, k, cu_seqlens_q, cu_seqlens_k, left, right, q.shape[2] + v.shape[2])


@register_flop_formula(torch.ops.dskernels.window_attention_varlen_backward, get_raw=True)
def backward_flop(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *options: Any, **_: Any
) -> int:
    _out, _lse, cu_seqlens_q, cu_seqlens_k, _cos, _sin, _sink, left, right, *_rest = options
    return _attention_flop(q, k, cu_seqlens_q, cu_seqlens_k, left, right, 3 * q.shape[2] + 2 * v.shape[2])
