"""Attention over a sliding window for sequences of any lengths, packed one after the other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dskernels._library import cast_for_autocast, why_no_kernel, why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.checks import is_hidden, is_readable, shape_of, wrong_type, wrong_value
from dskernels.rope import RopeTable, rope_table
from dskernels.window_attention.arguments import (
    check_kinds,
    check_layout,
    check_return_lse,
    check_table,
    checked_scale,
    checked_sink,
    checked_softcap,
    checked_window,
    why_not_cpu,
    why_not_cuda,
    why_not_triton,
)
from dskernels.window_attention.cuda_schema import cuda_varlen_forward_op
from dskernels.window_attention.triton_schema import triton_varlen_forward_op
from dskernels.window_attention.varlen_reference import window_attention_varlen_reference
from dskernels.window_attention.varlen_schema import varlen_forward_op


class VarlenCall(NamedTuple):
    """The validated arguments of a call, in the order of the torch operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    cos: Tensor | None
    sin: Tensor | None
    sink: Tensor | None
    left: int | None
    right: int | None
    scale: float
    softcap: float
    interleaved: bool


@overload
def window_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def window_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def window_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, None),
    rope: RopeTable | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Window attention of packed sequences, each by itself, with no padding read or computed.

    Sequence ``s`` has the queries ``cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1`` and the keys
    ``cu_seqlens_k[s] .. cu_seqlens_k[s + 1] - 1``. Its keys stand at the positions ``0 .. len_k - 1``, its last query
    at its last key. So query ``i`` of the sequence stands at ``p = i + len_k - len_q``, and it sees key ``j`` of the
    same sequence iff ``-left <= j - p <= right``::

        cap(x)      = softcap * tanh(x / softcap)
        score[i, j] = cap(scale * <rotate(q[i], p), rotate(k[j], j)>)
        lse[i]      = log(exp(sink) + sum over seen j of exp(score[i, j]))
        out[i]      = sum over seen j of exp(score[i, j] - lse[i]) * v[j]

    A query that sees no key gets 0, an lse of -inf and zero gradients. So do the tokens past the last offset, whatever
    they hold. Sequences may be empty, in queries, in keys or in both. The compiled kernels take time and memory in
    proportion to the window, forward and backward.

    Args:
        q: queries, shape ``[T, Hq, D]``, float32, bfloat16 or float16 (float64 with the reference); any strides.
        k: keys, shape ``[S, Hkv, D]``, dtype of ``q``. Query head ``h`` uses key head ``h // (Hq / Hkv)``.
        v: values, shape ``[S, Hkv, Dv]``, dtype of ``q``.
        cu_seqlens_q: where each sequence begins in ``q``, and where the last one ends: shape ``[n + 1]``, int32 or
            int64, on the device of ``q``, from 0 on, not decreasing, up to ``T``.
        cu_seqlens_k: the same for ``k`` and ``v``, up to ``S``.
        window: ``(left, right)``, inclusive; None is unbounded, negative bounds are legal. Causal is ``(None, 0)``, a
            causal window of ``W`` keys ``(W - 1, 0)``. Default: all keys of the sequence.
        rope: table of `rope_table`, by whose rows queries and keys are rotated at their positions, in float32
            whatever the inputs. Not differentiated. Default: no rotation.
        sink: shape ``[Hq]``, floating point, finite or -inf (no sink): a logit for each head that joins the softmax and
            attends nothing. A query that sees no key then has the sink for its lse. Default: none.
        softcap: bound of the scores, from 1e-30 to 1e30. Default: none.
        scale: factor of the scores. Default: ``D ** -0.5``.
        return_lse: also return ``lse``. It can be differentiated like ``out``. Default: False.
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; an explicit choice never falls back.
            Default: `use_backend`, then ``DSKERNELS_BACKEND``, then the first that serves the call.

    Returns:
        ``out``, shape ``[T, Hq, Dv]``, dtype of ``q``, contiguous; with ``return_lse`` the pair of it and ``lse``,
        shape ``[Hq, T]``, natural logarithm, float32 (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not fit each other, or the offsets are not as described.
        IndexError: with ``rope``, a query or key stands at a position outside the table.
        RuntimeError: the backend that was asked for cannot serve the call; or, under ``torch.compile``, which cannot
            look at values beforehand, offsets or positions are wrong.

    Backends: ``cpu``, ``cuda`` and ``triton`` (float32, bfloat16, float16; ``D`` and ``Dv`` up to 256), ``reference``
    (everything, any device, a sequence at a time, dense; differentiable twice; not under ``torch.compile`` where a
    kernel is there to serve). ``cuda`` and ``triton`` are as in `window_attention`, and wait for no value: they take
    offsets on a GPU as they come. Wrong ones read and write nothing outside the tensors, but what they give is
    undefined, and a position outside the table gives NaN. Under autocast q, k and v are cast to the autocast dtype.

    Sources: as for `window_attention`; the packing is that of Dao, "FlashAttention-2", 2023 (``flash_attn_varlen_func``
    of its implementation).
    """
    call = _prepare(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        window=window,
        rope=rope,
        sink=sink,
        softcap=softcap,
        scale=scale,
        return_lse=return_lse,
    )
    out, lse = _operator.choose(call, backend).run(call)
    return (out, lse) if return_lse else out


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, None),
    rope: RopeTable | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> VarlenCall:
    tensors = (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, "a tensor", tensor)
    q, k, v = cast_for_autocast(q, k, v)
    _check_tensors(q, k, v)
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q, "T", q.shape[0])
    _check_offsets("cu_seqlens_k", cu_seqlens_k, q, "S", k.shape[0])
    if cu_seqlens_k.shape[0] != cu_seqlens_q.shape[0]:
        expected = f"as many offsets as cu_seqlens_q, {cu_seqlens_q.shape[0]}"
        raise wrong_value("cu_seqlens_k", expected, cu_seqlens_k.shape[0])
    left, right = checked_window(window)
    check_return_lse(return_lse)
    options = (left, right, checked_scale(scale, q), checked_softcap(softcap))
    sink = checked_sink(sink, q)
    if rope is None:
        return VarlenCall(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, sink, *options, False)
    check_table(rope, q)
    if is_readable(cu_seqlens_q) and is_readable(cu_seqlens_k):
        _check_positions(rope, cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
    cos, sin = rope.cos.contiguous(), rope.sin.contiguous()
    return VarlenCall(q, k, v, cu_seqlens_q, cu_seqlens_k, cos, sin, sink, *options, rope.interleaved)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor, layout in (("q", q, "[T, Hq, D]"), ("k", k, "[S, Hkv, D]"), ("v", v, "[S, Hkv, Dv]")):
        check_layout(name, tensor, layout)
    check_kinds(q, k, v)
    if k.shape[2] != q.shape[2]:
        raise wrong_value("k", f"the head dimension of q, {q.shape[2]}", k.shape[2])
    if q.shape[1] % k.shape[1] != 0:
        raise wrong_value("k", f"a number of heads that divides the {q.shape[1]} of q", k.shape[1])
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1]:
        raise wrong_value("v", f"length and heads of k, {shape_of(k)}", f"shape {shape_of(v)}")


def _check_offsets(name: str, offsets: Tensor, q: Tensor, letter: str, tokens: int) -> None:
    if offsets.dtype not in (torch.int32, torch.int64):
        raise wrong_value(name, "dtype int32 or int64", offsets.dtype)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise wrong_value(name, "shape [n + 1]", f"shape {shape_of(offsets)}")
    if offsets.device != q.device:
        raise wrong_value(name, f"the device of q, {q.device}", offsets.device)
    if not is_readable(offsets):
        return
    values = offsets.tolist()
    if values[0] != 0:
        raise wrong_value(name, "0 as the first offset", values[0])
    for low, high in pairwise(values):
        if high < low:
            raise wrong_value(name, "offsets that do not decrease", f"{high} after {low}")
    if values[-1] > tokens:
        raise wrong_value(name, f"a last offset up to {letter} = {tokens}", values[-1])


def _check_positions(rope: RopeTable, offsets_q: list[int], offsets_k: list[int]) -> None:
    rows = rope.max_positions
    for number, (queries, keys) in enumerate(zip(pairwise(offsets_q), pairwise(offsets_k), strict=True)):
        len_q, len_k = queries[1] - queries[0], keys[1] - keys[0]
        if len_k > rows:
            raise IndexError(
                f"rope: the last key of sequence {number} stands at position {len_k - 1}, "
                f"the table holds {rows} positions"
            )
        if len_q > len_k:
            raise IndexError(
                f"rope: the first query of sequence {number} stands at position {len_k - len_q}, "
                f"the table of {rows} positions starts at 0"
            )


def _cpu_refuses(call: VarlenCall) -> str | None:
    return why_not_cpu("window_attention_varlen", call.q, call.v)


def _cuda_refuses(call: VarlenCall) -> str | None:
    return why_not_cuda("window_attention_varlen", call.q, call.v)


def _triton_refuses(call: VarlenCall) -> str | None:
    return why_not_triton(call.q, call.v)


def _gpu_unasked(call: VarlenCall) -> str | None:
    return why_not_unasked(call.q.device)


def _reference_refuses(call: VarlenCall) -> str | None:
    # The loop over sequences needs their lengths as numbers. Where they are hidden the operator is called, which is the
    # reference only where no kernel took its place.
    if _has_hidden_lengths(call) and why_no_kernel("window_attention_varlen", call.q.device.type.upper()) is None:
        return "the lengths of the sequences are values, which a trace or a transform of torch.func does not know"
    return None


def _has_hidden_lengths(call: VarlenCall) -> bool:
    return is_hidden(call.cu_seqlens_q) or is_hidden(call.cu_seqlens_k)


def _run_reference(call: VarlenCall) -> tuple[Tensor, Tensor]:
    if _has_hidden_lengths(call) or call.q.is_meta:
        result: tuple[Tensor, Tensor] = varlen_forward_op(*call)
        return result
    return window_attention_varlen_reference(*call)


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    tensors = [torch.randn(shape) for shape in ((150, 4, 40), (170, 2, 40), (170, 2, 24))]
    offsets = {"cu_seqlens_q": torch.tensor([0, 0, 97, 147]), "cu_seqlens_k": torch.tensor([0, 7, 104, 167])}
    options = {"window": (37, 4), "rope": rope_table(40, 97, rotary_dim=32), "sink": torch.linspace(-1, 1, 4)}
    return tensors, {**offsets, **options, "softcap": 5.0}


_operator = register(
    Operator(
        name="window_attention_varlen",
        prepare=_prepare,
        backends=(
            Backend("cpu", _cpu_refuses, lambda call: varlen_forward_op(*call)),
            Backend("cuda", _cuda_refuses, lambda call: cuda_varlen_forward_op(*call), _gpu_unasked),
            Backend("triton", _triton_refuses, lambda call: triton_varlen_forward_op(*call), _gpu_unasked),
            Backend("reference", _reference_refuses, _run_reference),
        ),
        example=_example,
    )
)
