"""Runs the calls of ``F.scaled_dot_product_attention`` in a block of code by `dskernels.window_attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dsaccel.modules._masks import hiding_bias
from dskernels import window_attention

# These compute attention without a call of scaled_dot_product_attention that a mode could see.
_OUT_OF_REACH = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)


class sdpa_as_window_attention(TorchFunctionMode):  # noqa: N801 - used as a function, like torch.no_grad
    """In its block, ``F.scaled_dot_product_attention`` is `dskernels.window_attention` over a window::

        with sdpa_as_window_attention(window=(255, 0)) as swapped:
            loss = model(x)
        print(swapped.calls)

    All arguments keep their meaning. ``attn_mask`` (bool: true where a key takes part; or floating point, added to the
    scores) and ``is_causal`` hide keys in addition to the window. As in PyTorch, ``is_causal`` counts from the first
    query and the first key, so the query ``i`` stands at key ``i``; without it the last query stands at the last key,
    as in decoding with a cache. A query that sees no key gives 0, where PyTorch gives 0 or NaN by version and backend.

    Args:
        window: ``(left, right)``, inclusive, as in `dskernels.window_attention`. Default: everything, which leaves
            the results as they are.
        filter: ``filter(query, key, value)`` says whether a call is replaced; cross-attention, for one, has no place in
            a window: ``lambda q, k, v: q.shape[-2] == k.shape[-2]``. Others go to PyTorch. Default: all are replaced.
        backend: as in `dskernels.window_attention`. Default: automatic.

    Attributes:
        calls: how many calls were replaced. Under ``torch.compile``, those that were traced.

    Raises (when SDPA is called):
        ValueError: ``dropout_p`` is above 0, ``attn_mask`` and ``is_causal`` come together, the numbers of heads differ
            without ``enable_gqa``, or as `dskernels.window_attention`.
        RuntimeError: `nn.MultiheadAttention` is called, whose attention is out of reach; see `replace_attention`.
    """

    def __init__(
        self,
        window: tuple[int | None, int | None] = (None, None),
        *,
        filter: Callable[[Tensor, Tensor, Tensor], bool] | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.window = window
        self.filter = filter
        self.backend = backend
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _OUT_OF_REACH:
            raise RuntimeError(
                "sdpa_as_window_attention: expected calls of F.scaled_dot_product_attention, got one of "
                "nn.MultiheadAttention, which dsaccel.modules.replace_attention replaces"
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if self.filter is not None and not self.filter(query, key, value):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if dropout_p > 0:
            raise ValueError(f"dropout_p: expected 0 (attention weights are never written down), got {dropout_p}")
        if is_causal and attn_mask is not None:
            raise ValueError("attn_mask: expected None with is_causal, got a tensor")
        self.calls += 1
        left, right = self.window
        offset = None
        if is_causal:
            right, offset = 0 if right is None else min(right, 0), 0
        (q, k, v), lead = _as_four_dimensions(query, key, value, enable_gqa)
        bias = None if attn_mask is None else _as_bias(attn_mask, lead, q, k)
        out = window_attention(
            q, k, v, window=(left, right), bias=bias, scale=scale, query_offset=offset, backend=self.backend
        )
        return out.reshape(*lead, *out.shape[-2:])


def _as_four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...]]:
    # [B, H, N, D] of each, and what stands before the last two dimensions of the result. SDPA takes any number of
    # dimensions and broadcasts them; with enable_gqa, all but the heads.
    tensors = (query, key, value)
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if tensor.dim() < 2 + enable_gqa:
            raise ValueError(f"{name}: expected at least {2 + enable_gqa} dimensions, got shape {list(tensor.shape)}")
    shared = 3 if enable_gqa else 2
    try:
        batch = torch.broadcast_shapes(*(tensor.shape[:-shared] for tensor in tensors))
    except RuntimeError:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        expected = "batches that broadcast" if enable_gqa else "batches and, without enable_gqa, heads that broadcast"
        raise ValueError(f"query, key, value: expected {expected}, got {shapes}") from None
    query, key, value = (tensor.expand(*batch, *tensor.shape[-shared:]) for tensor in tensors)
    q, k, v = (
        x.reshape(math.prod(x.shape[:-3]), x.shape[-3] if x.dim() > 2 else 1, *x.shape[-2:])
        for x in (query, key, value)
    )
    return (q, k, v), tuple(query.shape[:-2])


def _as_bias(mask: Tensor, lead: tuple[int, ...], q: Tensor, k: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = hiding_bias(~mask, q.dtype)
    if len(lead) <= 2:
        return mask
    return mask.expand(*lead, q.shape[2], k.shape[2]).reshape(*q.shape[:3], k.shape[2])
