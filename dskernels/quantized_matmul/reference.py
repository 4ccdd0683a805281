"""Quantized matrix products in plain PyTorch: the meaning of every scheme.

Activations are rounded as Jacob et al., "Quantization and Training of Neural Networks", 2018, equation 1, a scale for
each row; in blocks as DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Integer products are exact:
they are taken in float64, which holds any sum of them up to 2**53.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dskernels._library import autocast_disabled
from dskernels.quantized_matmul.weight import (
    FP8_BLOCK,
    FP8_LARGEST,
    INT4_SCHEMES,
    INT8_LARGEST,
    SCHEMES,
    dequantize,
    divided,
)

_SMALLEST_NORMAL = 2.0**-126
# Rows that are smaller or larger are lifted into the middle of float32's range, where no step of the scale is lost.
_SMALL, _LARGE, _LIFT = 2.0**-60, 2.0**60, 2.0**64


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes of the rows of ``x``, with a scale for each row.

    A row is multiplied by ``lift``, a power of two (1 but for rows of tiny or huge numbers); with ``a`` its largest
    magnitude then, ``code = clamp(round(x * lift * (127 / a)), -127, 127)`` and ``scale = a / 127``, in float32, so
    that ``x`` is about ``code * scale / lift``. A row that is not finite has the scale NaN.

    Args:
        x: float32 ``[M, K]``.

    Returns:
        Codes, int8 ``[M, K]``; ``scale`` and ``1 / lift``, float32 ``[M]``.
    """
    largest = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    finite = largest.isfinite()
    lift = torch.where(largest < _SMALL, _LIFT, torch.where(largest > _LARGE, 1 / _LIFT, 1.0))
    largest = largest * lift
    # Of tensors, for torch takes a number over a tensor as a reciprocal and a product, which round twice.
    inverse = torch.where(finite & (largest > 0), torch.full_like(largest, INT8_LARGEST) / largest, 0.0)
    codes = _int8_codes(x * lift[:, None], inverse[:, None])
    return codes, torch.where(finite, divided(largest, INT8_LARGEST), torch.nan), 1 / lift


def quantize_rows_by(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes ``clamp(round(x * (1 / input_scale)), -127, 127)`` of the rows of ``x``, float32 ``[M, K]``, and their
    scale, float32 ``[M]``: ``input_scale``, and NaN for rows that are not finite."""
    codes = _int8_codes(x, 1 / input_scale)
    return codes, torch.where(x.isfinite().all(1), input_scale, torch.nan)


def quantize_blocks(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``x``, float32 ``[M, K]``, rounded to e4m3 times a scale for each block of 128 columns.

    With ``a`` the largest magnitude of a block, ``scale = max(a / 448, 2**-126)`` and the result is
    ``e4m3(x / scale) * scale``, in ``dtype``; not finite in blocks that are not.
    """
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % FP8_BLOCK))
    blocks = padded.view(rows, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    scale = divided(blocks.abs().amax(2, keepdim=True), FP8_LARGEST).clamp(min=_SMALLEST_NORMAL)
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return (codes.to(dtype) * scale.to(dtype)).view(padded.shape)[:, :columns]


def _int8_codes(x: Tensor, inverse: Tensor) -> Tensor:
    return (x * inverse).round().clamp(-INT8_LARGEST, INT8_LARGEST).nan_to_num(0.0).to(torch.int8)


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
