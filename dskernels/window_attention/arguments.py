"""The arguments of window attention: what the public functions check, and what they hand on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import cast_for_autocast, why_no_cuda, why_no_kernel, why_no_triton
from dskernels.checks import is_integer, is_number, shape_of, wrong_type, wrong_value
from dskernels.rope import RopeTable, check_in_table, check_rope
from dskernels.window_attention.reference import compute_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# No distance between two positions comes near it, so a bound beyond it says the same, and sums of two fit in int64.
_FARTHEST = 2**61

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_MAX_HEAD_DIM = 256


class WindowAttentionCall(NamedTuple):
    """The validated arguments of a call, in the order of the torch operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    left: int | None
    right: int | None
    query_offset: int
    scale: float
    softcap: float
    interleaved: bool


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, None),
    rope: RopeTable | None = None,
    positions: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    return_lse: bool = False,
) -> WindowAttentionCall:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, "a tensor", tensor)
    q, k, v = cast_for_autocast(q, k, v)
    _check_tensors(q, k, v)
    left, right = checked_window(window)
    if query_offset is not None and not is_integer(query_offset):
        raise wrong_type("query_offset", "an int or None", query_offset)
    check_return_lse(return_lse)
    scale, softcap = checked_scale(scale, q), checked_softcap(softcap)
    bias, sink = _checked_bias(bias, q, k), checked_sink(sink, q)
    offset = k.shape[2] - q.shape[2] if query_offset is None else query_offset
    if rope is None:
        if positions is not None:
            raise wrong_value("positions", "None without rope", "a tensor")
        return WindowAttentionCall(q, k, v, None, None, None, bias, sink, left, right, offset, scale, softcap, False)
    check_table(rope, q)
    if positions is None:
        _check_range(rope, q, k, offset)
    else:
        positions = _checked_positions(positions, rope, q, k, offset)
    cos, sin = rope.cos.contiguous(), rope.sin.contiguous()
    options = (left, right, offset, scale, softcap, rope.interleaved)
    return WindowAttentionCall(q, k, v, cos, sin, positions, bias, sink, *options)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor, layout in (("q", q, "[B, Hq, Nq, D]"), ("k", k, "[B, Hkv, Nk, D]"), ("v", v, "[B, Hkv, Nk, Dv]")):
        check_layout(name, tensor, layout)
    check_kinds(q, k, v)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise wrong_value("k", f"batch and head dimension of q, {shape_of(q)}", f"shape {shape_of(k)}")
    if q.shape[1] % k.shape[1] != 0:
        raise wrong_value("k", f"a number of heads that divides the {q.shape[1]} of q", k.shape[1])
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        raise wrong_value("v", f"batch, heads and length of k, {shape_of(k)}", f"shape {shape_of(v)}")


def check_layout(name: str, tensor: Tensor, layout: str) -> None:
    """Whether ``tensor`` has the dimensions of ``layout``, and at least one head of at least one component."""
    dims = layout.count(",") + 1
    if tensor.dim() != dims:
        raise wrong_value(name, f"{dims} dimensions {layout}", f"shape {shape_of(tensor)}")
    if tensor.shape[1] < 1 or tensor.shape[-1] < 1:
        expected = f"at least one head of at least one component, {layout}"
        raise wrong_value(name, expected, f"shape {shape_of(tensor)}")


