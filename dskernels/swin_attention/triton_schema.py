"""The ``dskernels_triton`` operators: those of the other schema, served by Triton's kernels.

Triton is imported when a kernel first runs, not before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import register_autocast, register_gradient
from dskernels._library import TRITON_LIBRARY, define_triton
from dskernels.swin_attention import schema

triton_forward_op = define_triton("swin_attention", schema.FORWARD)
triton_backward_op = define_triton("swin_attention_backward", schema.BACKWARD)


def _forward(*arguments: Any) -> Tensor:
    from dskernels.swin_attention.triton import swin_attention_triton

    return swin_attention_triton(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from dskernels.swin_attention.triton import swin_attention_backward_triton

    return swin_attention_backward_triton(*arguments)


TRITON_LIBRARY.impl("swin_attention", _forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("swin_attention_backward", _backward, "CompositeExplicitAutograd")

torch.library.register_fake(triton_forward_op, schema.forward_fake, lib=TRITON_LIBRARY)
torch.library.register_fake(triton_backward_op, schema.backward_fake, lib=TRITON_LIBRARY)
register_gradient(
    triton_forward_op,
    functools.partial(schema.backward_by, triton_backward_op),
    setup_context=schema.save_for_backward,
    vmap=schema.map_images,
    autocasts=1,
    lib=TRITON_LIBRARY,
)
register_gradient(triton_backward_op, schema.double_backward, vmap=schema.map_images, lib=TRITON_LIBRARY)
register_autocast(triton_forward_op, 1, TRITON_LIBRARY)
# Raw: what the other schema registered turns arguments into shapes itself.
register_flop_formula(torch.ops.dskernels_triton.swin_attention, get_raw=True)(schema.forward_flop)
register_flop_formula(torch.ops.dskernels_triton.swin_attention_backward, get_raw=True)(schema.backward_flop)
