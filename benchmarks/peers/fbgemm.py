"""FBGEMM, through the operators behind ``torch.ao.quantization.quantize_dynamic``.

It quantizes activations to 7 bits with one scale for all rows: its AVX2 kernels add up pairs of products in 16 bits. A
static scale is given to it as torch's own observers would choose it for it, with 7 bits as well.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._prepack import packer, why_not

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import Inputs, MatmulProblem


def _prepare(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    x, weight = inputs.x, inputs.quantized
    step = None if weight.input_scale is None else float(weight.input_scale) * 127 / 63
    weights = inputs.copies(packer("fbgemm", weight), weight.qweight.nbytes)

    def multiply(packed: Any) -> Tensor:
        if step is None:
            out: Tensor = torch.ops.quantized.linear_dynamic(x, packed, True)
        else:
            out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, step, 64, packed)
        return out

    return Prepared(inputs.step(multiply, weights), {"activations": "7 bits", "weights": len(weights)})


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="fbgemm",
        title="FBGEMM",
        refuses=partial(why_not, "fbgemm"),
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
        devices=("cpu",),
    )
}
