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
from dskernels.quantized_matmul import schema

triton_forward_op = define_triton("quantized_matmul", schema.FORWARD)
triton_backward_op = define_triton("quantized_matmul_backward", schema.BACKWARD)


def _forward(*arguments: Any) -> Tensor:
    from dskernels.quantized_matmul.triton import quantized_matmul_triton

    return quantized_matmul_triton(*arguments)


def _backward(*arguments: Any) -> Tensor:
    from dskernels.quantized_matmul.triton import quantized_matmul_backward_triton

    return quantized_matmul_backward_triton(*arguments)


TRITON_LIBRARY.impl("quantized_matmul", _forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("quantized_matmul_backward", _backward, "CompositeExplicitAutograd")

torch.library.register_fake(triton_forward_op, schema.forward_fake, lib=TRITON_LIBRARY)
torch.library.register_fake(triton_backward_op, schema.backward_fake, lib=TRITON_LIBRARY)
register_gradient(
    triton_forward_op,
    functools.partial(schema.backward_by, triton_backward_op),
    setup_context=schema.save_for_backward,
    vmap=schema.map_rows,
    autocasts=1,
    lib=TRITON_LIBRARY,
)
register_gradient(triton_backward_op, schema.double_backward, vmap=schema.map_rows, lib=TRITON_LIBRARY)
register_autocast(triton_forward_op, 1, TRITON_LIBRARY)
# Raw: what the other schema registered turns arguments into shapes itself.
register_flop_formula(torch.ops.dskernels_triton.quantized_matmul, get_raw=True)(schema.forward_flop)
register_flop_formula(torch.ops.dskernels_triton.quantized_matmul_backward, get_raw=True)(schema.backward_flop)
