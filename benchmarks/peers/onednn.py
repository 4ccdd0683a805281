"""oneDNN, through torch's engine of that name: dynamic, and the product with a static scale that Inductor calls."""

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
    if problem.scheme == "int8_static":
        return _prepare_static(inputs)
    weights = inputs.copies(packer("onednn", weight), weight.qweight.nbytes)

    def multiply(packed: Any) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic(x, packed, False)
        return out

    return Prepared(inputs.step(multiply, weights), {"weights": len(weights)})


def _prepare_static(inputs: Inputs) -> Prepared:
    x, weight = inputs.x, inputs.quantized
    assert weight.input_scale is not None
    step = float(weight.input_scale)
    zeros = torch.zeros(weight.out_features, dtype=torch.int32)

    def pack() -> Tensor:
        packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.qweight, list(x.shape))
        return packed

    def multiply(packed: Tensor) -> Tensor:
        codes = torch.quantize_per_tensor(x, step, 128, torch.quint8).int_repr()
        scales = (step, 128, packed, weight.scale, zeros, None, 1.0, 0)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(codes, *scales, torch.float32, "none", [], "")
        return out

    weights = inputs.copies(pack, weight.qweight.nbytes)
    return Prepared(inputs.step(multiply, weights), {"weights": len(weights)})


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="onednn",
        title="oneDNN",
        refuses=partial(why_not, "onednn"),
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
        devices=("cpu",),
    )
}