def check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Whether q, k and v have one dtype, of those served, and one device."""
    check_dtype("q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_same("q", q, name, tensor)


def check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise wrong_value(name, "dtype float32, bfloat16, float16 or float64", tensor.dtype)


def check_same(first: str, one: Tensor, name: str, other: Tensor) -> None:
    """Whether ``other`` has the dtype and the device of ``one``."""
    if other.dtype != one.dtype:
        raise wrong_value(name, f"the dtype of {first}, {one.dtype}", other.dtype)
    check_device(first, one, name, other)


def check_device(first: str, one: Tensor, name: str, other: Tensor) -> None:
    if other.device != one.device:
        raise wrong_value(name, f"the device of {first}, {one.device}", other.device)


def check_return_lse(return_lse: bool) -> None:
    if not isinstance(return_lse, bool):
        raise wrong_type("return_lse", "a bool", return_lse)


def checked_scale(scale: float | None, q: Tensor) -> float:
    if scale is not None and not is_number(scale):
        raise wrong_type("scale", "a number or None", scale)
    result: float = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return result


def checked_softcap(softcap: float | None) -> float:
    """The cap as the operator takes it: 0 is none."""
    if softcap is None:
        return 0.0
    if not is_number(softcap):
        raise wrong_type("softcap", "a number or None", softcap)
    # What float32, in which the kernels compute, holds well.
    if not 1e-30 <= softcap <= 1e30:
        raise wrong_value("softcap", "a number from 1e-30 to 1e30, or None", softcap)
    return float(softcap)


def checked_window(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong_type("window", "a pair (left, right)", window)
    return _checked_bound("window left", window[0]), _checked_bound("window right", window[1])


def _checked_bound(name: str, bound: int | None) -> int | None:
    if bound is None:
        return None
    if not is_integer(bound):
        raise wrong_type(name, "an int or None", bound)
    if bound > _FARTHEST:
        return None
    return -_FARTHEST if bound < -_FARTHEST else bound


def _check_floating(name: str, tensor: Tensor, q: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise wrong_type(name, "a tensor or None", tensor)
    if tensor.dtype not in _DTYPES:
        raise wrong_value(name, "a floating point dtype up to float64", tensor.dtype)
    if tensor.device != q.device:
        raise wrong_value(name, f"the device of q, {q.device}", tensor.device)


def _checked_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if bias is None:
        return None
    _check_floating("bias", bias, q)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = bias.dim() <= 4 and all(n in (1, m) for n, m in zip(reversed(bias.shape), reversed(full), strict=False))
    if not fits:
        raise wrong_value("bias", f"a shape broadcastable to [B, Hq, Nq, Nk] = {list(full)}", f"shape {shape_of(bias)}")
    # Expanded, not copied: autograd sums the gradient back, in the dtype of the scores.
    return bias.to(compute_dtype(q)).expand(full)


def checked_sink(sink: Tensor | None, q: Tensor) -> Tensor | None:
    if sink is None:
        return None
    _check_floating("sink", sink, q)
    if sink.shape != q.shape[1:2]:
        raise wrong_value("sink", f"shape [Hq] = [{q.shape[1]}]", f"shape {shape_of(sink)}")
    return sink.to(compute_dtype(q)).contiguous()


def check_table(rope: RopeTable, q: Tensor) -> None:
    check_rope(rope, q, "q", q.shape[-1])
    if rope.cos.dim() != 2:
        raise wrong_value("rope", "a table [P, rotary_dim / 2], one for all heads", f"shape {shape_of(rope.cos)}")


def _check_range(rope: RopeTable, q: Tensor, k: Tensor, offset: int) -> None:
    rows = rope.max_positions
    if k.shape[2] > rows:
        raise IndexError(f"rope: the last key stands at position {k.shape[2] - 1}, the table holds {rows} positions")
    if q.shape[2] > 0 and offset < 0:
        raise IndexError(
            f"rope: the first query stands at position {offset}, the table of {rows} positions starts at 0"
        )
    if q.shape[2] > 0 and q.shape[2] + offset > rows:
        last = q.shape[2] + offset - 1
        raise IndexError(f"rope: the last query stands at position {last}, the table holds {rows} positions")


def _checked_positions(positions: Tensor, rope: RopeTable, q: Tensor, k: Tensor, offset: int) -> Tensor:
    if not isinstance(positions, Tensor):
        raise wrong_type("positions", "a tensor or None", positions)
    if positions.dtype != torch.int64:
        raise wrong_value("positions", "dtype int64", positions.dtype)
    if positions.device != q.device:
        raise wrong_value("positions", f"the device of q, {q.device}", positions.device)
    batch, keys = k.shape[0], k.shape[2]
    if (
        positions.dim() not in (1, 2)
        or positions.shape[-1] != keys
        or (positions.dim() == 2 and positions.shape[0] != batch)
    ):
        raise wrong_value("positions", f"shape [Nk] or [B, Nk] = [{batch}, {keys}]", f"shape {shape_of(positions)}")
    if offset < 0 or offset + q.shape[2] > keys:
        raise wrong_value("positions", f"queries that stand at keys 0 to {keys - 1}", f"query_offset {offset}")
    check_in_table(positions, rope)
    return positions.expand(batch, keys).contiguous()


def why_not_cpu(operator: str, q: Tensor, v: Tensor) -> str | None:
    """The reason why the compiled CPU kernel of ``operator`` cannot serve tensors such as ``q`` and ``v``, or None."""
    missing = why_no_kernel(operator, "CPU")
    if missing is not None:
        return missing
    if q.device.type != "cpu":
        return f"the tensors are on {q.device}"
    return _why_not_shape(q, v)


def why_not_cuda(operator: str, q: Tensor, v: Tensor) -> str | None:
    """The reason why the CUDA kernel of ``operator`` cannot serve tensors such as ``q`` and ``v``, or None."""
    missing = why_no_cuda(operator, q.device)
    return _why_not_shape(q, v) if missing is None else missing


def why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """The reason why the Triton kernels cannot serve tensors such as ``q`` and ``v``, or None."""
    missing = why_no_triton(q.device)
    return _why_not_shape(q, v) if missing is None else missing


def _why_not_shape(q: Tensor, v: Tensor) -> str | None:
    if q.dtype not in _KERNEL_DTYPES:
        return f"the kernel takes float32, bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] > _KERNEL_MAX_HEAD_DIM or v.shape[-1] > _KERNEL_MAX_HEAD_DIM:
        return f"head dimensions go up to {_KERNEL_MAX_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    return None
