"""torch's products of e4m3 with scales: one for 1 x 128 and 128 x 128 blocks where this GPU has it, else one a row.

Activations are quantized in each call, compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import Inputs, MatmulProblem

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_BLOCK = 128
# cuBLAS wants columns of scales at multiples of 16 bytes.
_ROWS = 4


class _Weight(NamedTuple):
    """Codes ``[N, K]`` in e4m3, and float32 scales."""

    codes: Tensor
    scale: Tensor

    def copy(self) -> _Weight:
        return _Weight(*(tensor.clone() for tensor in self))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def _prepare(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    torch._dynamo.reset()
    try:
        return _timed(inputs, _block_weight(inputs), _by_blocks, "1 x 128 and 128 x 128")
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        return _timed(inputs, _row_weight(inputs), _by_rows, f"one a row, as blocks are refused: {reason}")


def _timed(
    inputs: Inputs, weight: _Weight, make: Callable[[Tensor], Callable[[_Weight], Tensor]], scales: str
) -> Prepared:
    weights = inputs.copies(weight.copy, weight.nbytes)
    return Prepared(inputs.step(make(inputs.x), weights), {"scales": scales, "weights": len(weights)})


def _block_weight(inputs: Inputs) -> _Weight:
    return _Weight(inputs.quantized.qweight.view(_E4M3), inputs.quantized.scale)


def _by_blocks(x: Tensor) -> Callable[[_Weight], Tensor]:
    recipes = F.ScalingType

    @torch.compile(fullgraph=True, dynamic=False)
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        groups = F.pad(x, (0, 0, 0, -len(x) % _ROWS)).float().unflatten(1, (-1, _BLOCK))
        scale = groups.abs().amax(-1).clamp(min=1e-12) / _LARGEST
        return (groups / scale[..., None]).to(_E4M3).flatten(1), scale

    def multiply(weight: _Weight) -> Tensor:
        codes, scale = quantize(x)
        by_columns = scale.t().contiguous().t()
        recipe = (by_columns, recipes.BlockWise1x128, weight.scale.t(), recipes.BlockWise128x128)
        return F.scaled_mm(codes, weight.codes.t(), *recipe, output_dtype=x.dtype)[: len(x)]

    return multiply


def _row_weight(inputs: Inputs) -> _Weight:
    scale = inputs.weight.float().abs().amax(1) / _LARGEST
    return _Weight((inputs.weight.float() / scale[:, None]).to(_E4M3), scale[None])


def _by_rows(x: Tensor) -> Callable[[_Weight], Tensor]:
    @torch.compile(fullgraph=True, dynamic=False)
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / _LARGEST
        return (x.float() / scale).to(_E4M3), scale

    def multiply(weight: _Weight) -> Tensor:
        codes, scale = quantize(x)
        return torch._scaled_mm(codes, weight.codes.t(), scale, weight.scale, out_dtype=x.dtype)

    return multiply


COMPETITORS = {
    "quantized_matmul": Competitor(
        name="scaled_mm",
        title="torch's scaled_mm",
        refuses=lambda problem: None,
        prepare=_prepare,
        allowed_error=lambda problem: problem.rounding_error,
        devices=("cuda",),
    )
}
