"""torchao's int8 weights, eager or compiled. torchao 0.18 has no int4 or fp8 kernels for an x86 CPU."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._trials import fastest

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import Inputs, MatmulProblem


def _refuses(problem: MatmulProblem) -> str | None:
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def _prepare(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    # Every case compiles anew; what earlier ones left behind would count against Dynamo's limit of recompilations.
    torch._dynamo.reset()
    x, weight = inputs.x, inputs.weight
    dynamic = problem.scheme == "int8_dynamic"

    layer = torch.nn.Linear(problem.in_features, problem.out_features, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig())

    def eager(weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    weights = inputs.copies(layer.weight.clone, problem.weight_bytes)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": eager,
        "compiled": torch.compile(eager, fullgraph=True, dynamic=False),
    }
    runs = {name: inputs.step(form, weights) for name, form in forms.items()}
    best = fastest(runs)
    return Prepared(runs[best], {"form": best, "forms_tried": list(forms), "weights": len(weights)})


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="torchao",
        title="torchao",
        refuses=_refuses,
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
    )
}
