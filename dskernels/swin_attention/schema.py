"""The operators ``dskernels::swin_attention`` and ``dskernels::swin_attention_backward`` as torch sees them.

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

from dskernels._autograd import not_again, one_by_one, register_autocast, register_gradient
from dskernels._library import LIBRARY, define
from dskernels.swin_attention.reference import (
    compute_dtype,
    swin_attention_backward_reference,
    swin_attention_reference,
)

_INPUTS = "Tensor qkv, Tensor? cos, Tensor? sin, Tensor? bias, Tensor? logit_scale"
_OPTIONS = (
    "SymInt heads, SymInt window_height, SymInt window_width, SymInt shift_height, SymInt shift_width, float scale,"
    " bool interleaved"
)

FORWARD = f"({_INPUTS}, {_OPTIONS}) -> Tensor"
BACKWARD = (
    f"(Tensor grad_out, {_INPUTS}, {_OPTIONS}, bool bias_needs_grad, bool logit_scale_needs_grad)"
    " -> (Tensor grad_qkv, Tensor grad_bias, Tensor grad_logit_scale)"
)

forward_op = define("swin_attention", FORWARD, keep=True)
backward_op = define("swin_attention_backward", BACKWARD)

LIBRARY.impl("swin_attention", swin_attention_reference, "CompositeExplicitAutograd")
LIBRARY.impl("swin_attention_backward", swin_attention_backward_reference, "CompositeExplicitAutograd")


@torch.library.register_fake(forward_op, lib=LIBRARY)
def forward_fake(qkv: Tensor, *options: Any) -> Tensor:
    return qkv.new_empty((*qkv.shape[:3], qkv.shape[3] // 3))


@torch.library.register_fake(backward_op, lib=LIBRARY)
def backward_fake(
    grad_out: Tensor, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    logit_scale, heads, window_height, window_width, *_, bias_needs_grad, logit_scale_needs_grad = rest
    tokens = window_height * window_width
    # What is not there has no gradient, whatever is asked for.
    grads_bias = bias is not None and bias_needs_grad
    grads_logit_scale = logit_scale is not None and logit_scale_needs_grad
    grad_bias = qkv.new_empty((heads, tokens, tokens) if grads_bias else (0,), dtype=compute_dtype(qkv))
    grad_logit_scale = qkv.new_empty((heads if grads_logit_scale else 0,), dtype=compute_dtype(qkv))
    return qkv.new_empty(qkv.shape), grad_bias, grad_logit_scale


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Neither out nor the softmax's sums: a window's scores are computed again as a whole.
    tensors, ctx.options = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors)


def backward_by(operator: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of the forward operator, by backward ``operator``."""
    wants_qkv, _, _, wants_bias, wants_logit_scale, *options = ctx.needs_input_grad
    grads = operator(grad_out, *ctx.saved_tensors, *ctx.options, wants_bias, wants_logit_scale)
    wants = (wants_qkv, wants_bias, wants_logit_scale)
    grad_qkv, grad_bias, grad_logit_scale = (g if wanted else None for g, wanted in zip(grads, wants, strict=True))
    return (grad_qkv, None, None, grad_bias, grad_logit_scale, *(None for _ in options))


def map_images(
    operator: torch._ops.OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[Any, Any]:
    """The vmap rule: mapped images join the batch, unless what all of a batch share is mapped or has a gradient."""
    is_forward = operator._schema.arguments[0].name == "qkv"
    images = 1 if is_forward else 2
    sums = not is_forward and any(arguments[-2:])
    if sums or any(dim is not None for dim in in_dims[images:]):
        return one_by_one(operator, info, in_dims, *arguments)

    def mapped(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    stacks = [mapped(x, dim) for x, dim in zip(arguments[:images], in_dims[:images], strict=True)]
    results = operator(*(x.flatten(0, 1) for x in stacks), *arguments[images:])
    if is_forward:
        return results.unflatten(0, stacks[0].shape[:2]), 0
    grad_qkv, *nothing = results
    return (grad_qkv.unflatten(0, stacks[0].shape[:2]), *nothing), (0, None, None)


double_backward = not_again("swin_attention")
register_gradient(
    forward_op,
    functools.partial(backward_by, backward_op),
    setup_context=save_for_backward,
    vmap=map_images,
    autocasts=1,
    lib=LIBRARY,
)
register_gradient(backward_op, double_backward, vmap=map_images, lib=LIBRARY)
register_autocast(forward_op, 1, LIBRARY)


def _pairs_along(length: int, window: int, shift: int) -> int:
    """The sum of n * n over the pieces, n tokens long, into which a grid of windows cuts an axis."""
    first = min(shift, length)
    whole, last = divmod(length - first, window)
    return first * first + whole * window * window + last * last


def _attention_flop(qkv: tuple[int, ...], options: tuple[Any, ...], products: int) -> int:
    _heads, window_height, window_width, shift_height, shift_width, *_ = options
    pairs = _pairs_along(qkv[1], window_height, shift_height) * _pairs_along(qkv[2], window_width, shift_width)
    # Every product is as wide as all heads together; a multiply-add counts 2, as everywhere in torch's counter.
    return 2 * products * qkv[0] * pairs * (qkv[3] // 3)


@register_flop_formula(torch.ops.dskernels.swin_attention)
def forward_flop(qkv: Any, cos: Any, sin: Any, bias: Any, logit_scale: Any, *options: Any, **_: Any) -> int:
    """Operations of the forward, scores and output; the Triton operators share it."""
    return _attention_flop(qkv, options, 2)


@register_flop_formula(torch.ops.dskernels.swin_attention_backward)
def backward_flop(
    grad_out: Any, qkv: Any, cos: Any, sin: Any, bias: Any, logit_scale: Any, *options: Any, **_: Any
) -> int:
    # Scores again, dP, dq, dk and dv.
    return _attention_flop(qkv, options, 5)
