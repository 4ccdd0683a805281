"""The ``dskernels_triton`` operators: those of the other schemas, served by Triton's kernels.

Triton is imported when a kernel first runs, not before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import one_by_one, register_gradient
from dskernels._library import TRITON_LIBRARY, define
from dskernels._operators import register_by
from dskernels.window_attention import decode_schema, schema, varlen_schema
from dskernels.window_attention.batching import fold_into_batch

triton_forward_op = define("window_attention", schema.FORWARD, TRITON_LIBRARY, keep=True)
triton_backward_op = define("window_attention_backward", schema.BACKWARD, TRITON_LIBRARY)
triton_varlen_forward_op = define("window_attention_varlen", varlen_schema.FORWARD, TRITON_LIBRARY, keep=True)
triton_varlen_backward_op = define("window_attention_varlen_backward", varlen_schema.BACKWARD, TRITON_LIBRARY)
triton_decode_op = define("window_attention_decode", decode_schema.FORWARD, TRITON_LIBRARY)


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

register_by(schema, triton_forward_op, triton_backward_op, TRITON_LIBRARY, vmap=fold_into_batch)
register_by(varlen_schema, triton_varlen_forward_op, triton_varlen_backward_op, TRITON_LIBRARY, vmap=one_by_one)
torch.library.register_fake(triton_decode_op, decode_schema.forward_fake, lib=TRITON_LIBRARY)
register_gradient(triton_decode_op, decode_schema.no_backward, vmap=fold_into_batch, lib=TRITON_LIBRARY)
register_flop_formula(triton_decode_op.overloadpacket, get_raw=True)(decode_schema.forward_flop)
