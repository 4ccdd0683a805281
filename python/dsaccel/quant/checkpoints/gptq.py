"""GPTQ: codes packed along the input features, with the order of the columns (``g_idx``) where they were sorted."""

from __future__ import annotations

import torch
from torch import Tensor

import dskernels as dk
from dsaccel.quant.checkpoints._layouts import (
    FLOATS,
    by_rows,
    bytes_of,
    check_tensor,
    columns_of_group,
    group_order,
    unpack,
    unpack_words,
)
from dskernels.checks import wrong_value


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    group_size: int,
    version: int,
    bits: int = 4,
    symmetric: bool = False,
) -> dk.QuantizedWeight:
    """The weight of a layer in GPTQ's layout, exactly::

        W[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

    with ``zero = stored + 1`` in version 1, ``zero = stored`` in version 2.

    Args:
        qweight: int32 ``[K * bits / 32, N]``, consecutive ``k`` in one word, lowest bits first.
        qzeros: int32 ``[ceil(K / group_size), N * bits / 32]``, consecutive ``n`` in one word.
        scales: float16, bfloat16 or float32 ``[ceil(K / group_size), N]``.
        g_idx: integers ``[K]``. Default: ``k // group_size``.
        group_size: rows of ``qweight``, once unpacked, that share a scale; -1 for all.
        version: 1 (``checkpoint_format`` "gptq") or 2 ("gptq_v2").
        bits: 4; or 8 for symmetric weights in one group. Default: 4.
        symmetric: whether all zeros must be in the middle, 8 or 128; the result has no zero points then. Default:
            False.

    Returns:
        ``int4_weight_only``, with ``input_order`` where ``g_idx`` asks for it; ``int8_weight_only`` for 8 bits.

    Raises:
        ValueError: the tensors do not fit each other or ``symmetric``, or no scheme stands for exactly that weight.
    """
    if bits not in (4, 8):
        raise wrong_value("bits", "4 or 8", bits)
    if version not in (1, 2):
        raise wrong_value("version", "1 or 2", version)
    in_word = 32 // bits
    check_tensor("qweight", qweight, (torch.int32,), (-1, -1))
    columns, rows = qweight.shape[0] * in_word, qweight.shape[1]
    group = columns_of_group(group_size, columns)
    groups = -(-columns // group)
    check_tensor("scales", scales, FLOATS, (groups, rows))
    check_tensor("qzeros", qzeros, (torch.int32,), (groups, rows // in_word))
    if rows % in_word != 0:
        raise wrong_value("qweight", f"a multiple of {in_word} columns", rows)
    order = None
    if g_idx is not None:
        check_tensor("g_idx", g_idx, (torch.int32, torch.int64), (columns,))
        order = group_order("g_idx", g_idx, group)
    zeros = _zeros(qzeros, bits, version, symmetric)
    if bits == 8:
        return _int8(qweight, scales, zeros)
    scale = scales.T.to(torch.float32).contiguous()
    zero_point = None if symmetric else zeros.T.contiguous()
    # Eight consecutive k in a word are four bytes of the canonical layout.
    if order is None:
        packed = bytes_of(qweight.T)
    else:
        packed = by_rows(rows, columns, lambda i, j: unpack_words(qweight[:, i:j].T)[:, order], qweight.device)
    return dk.QuantizedWeight("int4_weight_only", packed, scale, columns, group, zero_point, None, order)


def _zeros(qzeros: Tensor, bits: int, version: int, symmetric: bool) -> Tensor:
    stored = bytes_of(qzeros)
    if bits == 4:
        stored = unpack(stored, 2 * stored.shape[1])
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    if version == 1 and bool((stored == largest).any()):
        # What was 0 became -1 before it was packed. Some readers make 0 of it, some 16, and some writers let its sign
        # run over into the zeros beside it.
        raise wrong_value("qzeros", f"zeros of 1 to {largest}, stored as one less (version 1)", f"stored {largest}")
    zeros = stored + (1 if version == 1 else 0)
    if symmetric and not bool((zeros == middle).all()):
        got = int(zeros[zeros != middle][0])
        off_by_one = {middle + 1: 2, middle - 1: 1}.get(got)
        hint = "" if off_by_one in (None, version) else f'; format="gptq_v{off_by_one}" reads it so'
        raise wrong_value("qzeros", f"{middle} everywhere, for symmetric weights{hint}", f"{got} (version {version})")
    return zeros


def _int8(qweight: Tensor, scales: Tensor, zeros: Tensor) -> dk.QuantizedWeight:
    if scales.shape[0] != 1:
        raise wrong_value("scales", "one group for 8 bits, a scale for each output", f"{scales.shape[0]} groups")
    if not bool((zeros == 128).all()):
        raise wrong_value("qzeros", "128 everywhere for 8 bits, which are symmetric", int(zeros[zeros != 128][0]))
    codes = (bytes_of(qweight.T) ^ 128).view(torch.int8)
    scale = scales[0].to(torch.float32).contiguous()
    return dk.QuantizedWeight("int8_weight_only", codes, scale, codes.shape[1], codes.shape[1])
