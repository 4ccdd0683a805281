"""Quantized matrix products in plain PyTorch: the meaning of every scheme.

Integer products are exact: they are taken in float64, which holds any sum of them up to 2**53.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dskernels._library import autocast_disabled
from dskernels.quantized_matmul.activations import quantize_blocks, quantize_rows, quantize_rows_by
from dskernels.quantized_matmul.weight import FP8_BLOCK, INT4_SCHEMES, SCHEMES, dequantize


def quantized_matmul_reference(
    x: Tensor,
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    input_scale: Tensor | None,
    input_order: Tensor | None,
    bias: Tensor | None,
    scheme: int,
    group_size: int,
) -> Tensor:
    """The product as the operator's default, in float32 (float64 for float64 inputs), rounded once at the end."""
    in_features = x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with autocast_disabled(x.device.type):
        rows = x.reshape(math.prod(x.shape[:-1]), in_features)
        if input_order is not None:
            rows = rows[:, input_order]
        weight = qweight, scale, zero_point, None, scheme, group_size, in_features
        name = SCHEMES[scheme]
        if name.endswith("weight_only"):
            out = rows.to(wide) @ dequantize(*weight, wide).T
        elif name == "fp8_block":
            out = quantize_blocks(rows.to(torch.float32), wide) @ dequantize(*weight, wide).T
        else:
            is_int4 = name in INT4_SCHEMES
            matrix = dequantize(*weight, torch.float64) if is_int4 else qweight.double()
            out = _integer_product(rows.to(torch.float32), matrix, None if is_int4 else scale, input_scale, wide)
        if bias is not None:
            out = out + bias.to(wide)
        result: Tensor = out.to(x.dtype).reshape(*x.shape[:-1], qweight.shape[0])
        return result


def _integer_product(
    rows: Tensor, matrix: Tensor, scale: Tensor | None, input_scale: Tensor | None, wide: torch.dtype
) -> Tensor:
    if input_scale is None:
        codes, row_scale, unlift = quantize_rows(rows)
    else:
        codes, row_scale = quantize_rows_by(rows, input_scale)
        unlift = torch.ones_like(row_scale)
    out = (codes.double() @ matrix.T).to(wide) * row_scale.to(wide)[:, None]
    if scale is not None:
        out = out * scale.to(wide)
    return out * unlift.to(wide)[:, None]


# Rows of the weight that are dequantized at a time: a block, not the whole, stands in memory as floats.
_BACKWARD_ROWS = 512


def quantized_matmul_backward_reference(
    grad: Tensor,
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    input_order: Tensor | None,
    scheme: int,
    group_size: int,
    in_features: int,
) -> Tensor:
    """``grad @ W``, the gradient of ``x`` straight through its rounding, in float32 (float64 for float64)."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    with autocast_disabled(grad.device.type):
        rows = grad.reshape(math.prod(grad.shape[:-1]), qweight.shape[0]).to(wide)
        result = rows.new_zeros((rows.shape[0], in_features))
        scale_rows = FP8_BLOCK if SCHEMES[scheme] == "fp8_block" else 1
        for first in range(0, qweight.shape[0], _BACKWARD_ROWS):
            end = min(first + _BACKWARD_ROWS, qweight.shape[0])
            scales = slice(first // scale_rows, -(-end // scale_rows))
            zeros = None if zero_point is None else zero_point[first:end]
            part = qweight[first:end], scale[scales], zeros, input_order, scheme, group_size, in_features
            result.addmm_(rows[:, first:end], dequantize(*part, wide))
        return result.to(grad.dtype).reshape(*grad.shape[:-1], in_features)
