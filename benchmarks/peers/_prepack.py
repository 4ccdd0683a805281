"""Weights for the engines behind torch's quantized products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import dskernels as dk

if TYPE_CHECKING:
    from benchmarks.ops.quantized_matmul import MatmulProblem


def why_not(engine: str, problem: MatmulProblem) -> str | None:
    """The reason why an engine cannot take a problem, or None."""
    if engine not in torch.backends.quantized.supported_engines:
        return f"this torch has no {engine}"
    return None if problem.dtype == "fp32" else "takes float32 activations only"


def packer(engine: str, weight: dk.QuantizedWeight) -> Callable[[], Any]:
    """What packs an int8 weight, with a scale for each row, as ``engine`` likes it, anew with every call."""
    zeros = torch.zeros(weight.out_features, dtype=torch.int64)
    with warnings.catch_warnings():
        # Quantized tensors are deprecated, and nothing else makes what the engines pack.
        warnings.simplefilter("ignore", UserWarning)
        codes = torch._make_per_channel_quantized_tensor(weight.qweight, weight.scale.double(), zeros, 0)

    def pack() -> Any:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine
        try:
            return torch.ops.quantized.linear_prepack(codes, None)
        finally:
            torch.backends.quantized.engine = before

    return pack
