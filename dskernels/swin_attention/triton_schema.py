"""The ``dskernels_triton`` operators: those of the other schema, served by Triton's kernels.

Triton is imported when a kernel first runs, not before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dskernels._library import TRITON_LIBRARY, define
from dskernels._operators import register_by
from dskernels.swin_attention import schema

triton_forward_op = define("swin_attention", schema.FORWARD, TRITON_LIBRARY, keep=True)
triton_backward_op = define("swin_attention_backward", schema.BACKWARD, TRITON_LIBRARY)


def _forward(*arguments: Any) -> Tensor:
    from dskernels.swin_attention.triton import swin_attention_triton

    return swin_attention_triton(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from dskernels.swin_attention.triton import swin_attention_backward_triton

    return swin_attention_backward_triton(*arguments)


TRITON_LIBRARY.impl("swin_attention", _forward, "CompositeExplicitAutograd")
TRITON_LIBRARY.impl("swin_attention_backward", _backward, "CompositeExplicitAutograd")

register_by(schema, triton_forward_op, triton_backward_op, TRITON_LIBRARY, vmap=schema.map_images, autocasts=1)
