"""The arguments of Swin attention: what the public function checks, and what it hands on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import cast_for_autocast, why_no_cuda, why_no_kernel, why_no_triton
from dskernels.checks import is_integer, is_number, shape_of, wrong_type, wrong_value
from dskernels.rope import RopeTable, check_rope
from dskernels.swin_attention.reference import compute_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PADDINGS = ("mask", "attend")

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_MAX_HEAD_DIM = 256
_KERNEL_MAX_TOKENS = 256


class SwinAttentionCall(NamedTuple):
    """The validated arguments of a call, in the order of the torch operator."""

    qkv: Tensor
    cos: Tensor | None
    sin: Tensor | None
    bias: Tensor | None
    logit_scale: Tensor | None
    heads: int
    window_height: int
    window_width: int
    shift_height: int
    shift_width: int
    scale: float
    interleaved: bool


def prepare(
    qkv: Tensor,
    *,
    window_size: int | tuple[int, int],
    shift: int | tuple[int, int] = 0,
    num_heads: int,
    bias: Tensor | None = None,
    rope: RopeTable | None = None,
    logit_scale: Tensor | None = None,
    scale: float | None = None,
    padding: str = "mask",
    pad_qkv: Tensor | None = None,
) -> SwinAttentionCall:
    if not isinstance(qkv, Tensor):
        raise wrong_type("qkv", "a tensor", qkv)
    (qkv,) = cast_for_autocast(qkv)
    head_dim = _checked_head_dim(qkv, num_heads)
    height, width = _checked_pair("window_size", window_size)
    if height < 1 or width < 1:
        raise wrong_value("window_size", "at least 1", (height, width))
    shifts = _checked_pair("shift", shift)
    if not (0 <= shifts[0] < height and 0 <= shifts[1] < width):
        raise wrong_value("shift", f"from 0 to below window_size = {(height, width)}", shifts)
    tokens = height * width
    bias = _checked_parameter("bias", bias, qkv, ("heads", "N", "N"), (num_heads, tokens, tokens))
    logit_scale = _checked_parameter("logit_scale", logit_scale, qkv, ("heads",), (num_heads,))
    scale = _checked_scale(scale, logit_scale, head_dim)
    cos, sin = _checked_rope(rope, qkv, num_heads, head_dim, tokens)
    qkv = _padded(qkv, height, width, padding, pad_qkv)
    interleaved = rope is not None and rope.interleaved
    return SwinAttentionCall(qkv, cos, sin, bias, logit_scale, num_heads, height, width, *shifts, scale, interleaved)


def _checked_head_dim(qkv: Tensor, num_heads: int) -> int:
    if qkv.dim() != 4:
        raise wrong_value("qkv", "4 dimensions, [B, H, W, 3 * C]", f"shape {shape_of(qkv)}")
    if qkv.dtype not in _DTYPES:
        raise wrong_value("qkv", "dtype float32, bfloat16, float16 or float64", qkv.dtype)
    if not is_integer(num_heads):
        raise wrong_type("num_heads", "an int", num_heads)
    if num_heads < 1:
        raise wrong_value("num_heads", "a positive number", num_heads)
    if qkv.shape[3] == 0 or qkv.shape[3] % (3 * num_heads):
        expected = f"[B, H, W, 3 * C] with C a positive multiple of num_heads = {num_heads}"
        raise wrong_value("qkv", expected, f"shape {shape_of(qkv)}")
    head_dim: int = qkv.shape[3] // (3 * num_heads)
    return head_dim


def _checked_pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(is_integer(x) for x in pair):
        raise wrong_type(name, "an int or a pair of ints (height, width)", value)
    return pair[0], pair[1]


def _checked_parameter(
    name: str, parameter: Tensor | None, qkv: Tensor, layout: tuple[str, ...], shape: tuple[int, ...]
) -> Tensor | None:
    if parameter is None:
        return None
    if not isinstance(parameter, Tensor):
        raise wrong_type(name, "a tensor or None", parameter)
    if parameter.dtype not in _DTYPES:
        raise wrong_value(name, "a floating point dtype up to float64", parameter.dtype)
    if parameter.device != qkv.device:
        raise wrong_value(name, f"the device of qkv, {qkv.device}", parameter.device)
    if tuple(parameter.shape) != shape:
        raise wrong_value(name, f"shape [{', '.join(layout)}] = {list(shape)}", f"shape {shape_of(parameter)}")
    # In the dtype of the scores: autograd takes the gradient back to that of the parameter.
    return parameter.to(compute_dtype(qkv))


def _checked_scale(scale: float | None, logit_scale: Tensor | None, head_dim: int) -> float:
    if scale is not None and not is_number(scale):
        raise wrong_type("scale", "a number or None", scale)
    if logit_scale is not None:
        if scale is not None:
            raise wrong_value("scale", "None with logit_scale, which takes its place", scale)
        return 1.0
    result: float = head_dim**-0.5 if scale is None else float(scale)
    return result


def _checked_rope(
    rope: RopeTable | None, qkv: Tensor, heads: int, head_dim: int, tokens: int
) -> tuple[Tensor | None, Tensor | None]:
    if rope is None:
        return None, None
    check_rope(rope, qkv, "qkv", head_dim)
    if rope.max_positions != tokens:
        expected = f"a table of the {tokens} tokens of a window, as made by rope_table_2d"
        raise wrong_value("rope", expected, f"{rope.max_positions} positions")
    if rope.cos.dim() == 3 and rope.cos.shape[0] not in (1, heads):
        raise wrong_value("rope", f"a table for all heads or for each of the {heads}", f"shape {shape_of(rope.cos)}")
    cos, sin = (table if table.dim() == 3 else table.unsqueeze(0) for table in (rope.cos, rope.sin))
    return cos.contiguous(), sin.contiguous()


def _padded(qkv: Tensor, height: int, width: int, padding: str, pad_qkv: Tensor | None) -> Tensor:
    """``qkv``, filled up with tokens to whole windows if padding is to be attended."""
    if not isinstance(padding, str):
        raise wrong_type("padding", "a str", padding)
    if padding not in _PADDINGS:
        raise wrong_value("padding", "'mask' or 'attend'", repr(padding))
    if pad_qkv is not None:
        if padding != "attend":
            raise wrong_value("pad_qkv", "None unless padding is 'attend'", f"padding = {padding!r}")
        pad_qkv = _checked_parameter("pad_qkv", pad_qkv, qkv, ("3 * C",), (qkv.shape[3],))
    if padding == "mask":
        return qkv
    bottom, right = -qkv.shape[1] % height, -qkv.shape[2] % width
    # An export of free sizes is not tied to those that happen to be whole windows.
    if not torch.compiler.is_exporting() and bottom == right == 0:
        return qkv
    if pad_qkv is None:
        return torch.nn.functional.pad(qkv, (0, 0, 0, right, 0, bottom))
    batch, rows, columns, channels = qkv.shape
    if torch.compiler.is_exporting():
        # A concatenation asks which of its parts are empty.
        around = (0, 0, 0, right, 0, bottom)
        inside = torch.nn.functional.pad(qkv.new_ones((1, rows, columns, 1), dtype=torch.bool), around)
        return torch.where(inside, torch.nn.functional.pad(qkv, around), pad_qkv.to(qkv.dtype))
    # Cast when it is many tokens, so that their gradients are summed in float32.
    qkv = torch.cat((qkv, pad_qkv.expand(batch, rows, right, channels).to(qkv.dtype)), 2)
    return torch.cat((qkv, pad_qkv.expand(batch, bottom, columns + right, channels).to(qkv.dtype)), 1)


def why_not_cpu(call: SwinAttentionCall) -> str | None:
    """The reason why the compiled CPU kernel cannot serve the call, or None."""
    missing = why_no_kernel("swin_attention", "CPU")
    if missing is not None:
        return missing
    if call.qkv.device.type != "cpu":
        return f"the tensors are on {call.qkv.device}"
    return _why_not_shape(call)


def why_not_cuda(call: SwinAttentionCall) -> str | None:
    """The reason why the CUDA kernel cannot serve the call, or None."""
    missing = why_no_cuda("swin_attention", call.qkv.device)
    return _why_not_shape(call) if missing is None else missing


def why_not_triton(call: SwinAttentionCall) -> str | None:
    """The reason why the Triton kernels cannot serve the call, or None."""
    missing = why_no_triton(call.qkv.device)
    return _why_not_shape(call) if missing is None else missing


def _why_not_shape(call: SwinAttentionCall) -> str | None:
    if call.qkv.dtype not in _KERNEL_DTYPES:
        return f"the kernel takes float32, bfloat16 and float16, not {call.qkv.dtype}"
    head_dim = call.qkv.shape[3] // (3 * call.heads)
    if head_dim > _KERNEL_MAX_HEAD_DIM:
        return f"head dimensions go up to {_KERNEL_MAX_HEAD_DIM}, got {head_dim}"
    if call.window_height * call.window_width > _KERNEL_MAX_TOKENS:
        return f"windows go up to {_KERNEL_MAX_TOKENS} tokens, got {call.window_height} x {call.window_width}"
    return None
