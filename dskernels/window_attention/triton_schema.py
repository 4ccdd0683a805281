"""The ``dskernels_triton`` operators: those of the other schemas, served by Triton's kernels.

Triton is imported when a kernel first runs, not before.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import VmapRule, one_by_one, register_gradient
from dskernels._library import TRITON_LIBRARY, define_triton
from dskernels.window_attention import decode_schema, schema, varlen_schema
from dskernels.window_attention.batching import fold_into_batch

triton_forward_op = define_triton("window_attention", schema.FORWARD)
triton_backward_op = define_triton("window_attention_backward", schema.BACKWARD)
triton_varlen_forward_op = define_triton("window_attention_varlen", varlen_schema.FORWARD)
triton_varlen_backward_op = define_triton("window_attention_varlen_backward", varlen_schema.BACKWARD)
triton_decode_op = define_triton("window_attention_decode", decode_schema.FORWARD)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from dskernels.window_attention.dense_triton import window_attention_triton

    return window_attention_triton(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from dskernels.window_attention.dense_triton import window_attention_backward_triton

    return window_attention_backward_triton(*arguments)


def _varlen_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from dskernels.window_attention.varlen_triton import window_attention_varlen_triton

    return window_attention_varlen_triton(*arguments)


def _varlen_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from dskernels.window_attention.varlen_triton import window_attention_varlen_backward_triton

    return window_attention_varlen_backward_triton(*arguments)


def _decode(*arguments: Any) -> tuple[Tensor, Tensor]:
    from dskernels.window_attention.decode_triton import window_attention_decode_triton

    return window_attention_decode_triton(*arguments)


TRITON_LIBRARY.impl("window_attention", _forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("window_attention_backward", _backward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("window_attention_varlen", _varlen_forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("window_attention_varlen_backward", _varlen_backward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("window_attention_decode", _decode, "CompositeExplicitAutograd")


def _register(
    forward_op: torch._ops.OpOverload, backward_op: torch._ops.OpOverload, rules: ModuleType, vmap: VmapRule
) -> None:
    """Shapes for tracing and gradients, by the rules of the operators of the same names."""
    torch.library.register_fake(forward_op, rules.forward_fake, lib=TRITON_LIBRARY)
    torch.library.register_fake(backward_op, rules.backward_fake, lib=TRITON_LIBRARY)
    backward = functools.partial(rules.backward_by, backward_op)
    register_gradient(forward_op, backward, setup_context=rules.save_for_backward, vmap=vmap, lib=TRITON_LIBRARY)
    register_gradient(backward_op, rules.double_backward, vmap=vmap, lib=TRITON_LIBRARY)


_register(triton_forward_op, triton_backward_op, schema, fold_into_batch)
_register(triton_varlen_forward_op, triton_varlen_backward_op, varlen_schema, one_by_one)
torch.library.register_fake(triton_decode_op, decode_schema.forward_fake, lib=TRITON_LIBRARY)
register_gradient(triton_decode_op, decode_schema.no_backward, vmap=fold_into_batch, lib=TRITON_LIBRARY)
_namespace = torch.ops.dskernels_triton
register_flop_formula(_namespace.window_attention, get_raw=True)(schema.forward_flop)
register_flop_formula(_namespace.window_attention_backward, get_raw=True)(schema.backward_flop)
register_flop_formula(_namespace.window_attention_varlen, get_raw=True)(varlen_schema.forward_flop)
register_flop_formula(_namespace.window_attention_varlen_backward, get_raw=True)(varlen_schema.backward_flop)
register_flop_formula(_namespace.window_attention_decode, get_raw=True)(decode_schema.forward_flop)
