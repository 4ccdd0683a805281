"""AWQ in the layout of its GEMM kernels: codes packed along the output features, in an order of their own."""

from __future__ import annotations

import torch
from torch import Tensor

import dskernels as dk
from dsaccel.quant.checkpoints._layouts import FLOATS, by_rows, check_tensor, columns_of_group, unpack_words

# The place of output 0, 1, ... of a word: outputs 0, 2, 4, 6, 1, 3, 5, 7 follow each other from the lowest bits.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int) -> dk.QuantizedWeight:
    """The weight of a layer in the layout of AWQ's version "gemm", exactly::

        W[n, k] = scales[k // group_size, n] * (code[k, n] - zero[k // group_size, n])

    Args:
        qweight: int32 ``[K, N / 8]``: eight ``n`` in a word, the even ones first, lowest bits first.
        qzeros: int32 ``[ceil(K / group_size), N / 8]``, packed alike.
        scales: float16, bfloat16 or float32 ``[ceil(K / group_size), N]``.
        group_size: rows of ``qweight`` that share a scale; -1 for all.

    Returns:
        ``int4_weight_only`` with zero points.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    check_tensor("qweight", qweight, (torch.int32,), (-1, -1))
    columns, rows = qweight.shape[0], 8 * qweight.shape[1]
    group = columns_of_group(group_size, columns)
    groups = -(-columns // group)
    check_tensor("scales", scales, FLOATS, (groups, rows))
    check_tensor("qzeros", qzeros, (torch.int32,), (groups, qweight.shape[1]))
    packed = by_rows(rows, columns, lambda i, j: _in_order(qweight[:, i // 8 : j // 8]), qweight.device)
    scale = scales.T.to(torch.float32).contiguous()
    return dk.QuantizedWeight("int4_weight_only", packed, scale, columns, group, _in_order(qzeros).contiguous())


def _in_order(words: Tensor) -> Tensor:
    """uint8 ``[8 * C, R]`` of int32 ``[R, C]``."""
    codes = unpack_words(words).view(words.shape[0], words.shape[1], 8)
    return codes[..., list(_PLACES)].flatten(1).T
