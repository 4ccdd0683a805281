"""Attention over a sliding window, with rotary position embeddings applied inside."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dskernels._checks import is_integer, is_number, shape_of, wrong_type, wrong_value
from dskernels._library import cast_for_autocast, why_no_kernel
from dskernels._registry import Backend, Operator, register
from dskernels.rope import RopeTable, rope_table
from dskernels.window_attention.reference import window_attention_reference
from dskernels.window_attention.schema import forward_op

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KERNEL_DTYPES = _DTYPES[:3]
_KERNEL_MAX_HEAD_DIM = 256
# No distance between two positions comes near it, so a bound beyond it says the same, and sums of two fit in int64.
_FARTHEST = 2**61


class WindowAttentionCall(NamedTuple):
    """The validated arguments of a call, in the order of the torch operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    left: int | None
    right: int | None
    query_offset: int
    scale: float
    interleaved: bool


@overload
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    scale: float | None = ...,
    query_offset: int | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    scale: float | None = ...,
    query_offset: int | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, None),
    rope: RopeTable | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query over the keys of a window around its position.

    Query ``i`` stands at position ``p = i + query_offset`` and sees key ``j`` iff ``-left <= j - p <= right``::

        score[i, j] = scale * <rotate(q[i], p), rotate(k[j], j)>
        lse[i]      = log(sum over seen j of exp(score[i, j]))
        out[i]      = sum over seen j of exp(score[i, j] - lse[i]) * v[j]

    A query that sees no key gets 0, an lse of -inf and zero gradients. What nobody sees influences nothing, not even
    where it is NaN. The compiled kernels take time and memory in proportion to the window, forward and backward.

    Args:
        q: queries, shape ``[B, Hq, Nq, D]``, float32, bfloat16 or float16 (float64 with the reference); any strides.
        k: keys, shape ``[B, Hkv, Nk, D]``, dtype of ``q``. Query head ``h`` uses key head ``h // (Hq / Hkv)``.
        v: values, shape ``[B, Hkv, Nk, Dv]``, dtype of ``q``.
        window: ``(left, right)``, inclusive; None is unbounded, negative bounds are legal. Causal is ``(None, 0)``, a
            causal window of ``W`` keys ``(W - 1, 0)``. Default: all keys.
        rope: table of `rope_table`, by whose rows queries and keys are rotated at their positions, in float32
            whatever the inputs. Not differentiated. Default: no rotation.
        scale: factor of the scores. Default: ``D ** -0.5``.
        query_offset: position of the first query. Default: ``Nk - Nq``, so that the last query stands at the last key.
        return_lse: also return ``lse``. It can be differentiated like ``out``. Default: False.
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; an explicit choice never falls back.
            Default: `use_backend`, then ``DSKERNELS_BACKEND``, then the first that serves the call.

    Returns:
        ``out``, shape ``[B, Hq, Nq, Dv]``, dtype of ``q``; with ``return_lse`` the pair of it and ``lse``, shape
        ``[B, Hq, Nq]``, natural logarithm, float32 (float64 for float64 inputs). Where the heads of a token lie
        together in ``q`` (``q.stride(1) < q.stride(2)``) they do in ``out``; else ``out`` is contiguous.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not fit each other.
        IndexError: with ``rope``, a query or key stands at a position outside the table.
        RuntimeError: the backend that was asked for cannot serve the call.

    Backends: ``cpu`` (float32, bfloat16, float16; ``D`` and ``Dv`` up to 256), ``reference`` (everything, any device,
    dense; differentiable twice). Under autocast q, k and v are cast to the autocast dtype.

    Sources: the window of Beltagy et al., "Longformer", 2020, section 3.1; the softmax and its backward as in Dao,
    "FlashAttention-2", 2023, section 2.3; the rotation of Su et al., "RoFormer", 2021, equation 34.
    """
    call = _prepare(q, k, v, window=window, rope=rope, scale=scale, query_offset=query_offset, return_lse=return_lse)
    out, lse = _operator.choose(call, backend).run(call)
    return (out, lse) if return_lse else out


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, None),
    rope: RopeTable | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    return_lse: bool = False,
) -> WindowAttentionCall:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, "a tensor", tensor)
    q, k, v = cast_for_autocast(q, k, v)
    _check_tensors(q, k, v)
    left, right = _checked_window(window)
    if scale is not None and not is_number(scale):
        raise wrong_type("scale", "a number or None", scale)
    if query_offset is not None and not is_integer(query_offset):
        raise wrong_type("query_offset", "an int or None", query_offset)
    if not isinstance(return_lse, bool):
        raise wrong_type("return_lse", "a bool", return_lse)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    offset = k.shape[2] - q.shape[2] if query_offset is None else query_offset
    if rope is None:
        return WindowAttentionCall(q, k, v, None, None, left, right, offset, scale, False)
    _check_rope(rope, q, k, offset)
    cos, sin = rope.cos.contiguous(), rope.sin.contiguous()
    return WindowAttentionCall(q, k, v, cos, sin, left, right, offset, scale, rope.interleaved)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor, layout in (("q", q, "[B, Hq, Nq, D]"), ("k", k, "[B, Hkv, Nk, D]"), ("v", v, "[B, Hkv, Nk, Dv]")):
        if tensor.dim() != 4:
            raise wrong_value(name, f"4 dimensions {layout}", f"shape {shape_of(tensor)}")
        if tensor.shape[1] < 1 or tensor.shape[3] < 1:
            raise wrong_value(
                name, f"at least one head of at least one component, {layout}", f"shape {shape_of(tensor)}"
            )
    if q.dtype not in _DTYPES:
        raise wrong_value("q", "dtype float32, bfloat16, float16 or float64", q.dtype)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise wrong_value(name, f"the dtype of q, {q.dtype}", tensor.dtype)
        if tensor.device != q.device:
            raise wrong_value(name, f"the device of q, {q.device}", tensor.device)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise wrong_value("k", f"batch and head dimension of q, {shape_of(q)}", f"shape {shape_of(k)}")
    if q.shape[1] % k.shape[1] != 0:
        raise wrong_value("k", f"a number of heads that divides the {q.shape[1]} of q", k.shape[1])
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        raise wrong_value("v", f"batch, heads and length of k, {shape_of(k)}", f"shape {shape_of(v)}")


def _checked_window(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
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


def _check_rope(rope: RopeTable, q: Tensor, k: Tensor, offset: int) -> None:
    if not isinstance(rope, RopeTable):
        raise wrong_type("rope", "a RopeTable, as made by rope_table, or None", rope)
    for name, table in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        if table.dtype != torch.float32:
            raise wrong_value(name, "dtype float32 (a module's .to(dtype) converts its buffers too)", table.dtype)
        if table.device != q.device:
            raise wrong_value(name, f"the device of q, {q.device}", table.device)
        if table.requires_grad:
            raise wrong_value(name, "a table without gradient", "requires_grad=True")
    if rope.cos.dim() != 2 or rope.sin.shape != rope.cos.shape:
        raise wrong_value(
            "rope", "cos and sin of one shape [P, rotary_dim / 2]", f"{shape_of(rope.cos)}, {shape_of(rope.sin)}"
        )
    if 2 * rope.cos.shape[1] > q.shape[3]:
        raise wrong_value("rope", f"rotary_dim up to the head dimension {q.shape[3]}", rope.rotary_dim)
    rows = rope.cos.shape[0]
    if k.shape[2] > rows:
        raise IndexError(f"rope: the last key stands at position {k.shape[2] - 1}, the table holds {rows} positions")
    if q.shape[2] > 0 and offset < 0:
        raise IndexError(
            f"rope: the first query stands at position {offset}, the table of {rows} positions starts at 0"
        )
    if q.shape[2] > 0 and q.shape[2] + offset > rows:
        last = q.shape[2] + offset - 1
        raise IndexError(f"rope: the last query stands at position {last}, the table holds {rows} positions")


def _cpu_refuses(call: WindowAttentionCall) -> str | None:
    missing = why_no_kernel("window_attention", "CPU")
    if missing is not None:
        return missing
    if call.q.device.type != "cpu":
        return f"the tensors are on {call.q.device}"
    if call.q.dtype not in _KERNEL_DTYPES:
        return f"the kernel takes float32, bfloat16 and float16, not {call.q.dtype}"
    if call.q.shape[3] > _KERNEL_MAX_HEAD_DIM or call.v.shape[3] > _KERNEL_MAX_HEAD_DIM:
        return f"head dimensions go up to {_KERNEL_MAX_HEAD_DIM}, got {call.q.shape[3]} and {call.v.shape[3]}"
    return None


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    tensors = [torch.randn(shape) for shape in ((2, 4, 150, 40), (2, 2, 167, 40), (2, 2, 167, 24))]
    return tensors, {"window": (37, 4), "rope": rope_table(40, 167, rotary_dim=32)}


_operator = register(
    Operator(
        name="window_attention",
        prepare=_prepare,
        backends=(
            Backend("cpu", _cpu_refuses, lambda call: forward_op(*call)),
            Backend("reference", lambda call: None, lambda call: window_attention_reference(*call)),
        ),
        example=_example,
    )
)
