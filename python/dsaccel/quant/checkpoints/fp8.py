"""fp8 in blocks, as DeepSeek-V3 was published: e4m3 with one scale for 128 x 128 weights."""

from __future__ import annotations

import torch
from torch import Tensor

import dskernels as dk
from dsaccel.quant.checkpoints._layouts import check_tensor

_BLOCK = 128
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def from_fp8_block(weight: Tensor, weight_scale_inv: Tensor) -> dk.QuantizedWeight:
    """The weight of a layer in fp8, exactly: ``W[n, k] = weight_scale_inv[n // 128, k // 128] * weight[n, k]``.

    Args:
        weight: float8_e4m3fn ``[N, K]``.
        weight_scale_inv: the scale, whatever its name says, ``[ceil(N / 128), ceil(K / 128)]``: float32, bfloat16,
            float16 or float8_e8m0fnu.

    Returns:
        ``fp8_block``.

    Raises:
        ValueError: the tensors do not fit each other.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    return block_weight(weight, weight_scale_inv, "weight_scale_inv")


def block_weight(weight: Tensor, scale: Tensor, scale_name: str) -> dk.QuantizedWeight:
    """`from_fp8_block`, where messages call the scale ``scale_name``."""
    check_tensor("weight", weight, (torch.float8_e4m3fn,), (-1, -1))
    rows, columns = weight.shape
    check_tensor(scale_name, scale, _SCALES, (-(-rows // _BLOCK), -(-columns // _BLOCK)))
    codes = weight.contiguous().view(torch.uint8)
    return dk.QuantizedWeight("fp8_block", codes, scale.to(torch.float32).contiguous(), columns, _BLOCK)
