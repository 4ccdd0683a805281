"""The operators ``dskernels::quantized_matmul`` and ``dskernels::quantized_matmul_backward`` as torch sees them.

Definition, default (the reference), shapes for tracing, gradient, autocast rule and operation count.
Compiled kernels join when ``dskernels._C`` is loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import not_again, register_autocast, register_gradient
from dskernels._library import LIBRARY, define
from dskernels.quantized_matmul.reference import quantized_matmul_backward_reference, quantized_matmul_reference

FORWARD = (
    "(Tensor x, Tensor qweight, Tensor scale, Tensor? zero_point, Tensor? input_scale, Tensor? input_order,"
    " Tensor? bias, int scheme, SymInt group_size) -> Tensor"
)
BACKWARD = (
    "(Tensor grad, Tensor qweight, Tensor scale, Tensor? zero_point, Tensor? input_order, int scheme,"
    " SymInt group_size, SymInt in_features) -> Tensor"
)

forward_op = define("quantized_matmul", FORWARD)
backward_op = define("quantized_matmul_backward", BACKWARD)

LIBRARY.impl("quantized_matmul", quantized_matmul_reference, "CompositeExplicitAutograd")
LIBRARY.impl("quantized_matmul_backward", quantized_matmul_backward_reference, "CompositeExplicitAutograd")


@torch.library.register_fake(forward_op, lib=LIBRARY)
def forward_fake(x: Tensor, qweight: Tensor, *options: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


@torch.library.register_fake(backward_op, lib=LIBRARY)
def backward_fake(grad: Tensor, *options: Any) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], options[-1]))


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, qweight, scale, zero_point, _input_scale, input_order, bias, scheme, group_size = inputs
    ctx.save_for_backward(qweight, scale, zero_point, input_order)
    ctx.options = (scheme, group_size, x.shape[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype


def backward_by(operator: Callable[..., Tensor], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of the forward operator, that of x by backward ``operator``.

    A weight in codes is not differentiated, nor are its scales.
    """
    wants_x, *_, wants_bias, _, _ = ctx.needs_input_grad
    grad_x = operator(grad, *ctx.saved_tensors, *ctx.options) if wants_x else None
    grad_bias = None
    if wants_bias:
        rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
        grad_bias = rows.sum(0, dtype=torch.float64 if grad.dtype == torch.float64 else torch.float32)
        grad_bias = grad_bias.to(ctx.bias_dtype)
    return (grad_x, None, None, None, None, None, grad_bias, None, None)


def map_rows(
    operator: torch._ops.OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[Tensor, int]:
    """The vmap rule: what is mapped joins the leading dimensions of the first argument, unless weights are mapped."""
    if all(dim is None for dim in in_dims[1:]):
        return operator(arguments[0].movedim(in_dims[0], 0), *arguments[1:]), 0

    def element(x: Any, dim: int | None, i: int) -> Any:
        # Of no elements one is made up, whose result tells the shape.
        return x if dim is None else x.select(dim, i).contiguous() if info.batch_size else x.sum(dim).to(x.dtype)

    calls = [
        operator(*(element(x, dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(max(info.batch_size, 1))
    ]
    return torch.stack(calls)[: info.batch_size], 0


double_backward = not_again("quantized_matmul")
register_gradient(
    forward_op,
    functools.partial(backward_by, backward_op),
    setup_context=save_for_backward,
    vmap=map_rows,
    autocasts=1,
    lib=LIBRARY,
)
register_gradient(backward_op, double_backward, vmap=map_rows, lib=LIBRARY)
register_autocast(forward_op, 1, LIBRARY)


@register_flop_formula(torch.ops.dskernels.quantized_matmul)
def forward_flop(x: Any, qweight: Any, *options: Any, **_: Any) -> int:
    """Operations of the product; a multiply-add counts 2. The Triton operators share it."""
    return _product_flop(x, qweight[0])


@register_flop_formula(torch.ops.dskernels.quantized_matmul_backward)
def backward_flop(grad: Any, qweight: Any, *options: Any, **_: Any) -> int:
    return _product_flop(grad, options[-1])


def _product_flop(shape: tuple[int, ...], width: int) -> int:
    return 2 * width * math.prod(shape)
