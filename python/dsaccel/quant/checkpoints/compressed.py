"""The tensors of compressed-tensors, in both directions."""

from __future__ import annotations

from collections.abc import Mapping

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
    pack_words,
    unpack,
    unpack_words,
    words_of,
)
from dsaccel.quant.checkpoints.compressed_scheme import CompressedScheme
from dsaccel.quant.checkpoints.fp8 import block_weight
from dskernels.checks import shape_of, wrong_type, wrong_value

_INT4_ZERO = 8


def from_compressed_tensors(tensors: Mapping[str, Tensor], scheme: CompressedScheme) -> dk.QuantizedWeight:
    """The weight of a layer of compressed-tensors, exactly::

        W[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g])    g = weight_g_idx[k], or k // group_size

    with codes and zeros of -8 to 7 or -128 to 127; fp8 with a scale for each block of 128 x 128.

    Args:
        tensors: those of one layer, by the names that ``scheme.names()`` gives:

            - ``weight_packed`` int32 ``[N, ceil(K * bits / 32)]``, codes from 0 up, lowest bits first, and
              ``weight_shape``, the integers ``[N, K]``; or ``weight``, int8 or float8_e4m3fn ``[N, K]``,
            - ``weight_scale`` float32, bfloat16 or float16: ``[N, 1]``, ``[N, ceil(K / group_size)]``, one element or
              ``[ceil(N / 128), ceil(K / 128)]``,
            - ``weight_zero_point``, packed: int32 ``[ceil(N / 8), G]``; or beside ``weight``: int8 ``[N, G]``,
            - ``weight_g_idx`` integers ``[K]``; ``input_scale`` of one element.
        scheme: of the layer's config group.

    Raises:
        ValueError: the tensors do not fit each other or ``scheme``, or no scheme stands for exactly that weight.
    """
    # Some writers store the zeros of what has none.
    for name in ("input_zero_point", *(["weight_zero_point"] if scheme.symmetric else [])):
        if name in tensors and bool(tensors[name].any()):
            raise wrong_value(name, "0, for symmetric quantization", "others")
    if scheme.scheme == "fp8_block":
        return block_weight(tensors["weight"], tensors["weight_scale"], "weight_scale")
    return _from_int4(tensors, scheme) if scheme.scheme.startswith("int4") else _from_int8(tensors, scheme)


