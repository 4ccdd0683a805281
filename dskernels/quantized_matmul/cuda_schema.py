"""The ``dskernels_cuda`` operators: those of the other schema, served by the CUDA kernels of ``dskernels._C``."""

from __future__ import annotations

from dskernels._library import CUDA_LIBRARY, define
from dskernels._operators import register_by
from dskernels.quantized_matmul import schema

cuda_forward_op = define("quantized_matmul", schema.FORWARD, CUDA_LIBRARY)
cuda_backward_op = define("quantized_matmul_backward", schema.BACKWARD, CUDA_LIBRARY)

register_by(schema, cuda_forward_op, cuda_backward_op, CUDA_LIBRARY, vmap=schema.map_rows, autocasts=1)
