"""The operators ``dskernels_triton::window_attention`` and its backward: those of `schema`, served by Triton's kernels.

Triton is imported when a kernel first runs, not before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import register_gradient
from dskernels._library import TRITON_LIBRARY, define_triton
from dskernels.window_attention import schema
from dskernels.window_attention.batching import fold_into_batch

triton_forward_op = define_triton("window_attention", schema.FORWARD)
triton_backward_op = define_triton("window_attention_backward", schema.BACKWARD)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from dskernels.window_attention.triton import window_attention_triton

    return window_attention_triton(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from dskernels.window_attention.triton_backward import window_attention_backward_triton

    return window_attention_backward_triton(*arguments)


TRITON_LIBRARY.impl("window_attention", _forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("window_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(triton_forward_op, schema.forward_fake, lib=TRITON_LIBRARY)
torch.library.register_fake(triton_backward_op, schema.backward_fake, lib=TRITON_LIBRARY)
register_gradient(
    triton_forward_op,
    functools.partial(schema.backward_by, triton_backward_op),
    setup_context=schema.save_for_backward,
    vmap=fold_into_batch,
    lib=TRITON_LIBRARY,
)
register_gradient(triton_backward_op, schema.double_backward, vmap=fold_into_batch, lib=TRITON_LIBRARY)
register_flop_formula(torch.ops.dskernels_triton.window_attention)(schema.forward_flop)
register_flop_formula(torch.ops.dskernels_triton.window_attention_backward)(schema.backward_flop)
