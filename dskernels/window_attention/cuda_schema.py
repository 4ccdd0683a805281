"""The ``dskernels_cuda`` operators: those of the other schemas, served by the CUDA kernels of ``dskernels._C``."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import one_by_one, register_gradient
from dskernels._library import CUDA_LIBRARY, define
from dskernels._operators import register_by
from dskernels.window_attention import decode_schema, schema, varlen_schema
from dskernels.window_attention.batching import fold_into_batch

cuda_forward_op = define("window_attention", schema.FORWARD, CUDA_LIBRARY, keep=True)
cuda_backward_op = define("window_attention_backward", schema.BACKWARD, CUDA_LIBRARY)
cuda_varlen_forward_op = define("window_attention_varlen", varlen_schema.FORWARD, CUDA_LIBRARY, keep=True)
cuda_varlen_backward_op = define("window_attention_varlen_backward", varlen_schema.BACKWARD, CUDA_LIBRARY)
cuda_decode_op = define("window_attention_decode", decode_schema.FORWARD, CUDA_LIBRARY)

register_by(schema, cuda_forward_op, cuda_backward_op, CUDA_LIBRARY, vmap=fold_into_batch)
register_by(varlen_schema, cuda_varlen_forward_op, cuda_varlen_backward_op, CUDA_LIBRARY, vmap=one_by_one)
torch.library.register_fake(cuda_decode_op, decode_schema.forward_fake, lib=CUDA_LIBRARY)
register_gradient(cuda_decode_op, decode_schema.no_backward, vmap=fold_into_batch, lib=CUDA_LIBRARY)
register_flop_formula(cuda_decode_op.overloadpacket, get_raw=True)(decode_schema.forward_flop)
