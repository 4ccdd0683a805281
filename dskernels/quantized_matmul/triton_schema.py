"""The ``dskernels_triton`` operators: those of the other schema, served by Triton's kernels.

Triton is imported when a kernel first runs, not before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dskernels._library import TRITON_LIBRARY, define
from dskernels._operators import register_by
from dskernels.quantized_matmul import schema

triton_forward_op = define("quantized_matmul", schema.FORWARD, TRITON_LIBRARY)
triton_backward_op = define("quantized_matmul_backward", schema.BACKWARD, TRITON_LIBRARY)


def _forward(*arguments: Any) -> Tensor:
    from dskernels.quantized_matmul.triton import quantized_matmul_triton

    return quantized_matmul_triton(*arguments)


def _backward(*arguments: Any) -> Tensor:
    from dskernels.quantized_matmul.triton import quantized_matmul_backward_triton

    return quantized_matmul_backward_triton(*arguments)


TRITON_LIBRARY.impl("quantized_matmul", _forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("quantized_matmul_backward", _backward, "CompositeExplicitAutograd")

register_by(schema, triton_forward_op, triton_backward_op, TRITON_LIBRARY, vmap=schema.map_rows, autocasts=1)
