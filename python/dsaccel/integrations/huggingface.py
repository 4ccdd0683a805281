"""`dskernels.window_attention` as an attention implementation of Hugging Face's transformers.

After `register`, ``attn_implementation="dskernels"`` makes a model use it: sliding-window and full layers, encoders and
decoders, with softcap, sinks and caches. Masks are not built: what eager attention reads from a mask of all pairs,
`window_mask` says by two bounds, and padding by one row a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsaccel.integrations.mask_algebra import Window, window_of
from dsaccel.modules._masks import hiding_bias
from dskernels import window_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as error:
    raise ImportError(
        'dsaccel.integrations.huggingface needs transformers: pip install "dskernels[huggingface]"'
    ) from error


class WindowMask(NamedTuple):
    """What `window_mask` hands to `attention_forward` in place of a mask of all pairs.

    Attributes:
        window: ``(left, right)`` of `dskernels.window_attention`.
        query_offset: the key at which the first query stands.
        bias: shape ``[B, 1, 1, Nk]``, 0 for a token and -inf for padding; None where no padding is in reach.
        shape: ``(B, 1, Nq, Nk)`` of the mask that it stands for.
    """

    window: Window
    query_offset: int
    bias: Tensor | None
    shape: tuple[int, int, int, int]

    @property
    def ndim(self) -> int:
        """4, by which transformers tells a finished mask from one of padding."""
        return 4


def register(name: str = "dskernels") -> None:
    """Makes the attention known to transformers, for ``attn_implementation=name`` and ``set_attn_implementation``.

    Args:
        name: under which. Default: ``"dskernels"``.

    Source of the interface: https://huggingface.co/docs/transformers/attention_interface
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, window_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: WindowMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        module: the attention module, asked for ``is_causal`` where nothing else says it.
        query: shape ``[B, Hq, Nq, D]``, rotated already.
        key: shape ``[B, Hkv, Nk, D]``, rotated already.
        value: shape ``[B, Hkv, Nk, Dv]``.
        attention_mask: a `WindowMask`; or a mask of all pairs, ``[B, 1 or Hq, Nq, Nk]``, bool (true where a key is
            seen) or floating point (added to the scores), which then says everything; or None for the window alone.
        dropout: must be 0.
        scaling: factor of the scores. Default: ``D ** -0.5``.
        sliding_window: used without a mask: how many keys a causal query sees, itself included; without causality, on
            each side. Default: all.
        softcap: bound of the scores. Default: none.
        is_causal: used without a mask. The last query stands at the last key. Default: ``module.is_causal``, else
            True, as in transformers.
        s_aux: attention sinks, shape ``[Hq]``. Default: none.
        position_bias: added to the scores, broadcastable to ``[B, Hq, Nq, Nk]``. Default: none.
        kwargs: what the model hands to every implementation; not used, but ``output_attentions`` is refused.

    Returns:
        Shape ``[B, Nq, Hq, Dv]``, contiguous, and None for the weights.

    Raises:
        ValueError: ``dropout`` is above 0, attention weights are asked for, or the mask does not fit.
    """
    if dropout > 0:
        raise ValueError(
            "dropout: expected 0 (attention weights are never written down; set attention_dropout = 0 in the "
            f"configuration), got {dropout}"
        )
    if kwargs.get("output_attentions"):
        raise ValueError('output_attentions: expected False (attn_implementation="eager" has them), got True')
    window, offset, bias = _reading(attention_mask, query, key)
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        reach = None if sliding_window is None else sliding_window - 1
        window = (reach, 0 if is_causal else reach)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    out = window_attention(
        query,
        key,
        value,
        window=window,
        bias=bias,
        sink=s_aux,
        softcap=softcap,
        scale=scaling,
        query_offset=offset,
    )
    return out.transpose(1, 2).contiguous(), None


def window_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: WindowMask | Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> WindowMask | Tensor:
    """A mask function of transformers.

    Args:
        batch_size: ``B``.
        q_length: ``Nq``.
        kv_length: ``Nk``, slots of a static cache that are not filled yet included.
        q_offset: position of the first query.
        kv_offset: position of the first key, above 0 where a cache has dropped the keys that left the window.
        mask_function: who sees whom, ``(batch, head, query, key) -> bool``.
        attention_mask: true or 1 where there is a token, shape ``[B, kv_offset + Nk]``; or a finished `WindowMask`.
        allow_is_causal_skip: whether a causal mask may be left unbuilt.
        allow_is_bidirectional_skip: whether any other may.
        dtype: that of the model.
        kwargs: the other arguments of ``transformers.masking_utils.sdpa_mask``.

    Returns:
        A `WindowMask` where ``mask_function`` is causal, a sliding window, everything or an intersection of these; else
        (packed sequences, image tokens that see each other, chunks), and where transformers forbids to skip the mask,
        a bool tensor ``[B, 1, Nq, Nk]``.
    """
    if isinstance(attention_mask, WindowMask):
        return attention_mask
    # A static cache counts in a tensor, whose value a traced graph cannot know.
    unknown = isinstance(q_offset, Tensor) and torch.compiler.is_compiling()
    skippable = (allow_is_causal_skip or allow_is_bidirectional_skip) and not unknown
    window = window_of(mask_function) if skippable else None
    if window is None:
        mask: Tensor = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            **kwargs,
        )
        return mask
    query_offset = int(q_offset) - kv_offset
    # Keys past the sight of the last query, as in a static cache that is not full, need no mask.
    last = kv_length if window[1] is None else query_offset + q_length + window[1]
    bias = _padding_bias(attention_mask, kv_length, kv_offset, max(last, 0), dtype)
    return WindowMask(window, query_offset, bias, (batch_size, 1, q_length, kv_length))


def _reading(mask: WindowMask | Tensor | None, query: Tensor, key: Tensor) -> tuple[Window, int | None, Tensor | None]:
    # The window, the offset and the bias that a mask stands for.
    if mask is None:
        return (None, None), None, None
    if isinstance(mask, WindowMask):
        if mask.shape[2:] != (query.shape[2], key.shape[2]):
            expected, got = (query.shape[2], key.shape[2]), mask.shape[2:]
            raise ValueError(f"attention_mask: expected one for (Nq, Nk) = {tuple(expected)}, got {tuple(got)}")
        return mask.window, mask.query_offset, mask.bias
    if mask.dim() != 4:
        raise ValueError(f"attention_mask: expected shape [B, 1 or Hq, Nq, Nk], got {list(mask.shape)}")
    if mask.dtype == torch.bool:
        mask = hiding_bias(~mask, query.dtype)
    elif not mask.is_floating_point():
        raise ValueError(f"attention_mask: expected dtype bool or a floating point one, got {mask.dtype}")
    return (None, None), None, mask


def _padding_bias(mask: Tensor | None, kv_length: int, kv_offset: int, last: int, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    padding = masking_utils.prepare_padding_mask(mask.bool(), kv_length, kv_offset)
    padding = padding[:, kv_offset : kv_offset + kv_length]
    # Looking at the values of a traced tensor is not possible.
    if not torch.compiler.is_compiling() and bool(padding[:, :last].all()):
        return None
    return hiding_bias(~padding, dtype)[:, None, None]
