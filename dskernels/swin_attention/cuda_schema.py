"""The ``dskernels_cuda`` operators: those of the other schema, served by the CUDA kernels of ``dskernels._C``."""

from __future__ import annotations

from dskernels._library import CUDA_LIBRARY, define
from dskernels._operators import register_by
from dskernels.swin_attention import schema

cuda_forward_op = define("swin_attention", schema.FORWARD, CUDA_LIBRARY, keep=True)
cuda_backward_op = define("swin_attention_backward", schema.BACKWARD, CUDA_LIBRARY)

register_by(schema, cuda_forward_op, cuda_backward_op, CUDA_LIBRARY, vmap=schema.map_images, autocasts=1)
