"""``F.linear`` with the weight as it was before it was quantized, in the dtype of the activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from benchmarks.case import Competitor, Prepared

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import Inputs, MatmulProblem


def _prepare(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    x, weight = inputs.x, inputs.weight
    weights = inputs.copies(weight.clone, weight.nbytes)
    return Prepared(inputs.step(lambda weight: F.linear(x, weight), weights), {"weights": len(weights)})


_LINEAR = Competitor(name="linear", title="F.linear", refuses=lambda problem: None, prepare=_prepare)
COMPETITORS = {"quantized_matmul": _LINEAR, "quantized_matmul_shapes": _LINEAR}
