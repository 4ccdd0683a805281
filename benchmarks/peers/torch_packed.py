"""torch's own operators on packed weights, a different one for each scheme.

For float32 activations the weight-only ones are slower by an order of magnitude than for bfloat16, so activations go
through bfloat16 there. ``_int_mm`` takes codes, and leaves quantizing and scaling to eager operators; torchao compiles
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import dskernels as dk
from benchmarks.case import Competitor, Prepared
from benchmarks.peers._trials import fastest
from dskernels.quantized_matmul.weight import unpack_int4

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import Inputs, MatmulProblem


# cuBLAS's limit, as torch checks it.
_LEAST_ROWS = 16
# How many tiles of 16 values a thread of the GPU's kernel reads at once: 2, 4 or 8.
_INNER_TILES = 8


def _refuses(problem: MatmulProblem) -> str | None:
    if problem.scheme == "int8_dynamic" and problem.device == "cuda" and problem.rows <= _LEAST_ROWS:
        return f"on a GPU _int_mm takes more than {_LEAST_ROWS} rows only"
    if problem.scheme == "int4_dynamic" and problem.rows > 1:
        return "_dyn_quant_matmul_4bit is a scalar loop on x86, and takes a second for 16 rows"
    if problem.scheme == "int4_dynamic" and problem.dtype != "fp32":
        return "_dyn_quant_matmul_4bit takes float32 activations only"
    return None


def _prepare(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    if problem.scheme == "int8_dynamic":
        return _int_mm(inputs)
    make = {
        "int8_weight_only": _int8pack,
        "int4_weight_only": _int4pack,
        "int4_dynamic": _dyn_quant_4bit,
    }[problem.scheme]
    packed, multiply, operator = make(inputs.x, inputs.quantized)
    weights = inputs.copies(packed.clone, packed.nbytes)
    return Prepared(inputs.step(multiply, weights), {"operator": operator, "weights": len(weights)})


def _int_mm(inputs: Inputs) -> Prepared:
    x, weight = inputs.x, inputs.quantized

    def multiply(codes: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).float() / 127
        product = torch._int_mm((x / scale).round().to(torch.int8), codes)
        return (product.float().mul_(scale).mul_(weight.scale)).to(x.dtype)

    # Which one is faster depends on the instruction set.
    forms = {"columns": weight.qweight.T}
    if not x.is_cuda:
        forms["rows"] = weight.qweight.T.contiguous()
    weights = {name: inputs.copies(codes.clone, codes.nbytes) for name, codes in forms.items()}
    runs = {name: inputs.step(multiply, made) for name, made in weights.items()}
    best = fastest(runs)
    notes = {"operator": "_int_mm", "contiguous": best, "tried": list(forms), "weights": len(weights[best])}
    return Prepared(runs[best], notes)


# The packed weight, what multiplies by it, and the operator's name.
_Packed = tuple[Tensor, Callable[[Tensor], Tensor], str]


def _int8pack(x: Tensor, weight: dk.QuantizedWeight) -> _Packed:
    scale = weight.scale.bfloat16()

    def multiply(codes: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.bfloat16(), codes, scale).to(x.dtype)

    return weight.qweight, multiply, "_weight_int8pack_mm in bfloat16"


def _int4pack(x: Tensor, weight: dk.QuantizedWeight) -> _Packed:
    codes = unpack_int4(weight.qweight, weight.in_features)
    # What stands for code 8 is added: 0, as the weights are symmetric.
    scales = torch.stack((weight.scale.T, torch.zeros_like(weight.scale.T)), -1).bfloat16().contiguous()

    operator = "_weight_int4pack_mm" if x.is_cuda else "_weight_int4pack_mm_for_cpu"
    product = getattr(torch, operator)
    if x.is_cuda:
        pairs = codes[:, ::2].to(torch.uint8) << 4 | codes[:, 1::2].to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(pairs.contiguous(), _INNER_TILES)
    else:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)

    def multiply(packed: Tensor) -> Tensor:
        out: Tensor = product(x.bfloat16(), packed, weight.group_size, scales)
        return out.to(x.dtype)

    return packed, multiply, f"{operator} in bfloat16"


def _dyn_quant_4bit(x: Tensor, weight: dk.QuantizedWeight) -> _Packed:
    sizes = (weight.group_size, weight.in_features, weight.out_features)
    packed = torch._dyn_quant_pack_4bit_weight(weight.qweight, weight.scale.bfloat16(), None, *sizes)

    def multiply(packed: Tensor) -> Tensor:
        return torch._dyn_quant_matmul_4bit(x, packed, *sizes)

    return packed, multiply, "_dyn_quant_matmul_4bit"


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="torch_packed",
        title="torch's packed operators",
        refuses=_refuses,
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
    )
}
