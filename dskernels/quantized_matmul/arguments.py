"""The arguments of quantized_matmul: what the public function checks, and what it hands on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import cast_for_autocast, why_no_cuda, why_no_kernel, why_no_triton
from dskernels.checks import is_integer, shape_of, wrong_type, wrong_value
from dskernels.quantized_matmul.weight import FP8_BLOCK, INT4_SCHEMES, SCHEMES, QuantizedWeight

_NUMBERS = {scheme: number for number, scheme in enumerate(SCHEMES)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedMatmulCall(NamedTuple):
    """The validated arguments of a call, in the order of the torch operator."""

    x: Tensor
    qweight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    input_scale: Tensor | None
    input_order: Tensor | None
    bias: Tensor | None
    scheme: int
    group_size: int


def prepare(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> QuantizedMatmulCall:
    if not isinstance(x, Tensor):
        raise wrong_type("x", "a tensor", x)
    if not isinstance(weight, QuantizedWeight):
        raise wrong_type("weight", "a QuantizedWeight", weight)
    (x,) = cast_for_autocast(x)
    check_quantized_weight(weight)
    if x.dtype not in _DTYPES:
        raise wrong_value("x", "float32, bfloat16, float16 or float64", x.dtype)
    if x.dim() == 0 or x.shape[-1] != weight.in_features:
        raise wrong_value("x", f"shape [..., {weight.in_features}]", shape_of(x))
    if x.device != weight.qweight.device:
        raise wrong_value("x", f"a tensor on {weight.qweight.device}, as weight.qweight is", x.device)
    if bias is not None:
        _check_bias(bias, weight)
        if bias.dtype == torch.float64 and x.dtype != torch.float64:
            # As the reference adds it; the kernels take no float64.
            bias = bias.to(torch.float32)
    number = _NUMBERS[weight.scheme]
    return QuantizedMatmulCall(
        x,
        weight.qweight,
        weight.scale.detach() if weight.scale.requires_grad else weight.scale,
        weight.zero_point,
        weight.input_scale,
        weight.input_order,
        bias,
        number,
        weight.group_size,
    )


def _check_bias(bias: Tensor, weight: QuantizedWeight) -> None:
    if not isinstance(bias, Tensor):
        raise wrong_type("bias", "a tensor or None", bias)
    if bias.dtype not in _DTYPES:
        raise wrong_value("bias", "float32, bfloat16, float16 or float64", bias.dtype)
    if bias.dim() != 1 or bias.shape[0] != weight.qweight.shape[0]:
        raise wrong_value("bias", f"shape [{weight.qweight.shape[0]}]", shape_of(bias))
    if bias.device != weight.qweight.device:
        raise wrong_value("bias", f"a tensor on {weight.qweight.device}, as weight.qweight is", bias.device)


def check_quantized_weight(weight: QuantizedWeight) -> None:
    """Whether the fields fit each other.

    Raises:
        TypeError, ValueError: they do not; the message names the field.
    """
    scheme, qweight, scale, columns, group, zero_point, input_scale, _ = weight
    if scheme not in _NUMBERS:
        raise wrong_value("weight.scheme", f"one of {', '.join(SCHEMES)}", repr(scheme))
    for name, size in (("in_features", columns), ("group_size", group)):
        if not is_integer(size):
            raise wrong_type(f"weight.{name}", "an int", size)
    is_int4 = scheme in INT4_SCHEMES
    _check_field("qweight", qweight, torch.int8 if scheme.startswith("int8") else torch.uint8)
    if qweight.dim() != 2 or qweight.shape[1] != ((columns + 1) // 2 if is_int4 else columns):
        expected = f"[N, {(columns + 1) // 2 if is_int4 else columns}]"
        raise wrong_value("weight.qweight", f"shape {expected} for in_features={columns}", shape_of(qweight))
    rows = qweight.shape[0]
    if is_int4:
        if group != columns and (group < 16 or group % 16 != 0):
            raise wrong_value("weight.group_size", "a multiple of 16, or in_features", group)
        sizes: tuple[int, ...] = (rows, -(-columns // group) if columns else 0)
    else:
        sizes = (rows,) if scheme != "fp8_block" else (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    _check_field("scale", scale, torch.float32, sizes, qweight.device)
    if zero_point is not None:
        if not is_int4:
            raise wrong_value("weight.zero_point", f"None for {scheme}", shape_of(zero_point))
        _check_field("zero_point", zero_point, torch.uint8, sizes, qweight.device)
    if (input_scale is None) == (scheme == "int8_static"):
        raise wrong_value("weight.input_scale", "a tensor for int8_static, None for the others", input_scale)
    if input_scale is not None:
        _check_field("input_scale", input_scale, torch.float32, (), qweight.device)
    if weight.input_order is not None:
        # Its values are looked at where they are used: a kernel refuses what would be out of bounds.
        _check_field("input_order", weight.input_order, torch.int64, (columns,), qweight.device)


def _check_field(
    name: str,
    field: Tensor,
    dtype: torch.dtype,
    sizes: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    if not isinstance(field, Tensor):
        raise wrong_type(f"weight.{name}", "a tensor", field)
    if field.dtype != dtype:
        raise wrong_value(f"weight.{name}", str(dtype), field.dtype)
    if sizes is not None and field.shape != sizes:
        raise wrong_value(f"weight.{name}", f"shape {list(sizes)}", shape_of(field))
    if device is not None and field.device != device:
        raise wrong_value(f"weight.{name}", f"a tensor on {device}, as weight.qweight is", field.device)
    if not field.is_contiguous():
        raise wrong_value(f"weight.{name}", "a contiguous tensor", f"strides {field.stride()}")


def why_not_cpu(call: QuantizedMatmulCall) -> str | None:
    """The reason why the CPU kernels cannot serve a call, or None."""
    if call.x.device.type != "cpu":
        return f"the tensors are on {call.x.device}"
    if call.x.dtype not in _KERNEL_DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {call.x.dtype}"
    return why_no_kernel("quantized_matmul", "CPU")


def why_not_cuda(call: QuantizedMatmulCall) -> str | None:
    """The reason why the CUDA kernels cannot serve a call, or None."""
    reason = why_no_cuda("quantized_matmul", call.x.device)
    if reason is None and call.x.dtype not in _KERNEL_DTYPES:
        reason = f"the kernels take float32, bfloat16 and float16, not {call.x.dtype}"
    return reason


def why_not_triton(call: QuantizedMatmulCall) -> str | None:
    """The reason why Triton's kernels cannot serve a call, or None."""
    reason = why_no_triton(call.x.device)
    if reason is None and call.x.dtype not in _KERNEL_DTYPES:
        reason = f"the kernels take float32, bfloat16 and float16, not {call.x.dtype}"
    return reason
