"""torchao's int8 weights and, on a GPU, int4 ones, eager or compiled. It has no int4 kernels for an x86 CPU (0.18)."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
        from torchao.quantization import quantize_
    # Every case compiles anew; what earlier ones left behind would count against Dynamo's limit of recompilations.
    torch._dynamo.reset()
    x, weight = inputs.x, inputs.weight
    layer = torch.nn.Linear(problem.in_features, problem.out_features, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, _config(problem))

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


def _config(problem: MatmulProblem) -> Any:
    from torchao import quantization

    if problem.scheme == "int8_dynamic":
        return quantization.Int8DynamicActivationInt8WeightConfig()
    if problem.scheme == "int8_weight_only":
        return quantization.Int8WeightOnlyConfig()
    # The format of tinygemm, which needs nothing beyond torch.
    return quantization.Int4WeightOnlyConfig(group_size=problem.group_size, int4_packing_format="tile_packed_to_4d")


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="torchao",
        title="torchao",
        refuses=_refuses,
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
    )
}