def _sizes(tensors: Mapping[str, Tensor], bits: int) -> tuple[int, int]:
    if "weight_packed" not in tensors:
        check_tensor("weight", tensors["weight"], (torch.int8,), (-1, -1))
        return tensors["weight"].shape[0], tensors["weight"].shape[1]
    check_tensor("weight_shape", tensors["weight_shape"], (torch.int64, torch.int32), (2,))
    rows, columns = tensors["weight_shape"].tolist()
    check_tensor("weight_packed", tensors["weight_packed"], (torch.int32,), (rows, -(-columns * bits // 32)))
    return rows, columns


def _from_int8(tensors: Mapping[str, Tensor], scheme: CompressedScheme) -> dk.QuantizedWeight:
    rows, columns = _sizes(tensors, 8)
    if "weight_packed" in tensors:
        codes = (bytes_of(tensors["weight_packed"])[:, :columns] ^ 128).contiguous().view(torch.int8)
    else:
        codes = tensors["weight"].contiguous()
    scale = tensors["weight_scale"]
    if scheme.per_tensor:
        scale = _single("weight_scale", scale).expand(rows)
    else:
        check_tensor("weight_scale", scale, FLOATS, (rows, 1))
        scale = scale[:, 0]
    step = _single("input_scale", tensors["input_scale"]) if scheme.scheme == "int8_static" else None
    if "weight_g_idx" in tensors and bool((tensors["weight_g_idx"] > 0).any()):
        raise wrong_value("weight_g_idx", "one group, for a scale that all columns share", "more")
    scale = scale.to(torch.float32).contiguous()
    return dk.QuantizedWeight(scheme.scheme, codes, scale, columns, columns, None, step)


def _single(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in FLOATS or tensor.numel() != 1:
        raise wrong_value(name, "one floating point element", f"{tensor.dtype} {shape_of(tensor)}")
    return tensor.to(torch.float32).reshape(())


def _from_int4(tensors: Mapping[str, Tensor], scheme: CompressedScheme) -> dk.QuantizedWeight:
    rows, columns = _sizes(tensors, 4)
    group = columns_of_group(-1 if scheme.group_size is None else scheme.group_size, columns)
    groups = -(-columns // group)
    check_tensor("weight_scale", tensors["weight_scale"], FLOATS, (rows, groups))
    order, zero_point = None, None
    g_idx = tensors.get("weight_g_idx")
    # -1 says that nothing was sorted.
    if g_idx is not None and (scheme.ordered or not bool((g_idx == -1).any())):
        check_tensor("weight_g_idx", g_idx, (torch.int32, torch.int64), (columns,))
        order = group_order("weight_g_idx", g_idx, group)
    chosen: slice | Tensor = slice(None) if order is None else order
    words = tensors.get("weight_packed")
    if words is not None and order is None and columns % 2 == 0:
        # The bytes of the words are those of the canonical layout.
        packed = bytes_of(words)[:, : columns // 2].contiguous()
    elif words is not None:
        packed = by_rows(rows, columns, lambda i, j: unpack_words(words[i:j])[:, :columns][:, chosen], words.device)
    else:
        weight = tensors["weight"]
        _check_int4("weight", weight)
        packed = by_rows(
            rows, columns, lambda i, j: (weight[i:j] + _INT4_ZERO).to(torch.uint8)[:, chosen], weight.device
        )
    if not scheme.symmetric:
        zero_point = _zero_point(tensors, rows, groups)
    scale = tensors["weight_scale"].to(torch.float32).contiguous()
    return dk.QuantizedWeight(scheme.scheme, packed, scale, columns, group, zero_point, None, order)


def _check_int4(name: str, codes: Tensor) -> None:
    if codes.numel() and not (int(codes.min()) >= -_INT4_ZERO and int(codes.max()) < _INT4_ZERO):
        raise wrong_value(name, "codes of -8 to 7 for 4 bits", f"{int(codes.min())} to {int(codes.max())}")


def _zero_point(tensors: Mapping[str, Tensor], rows: int, groups: int) -> Tensor:
    stored = tensors["weight_zero_point"]
    if "weight_packed" in tensors:
        check_tensor("weight_zero_point", stored, (torch.int32,), (-(-rows // 8), groups))
        return unpack_words(stored.T)[:, :rows].T.contiguous()
    check_tensor("weight_zero_point", stored, (torch.int8,), (rows, groups))
    _check_int4("weight_zero_point", stored)
    return (stored + _INT4_ZERO).to(torch.uint8).contiguous()


def compressed_scheme_of(weight: dk.QuantizedWeight) -> CompressedScheme:
    """How `to_compressed_tensors` stores a weight; raises what that raises."""
    if not isinstance(weight, dk.QuantizedWeight):
        raise wrong_type("weight", "a QuantizedWeight", weight)
    kind, _, activations = weight.scheme.partition("_")
    if kind == "fp8":
        format = "float-quantized"
    else:
        format = "pack-quantized" if activations == "weight_only" else "int-quantized"
    columns, group, zero_point = weight.in_features, weight.group_size, weight.zero_point
    if kind != "int4":
        if weight.input_order is not None:
            raise wrong_value("input_order", f"none for {weight.scheme}", "one")
        return CompressedScheme(weight.scheme, format)
    if group < columns and columns % group != 0:
        raise wrong_value("group_size", f"one that divides {columns} (compressed-tensors has no shorter groups)", group)
    if zero_point is not None and bool((zero_point > 15).any()):
        raise wrong_value("zero_point", "at most 15", int(zero_point.max()))
    in_groups = group < columns
    ordered = in_groups and weight.input_order is not None
    return CompressedScheme(weight.scheme, format, group if in_groups else None, zero_point is None, ordered=ordered)


def to_compressed_tensors(weight: dk.QuantizedWeight) -> tuple[CompressedScheme, dict[str, Tensor]]:
    """The inverse of `from_compressed_tensors`: what stands for exactly ``weight``.

    int4 and int8 weights go to "pack-quantized" where activations stay as they are, else to "int-quantized" (where each
    int4 code has a byte); fp8 goes to "float-quantized". Scales stay float32.

    Returns:
        The scheme, and the tensors by their names; they may share memory with ``weight``.

    Raises:
        TypeError: ``weight`` is no `dskernels.QuantizedWeight`.
        ValueError: the format has nothing that stands for exactly ``weight``.
    """
    scheme = compressed_scheme_of(weight)
    if scheme.scheme == "fp8_block":
        return scheme, {"weight": weight.qweight.view(torch.float8_e4m3fn), "weight_scale": weight.scale}
    tensors = _int4_tensors(weight, scheme) if scheme.scheme.startswith("int4") else _int8_tensors(weight, scheme)
    if scheme.format == "pack-quantized":
        tensors["weight_shape"] = torch.tensor([weight.out_features, weight.in_features])
    return scheme, tensors


def _int8_tensors(weight: dk.QuantizedWeight, scheme: CompressedScheme) -> dict[str, Tensor]:
    tensors = {"weight_scale": weight.scale[:, None]}
    if scheme.format == "pack-quantized":
        tensors["weight_packed"] = words_of(weight.qweight.view(torch.uint8) ^ 128)
    else:
        tensors["weight"] = weight.qweight
    if weight.input_scale is not None:
        tensors["input_scale"] = weight.input_scale.reshape(1)
    return tensors


def _int4_tensors(weight: dk.QuantizedWeight, scheme: CompressedScheme) -> dict[str, Tensor]:
    rows, columns, packed = weight.out_features, weight.in_features, weight.qweight
    tensors = {"weight_scale": weight.scale}
    if weight.input_order is not None:
        # Codes are stored in the order of the input features.
        places = torch.argsort(weight.input_order)
        packed = by_rows(rows, columns, lambda i, j: unpack(weight.qweight[i:j], columns)[:, places], places.device)
        if scheme.ordered:
            tensors["weight_g_idx"] = (places // weight.group_size).to(torch.int32)
    is_packed, zero_point = scheme.format == "pack-quantized", weight.zero_point
    if is_packed:
        tensors["weight_packed"] = words_of(packed)
    else:
        tensors["weight"] = unpack(packed, columns).view(torch.int8) - _INT4_ZERO
    if zero_point is not None:
        signed = zero_point.view(torch.int8) - _INT4_ZERO
        tensors["weight_zero_point"] = pack_words(zero_point.T).T if is_packed else signed
    return tensors
