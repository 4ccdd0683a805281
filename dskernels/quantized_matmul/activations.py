"""How activations are rounded before they meet a quantized weight."""

from __future__ import annotations

import torch
from torch import Tensor

from dskernels._library import autocast_disabled
from dskernels.checks import wrong_type, wrong_value
from dskernels.quantized_matmul.weight import (
    FP8_BLOCK,
    FP8_LARGEST,
    INT8_LARGEST,
    SCHEMES,
    checked_input_scale,
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


def round_activations(x: Tensor, scheme: str, *, input_scale: Tensor | float | None = None) -> Tensor:
    """Activations as `quantized_matmul` sees them: rounded to codes, and back to numbers.

    With a step ``sx`` for each row (dynamic), for all (``int8_static``), or for 128 columns of a row (fp8)::

        *_weight_only:                           x
        int8_dynamic, int8_static, int4_dynamic: clamp(round(x / sx), -127, 127) * sx
        fp8_block:                               e4m3(x / sx) * sx

    Args:
        x: shape ``[..., K]``, float32, bfloat16, float16 or float64. Not differentiated.
        scheme: see `QuantizedWeight`.
        input_scale: ``sx`` for ``int8_static``, which needs it, and no other. Default: none.

    Returns:
        Shape of ``x``, float32 (float64 for float64). Rows that are not finite (blocks of them, for fp8) are not in it
        either.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such scheme, or an argument does not fit it.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, equation 1; blocks as in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    if not isinstance(x, Tensor):
        raise wrong_type("x", "a tensor", x)
    if x.dim() == 0 or not x.is_floating_point():
        raise wrong_value("x", "floating point of shape [..., K]", f"{x.dtype} of {x.dim()} dimensions")
    if scheme not in SCHEMES:
        raise wrong_value("scheme", f"one of {', '.join(SCHEMES)}", repr(scheme))
    step = checked_input_scale(input_scale, scheme, x.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.detach()
    if scheme.endswith("weight_only") or x.numel() == 0:
        return x.to(wide)
    with autocast_disabled(x.device.type):
        rows = x.flatten(0, -2).to(torch.float32) if x.dim() > 1 else x[None].to(torch.float32)
        if scheme == "fp8_block":
            return quantize_blocks(rows, wide).reshape(x.shape)
        if step is None:
            codes, scale, unlift = quantize_rows(rows)
            scale = scale.to(wide) * unlift.to(wide)
        else:
            codes, scale = quantize_rows_by(rows, step)
        return (codes.to(wide) * scale.to(wide)[:, None]).reshape(x.shape)
