"""Attention of the next tokens over a cache of the keys and values before them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dskernels._library import cast_for_autocast, why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.checks import is_readable, shape_of, wrong_type, wrong_value
from dskernels.rope import RopeTable, rope_table
from dskernels.window_attention.arguments import (
    check_device,
    check_dtype,
    check_layout,
    check_return_lse,
    check_same,
    check_table,
    checked_scale,
    checked_sink,
    checked_softcap,
    checked_window,
    why_not_cpu,
    why_not_cuda,
    why_not_triton,
)
from dskernels.window_attention.cuda_schema import cuda_decode_op
from dskernels.window_attention.decode_reference import check_lengths, window_attention_decode_reference
from dskernels.window_attention.decode_schema import decode_op
from dskernels.window_attention.triton_schema import triton_decode_op


class DecodeCall(NamedTuple):
    """The validated arguments of a call, in the order of the torch operator."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_lengths: Tensor
    cos: Tensor | None
    sin: Tensor | None
    sink: Tensor | None
    left: int | None
    right: int | None
    scale: float
    softcap: float
    interleaved: bool
    keys_rotated: bool


@overload
def window_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    keys_rotated: bool = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def window_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    *,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    keys_rotated: bool = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def window_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, 0),
    rope: RopeTable | None = None,
    keys_rotated: bool = False,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Window attention of the last tokens of each sequence over a cache, the rows that one full call would give them.

    Of sequence ``b`` there are ``L = cache_lengths[b]`` tokens, the ``Nq`` new ones included, whose keys and values
    are in the cache already: token ``j`` in slot ``j % S``. So a cache of ``S`` slots holds a sequence of up to ``S``
    tokens from its start (a linear cache), and of a longer one the last ``S`` (a rolling cache). Query ``i`` stands at
    position ``p = L - Nq + i`` and sees token ``j < L`` iff ``-left <= j - p <= right``::

        cap(x)      = softcap * tanh(x / softcap)
        score[i, j] = cap(scale * <rotate(q[i], p), rotate(k[j], j)>)
        lse[i]      = log(exp(sink) + sum over seen j of exp(score[i, j]))
        out[i]      = sum over seen j of exp(score[i, j] - lse[i]) * v[j]

    A query that sees no token gets 0 and an lse of -inf (or the sink); so does one before the start of its sequence
    (``p < 0``), as where ``L`` is 0. Slots that nobody sees may hold anything. The compiled kernel reads each key and
    value that is seen once for all query heads that share it. There is no gradient.

    Args:
        q: the new queries, shape ``[B, Hq, Nq, D]``, float32, bfloat16 or float16 (float64 with the reference).
        k_cache: shape ``[B, Hkv, S, D]``, any of these dtypes, not necessarily that of ``q``; any strides. Query head
            ``h`` uses key head ``h // (Hq / Hkv)``.
        v_cache: shape ``[B, Hkv, S, Dv]``, dtype of ``k_cache``.
        cache_lengths: shape ``[B]``, int32 or int64, on the device of ``q``: the tokens of each sequence so far.
        window: ``(left, right)``, inclusive; None is unbounded, negative bounds are legal. A rolling cache needs
            ``S >= left + Nq``. Default: ``(None, 0)``, causal.
        rope: table of `rope_table`, by whose rows queries and keys are rotated at their positions, in float32
            whatever the inputs. Default: no rotation.
        keys_rotated: the keys in the cache are rotated already, so only the queries will be. Saves the rotation of the
            whole window at every step; where the cache is of half precision, it keeps rotated keys rounded. Default:
            False.
        sink: shape ``[Hq]``, floating point, finite or -inf (no sink): a logit for each head that joins the softmax and
            attends nothing. Default: none.
        softcap: bound of the scores, from 1e-30 to 1e30. Default: none.
        scale: factor of the scores. Default: ``D ** -0.5``.
        return_lse: also return ``lse``. Default: False.
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; an explicit choice never falls back.
            Default: `use_backend`, then ``DSKERNELS_BACKEND``, then the first that serves the call.

    Returns:
        ``out``, shape ``[B, Hq, Nq, Dv]``, dtype and layout of ``q`` as in `window_attention`; with ``return_lse`` the
        pair of it and ``lse``, shape ``[B, Hq, Nq]``, natural logarithm, float32 (float64 for float64 queries).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not fit each other, or a cache is too small for what is seen.
        IndexError: with ``rope``, a sequence is longer than the table.
        RuntimeError: the backend that was asked for cannot serve the call; or, under ``torch.compile``, which cannot
            look at values beforehand, a length does not fit cache or table.
        NotImplementedError: a gradient is asked for, other than of the reference.

    Backends: ``cpu``, ``cuda`` and ``triton`` (float32, bfloat16, float16; ``D`` and ``Dv`` up to 256), ``reference``
    (everything, any device, dense). ``cuda`` and ``triton`` are as in `window_attention`, and compute in float32 where
    queries and cache are of different dtypes. Lengths on a GPU are not looked at, nor under ``torch.func.vmap``: there,
    a cache that is too small gives wrong results without an error, and a position outside the table NaN. Under autocast
    q is cast to the autocast dtype, the caches are not.

    Sources: as for `window_attention`; the rolling cache is that of Jiang et al., "Mistral 7B", 2023, section 2; the
    parts of a long window are joined as in Dao et al., "Flash-Decoding", 2023.
    """
    call = _prepare(
        q,
        k_cache,
        v_cache,
        cache_lengths,
        window=window,
        rope=rope,
        keys_rotated=keys_rotated,
        sink=sink,
        softcap=softcap,
        scale=scale,
        return_lse=return_lse,
    )
    out, lse = _operator.choose(call, backend).run(call)
    return (out, lse) if return_lse else out


def _prepare(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    *,
    window: tuple[int | None, int | None] = (None, 0),
    rope: RopeTable | None = None,
    keys_rotated: bool = False,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> DecodeCall:
    tensors = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("cache_lengths", cache_lengths))
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, "a tensor", tensor)
    (q,) = cast_for_autocast(q)
    _check_tensors(q, k_cache, v_cache)
    _check_lengths_tensor(cache_lengths, q)
    left, right = checked_window(window)
    if not isinstance(keys_rotated, bool):
        raise wrong_type("keys_rotated", "a bool", keys_rotated)
    check_return_lse(return_lse)
    sink = checked_sink(sink, q)
    cos = sin = None
    interleaved = False
    if rope is not None:
        check_table(rope, q)
        cos, sin, interleaved = rope.cos.contiguous(), rope.sin.contiguous(), rope.interleaved
    if is_readable(cache_lengths):
        rows = None if rope is None else rope.max_positions
        check_lengths(cache_lengths.tolist(), q.shape[2], k_cache.shape[2], left, rows)
    options = (checked_scale(scale, q), checked_softcap(softcap), interleaved, keys_rotated)
    return DecodeCall(q, k_cache, v_cache, cache_lengths, cos, sin, sink, left, right, *options)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    layouts = (("q", q, "[B, Hq, Nq, D]"), ("k_cache", k, "[B, Hkv, S, D]"), ("v_cache", v, "[B, Hkv, S, Dv]"))
    for name, tensor, layout in layouts:
        check_layout(name, tensor, layout)
    check_dtype("q", q)
    check_dtype("k_cache", k)
    check_device("q", q, "k_cache", k)
    check_same("k_cache", k, "v_cache", v)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise wrong_value("k_cache", f"batch and head dimension of q, {shape_of(q)}", f"shape {shape_of(k)}")
    if q.shape[1] % k.shape[1] != 0:
        raise wrong_value("k_cache", f"a number of heads that divides the {q.shape[1]} of q", k.shape[1])
    if v.shape[:3] != k.shape[:3]:
        raise wrong_value("v_cache", f"batch, heads and slots of k_cache, {shape_of(k)}", f"shape {shape_of(v)}")


def _check_lengths_tensor(lengths: Tensor, q: Tensor) -> None:
    if lengths.dtype not in (torch.int32, torch.int64):
        raise wrong_value("cache_lengths", "dtype int32 or int64", lengths.dtype)
    if lengths.shape != q.shape[:1]:
        raise wrong_value("cache_lengths", f"shape [B] = [{q.shape[0]}]", f"shape {shape_of(lengths)}")
    check_device("q", q, "cache_lengths", lengths)


def _cpu_refuses(call: DecodeCall) -> str | None:
    return why_not_cpu("window_attention_decode", call.q, call.v_cache) or _why_not_cache(call)


def _cuda_refuses(call: DecodeCall) -> str | None:
    return why_not_cuda("window_attention_decode", call.q, call.v_cache) or _why_not_cache(call)


def _triton_refuses(call: DecodeCall) -> str | None:
    return why_not_triton(call.q, call.v_cache) or _why_not_cache(call)


def _gpu_unasked(call: DecodeCall) -> str | None:
    return why_not_unasked(call.q.device)


def _why_not_cache(call: DecodeCall) -> str | None:
    if call.k_cache.dtype == torch.float64:
        return "the kernel takes caches of float32, bfloat16 and float16, not torch.float64"
    return None


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    tensors = [torch.randn(shape) for shape in ((3, 4, 2, 40), (3, 2, 64, 40), (3, 2, 64, 24))]
    options = {"window": (37, 0), "rope": rope_table(40, 200, rotary_dim=32), "sink": torch.linspace(-1, 1, 4)}
    return tensors, {"cache_lengths": torch.tensor([1, 64, 200]), **options, "softcap": 5.0}


_operator = register(
    Operator(
        name="window_attention_decode",
        prepare=_prepare,
        backends=(
            Backend("cpu", _cpu_refuses, lambda call: decode_op(*call)),
            Backend("cuda", _cuda_refuses, lambda call: cuda_decode_op(*call), _gpu_unasked),
            Backend("triton", _triton_refuses, lambda call: triton_decode_op(*call), _gpu_unasked),
            Backend("reference", lambda call: None, lambda call: window_attention_decode_reference(*call)),
        ),
        example=_example,
        differentiable=False,
    )
)
