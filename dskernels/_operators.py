"""What operators of the same name share, whatever their kernels: shapes for tracing, gradients, operation counts."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import VmapRule, register_autocast, register_gradient


def register_by(
    rules: ModuleType,
    forward_op: torch._ops.OpOverload,
    backward_op: torch._ops.OpOverload,
    library: torch.library.Library,
    *,
    vmap: VmapRule,
    autocasts: int = 0,
) -> None:
    """Gives the operators shapes for tracing, gradients, an autocast rule and operation counts.

    Args:
        rules: the module that defines the operators of the same names: their ``forward_fake``, ``backward_fake``,
            ``save_for_backward``, ``backward_by``, ``double_backward``, ``forward_flop`` and ``backward_flop``.
        forward_op: of `define`.
        backward_op: of `define`.
        library: that of the two.
        vmap: as in `register_gradient`, for both.
        autocasts: how many of the first arguments of the forward are cast under autocast. Default: none.
    """
    torch.library.register_fake(forward_op, rules.forward_fake, lib=library)
    torch.library.register_fake(backward_op, rules.backward_fake, lib=library)
    register_gradient(
        forward_op,
        functools.partial(rules.backward_by, backward_op),
        setup_context=rules.save_for_backward,
        vmap=vmap,
        autocasts=autocasts,
        lib=library,
    )
    register_gradient(backward_op, rules.double_backward, vmap=vmap, lib=library)
    if autocasts:
        register_autocast(forward_op, autocasts, library)
    # Raw: what the other schema registered turns arguments into shapes itself.
    register_flop_formula(forward_op.overloadpacket, get_raw=True)(rules.forward_flop)
    register_flop_formula(backward_op.overloadpacket, get_raw=True)(rules.backward_flop)
