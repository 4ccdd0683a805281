"""Attention over a sliding window, with rotary position embeddings applied inside."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from dskernels._library import why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.rope import RopeTable, rope_table
from dskernels.window_attention.arguments import WindowAttentionCall, prepare, why_not_cpu, why_not_cuda, why_not_triton
from dskernels.window_attention.cuda_schema import cuda_forward_op
from dskernels.window_attention.decode import window_attention_decode
from dskernels.window_attention.reference import window_attention_reference
from dskernels.window_attention.schema import forward_op
from dskernels.window_attention.triton_schema import triton_forward_op
from dskernels.window_attention.varlen import window_attention_varlen

__all__ = ["window_attention", "window_attention_decode", "window_attention_varlen"]


@overload
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    positions: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
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
    positions: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
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
    positions: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query over the keys of a window around its position.

    Query ``i`` stands at position ``p = i + query_offset`` and sees key ``j`` iff ``-left <= j - p <= right``::

        cap(s)      = softcap * tanh(s / softcap)
        score[i, j] = cap(scale * <rotate(q[i], p), rotate(k[j], j)>) + bias[i, j]
        lse[i]      = log(exp(sink) + sum over seen j of exp(score[i, j]))
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
        positions: int64, shape ``[Nk]`` or ``[B, Nk]``: the row of the table by which a key is rotated, and the query
            that stands at it; for padded or packed sequences. The window still counts keys. Needs ``rope``, and every
            query at a key. Default: ``0 .. Nk - 1``.
        bias: floating point, shape broadcastable to ``[B, Hq, Nq, Nk]``, added to the scores after the cap; -inf hides
            a key. Only what is seen is read. Its gradient is summed over broadcast dimensions, by way of a float32
            tensor of the full shape. Default: none.
        sink: shape ``[Hq]``, floating point, finite or -inf (no sink): a logit for each head that joins the softmax and
            attends nothing. A query that sees no key then has the sink for its lse. Default: none.
        softcap: bound of the scores, from 1e-30 to 1e30. Default: none.
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

    Backends: ``cpu``, ``cuda`` and ``triton`` (float32, bfloat16, float16; ``D`` and ``Dv`` up to 256), ``reference``
    (everything, any device, dense; differentiable twice). ``cuda`` and ``triton`` serve CUDA tensors, and round rotated
    queries and keys of half precision to their dtype, as tensor cores take them. ``cuda`` is for GPUs of compute
    capability 8.0 and later, and takes fewer than 2**30 keys, and queries times ``Hq / Hkv``; so far it has run in the
    emulator of the tests alone. ``triton`` also serves, where it is asked for, tensors on the CPU in its interpreter
    (``TRITON_INTERPRET=1``). Under autocast q, k and v are cast to the autocast dtype.

    Sources: the window of Beltagy et al., "Longformer", 2020, section 3.1; the softmax and its backward as in Dao,
    "FlashAttention-2", 2023, section 2.3; the rotation of Su et al., "RoFormer", 2021, equation 34; the cap of the
    Gemma Team, "Gemma 2", 2024, section 2; the sink of Xiao et al., "Efficient Streaming Language Models with Attention
    Sinks", 2023, section 3.3.
    """
    call = prepare(
        q,
        k,
        v,
        window=window,
        rope=rope,
        positions=positions,
        bias=bias,
        sink=sink,
        softcap=softcap,
        scale=scale,
        query_offset=query_offset,
        return_lse=return_lse,
    )
    out, lse = _operator.choose(call, backend).run(call)
    return (out, lse) if return_lse else out


def _cpu_refuses(call: WindowAttentionCall) -> str | None:
    return why_not_cpu("window_attention", call.q, call.v)


def _cuda_refuses(call: WindowAttentionCall) -> str | None:
    return why_not_cuda("window_attention", call.q, call.v)


def _triton_refuses(call: WindowAttentionCall) -> str | None:
    return why_not_triton(call.q, call.v)


def _gpu_unasked(call: WindowAttentionCall) -> str | None:
    return why_not_unasked(call.q.device)


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    tensors = [torch.randn(shape) for shape in ((2, 4, 150, 40), (2, 2, 167, 40), (2, 2, 167, 24))]
    return tensors, {"window": (37, 4), "rope": rope_table(40, 167, rotary_dim=32)}


_operator = register(
    Operator(
        name="window_attention",
        prepare=prepare,
        backends=(
            Backend("cpu", _cpu_refuses, lambda call: forward_op(*call)),
            Backend("cuda", _cuda_refuses, lambda call: cuda_forward_op(*call), _gpu_unasked),
            Backend("triton", _triton_refuses, lambda call: triton_forward_op(*call), _gpu_unasked),
            Backend("reference", lambda call: None, lambda call: window_attention_reference(*call)),
        ),
        example=_example,
    )
)
