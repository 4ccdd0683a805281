"""How operators take part in autograd and in the transforms of ``torch.func``.

``torch.library.register_autograd`` serves reverse mode alone: ``torch.func.grad`` refuses what it registers, and
forward mode passes through it and silently loses its tangents. So an operator gets a ``torch.autograd.Function`` of its
own here, with all that the transforms ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from dskernels._library import autocast_disabled, cast_for_autocast

# (operator, info, in_dims, *arguments) -> outputs and their mapped dimensions, each as the operator returns them.
VmapRule = Callable[..., tuple[Any, Any]]


def register_autocast(operator: torch._ops.OpOverload, casts: int, lib: torch.library.Library) -> None:
    """Under autocast the first ``casts`` arguments of ``operator`` are cast to its dtype.

    The rest is not: tables of half precision could not tell late positions apart, and to cast caches would read and
    write all of them at every step.
    """

    def rule(*arguments: Any) -> Any:
        cast = cast_for_autocast(*arguments[:casts])
        with autocast_disabled(cast[0].device.type):
            return operator(*cast, *arguments[casts:])

    for key in ("AutocastCPU", "AutocastCUDA"):
        lib.impl(operator, rule, key)


def not_again(name: str) -> Callable[..., Any]:
    """The backward of a backward kernel, which says that there is none."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f'{name}: the compiled backward cannot be differentiated again; backend="reference" can be, any number of'
            " times"
        )

    return refuse


def register_gradient(
    operator: torch._ops.OpOverload,
    backward: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    vmap: VmapRule,
    autocasts: int = 0,
    lib: torch.library.Library,
) -> None:
    """Makes ``operator`` differentiable, and known to ``torch.func``.

    Args:
        operator: takes positional arguments, returns a tensor or a tuple of them.
        backward: ``backward(ctx, *grads)`` returns a gradient or None for each argument.
        setup_context: ``setup_context(ctx, inputs, output)`` saves what ``backward`` needs. Default: saves nothing.
        vmap: ``vmap(operator, info, in_dims, *arguments)`` returns the outputs and the dimensions that are mapped.
        autocasts: how many of the first arguments the operator casts under autocast. Default: none.
        lib: the library that defines the operator.
    """
    name = operator._schema.name.split("::")[1]

    def forward(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{name}: the kernels have no forward-mode derivative (jvp); take reverse mode (grad, vjp, jacrev) or "
            'backend="reference"'
        )

    def vmap_rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return vmap(operator, info, in_dims, *arguments)

    members = {
        "forward": forward,
        "setup_context": setup_context or save_nothing,
        "backward": backward,
        "jvp": jvp,
        "vmap": vmap_rule,
    }
    title = "".join(part.title() for part in name.split("_"))
    function: Any = type(title, (torch.autograd.Function,), {key: staticmethod(f) for key, f in members.items()})

    def transformed(*arguments: Any) -> Any:
        # A transform is entered above autocast, and what is saved must be what was computed from.
        cast = cast_for_autocast(*arguments[:autocasts]) if autocasts else ()
        return function.apply(*cast, *arguments[autocasts:])

    def differentiated(*arguments: Any) -> Any:
        return function.apply(*arguments) if _has_derivative(arguments) else forward(*arguments)

    lib.impl(operator, differentiated, "Autograd")
    # Where the transforms of torch.func set in. Left to torch, they come by way of the Autograd key, too late for a
    # Function to be transformed.
    lib.impl(operator, transformed, "FuncTorchDynamicLayerFrontMode")


def invoke(operator: torch._ops.OpOverload, *arguments: Any) -> Any:
    """Calls an operator of `register_gradient`, past all that looks after gradients where there are none to be.

    On its way an operator meets rules in Python, which cost as much as the kernel of a small product.
    """
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None or _has_derivative(arguments):
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _has_derivative(arguments: tuple[Any, ...]) -> bool:
    # A Function that nobody asked for costs as much as the kernel of a short call.
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return True
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)


def one_by_one(
    operator: torch._ops.OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[Any, Any]:
    """A vmap rule for every operator: a call for each element of the mapped dimension."""

    def element(x: Any, dim: int | None, i: int) -> Any:
        if dim is None:
            return x
        # Of no elements one is made up, whose results tell the shapes.
        return x.select(dim, i) if info.batch_size else x.sum(dim)

    results = []
    for i in range(max(info.batch_size, 1)):
        results.append(operator(*(element(x, dim, i) for x, dim in zip(arguments, in_dims, strict=True))))
    if isinstance(results[0], Tensor):
        return torch.stack(results)[: info.batch_size], 0
    stacked = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
