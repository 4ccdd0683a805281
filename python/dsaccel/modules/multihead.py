"""``torch.nn.MultiheadAttention`` over a sliding window, with its parameters and its call signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules._masks import hiding_bias
from dsaccel.modules.rotary import RotaryEmbedding
from dskernels import window_attention


def why_not_windowed(mha: nn.MultiheadAttention, ignore_dropout: bool = False) -> str | None:
    """The option of ``mha`` that windowed self-attention does not have, as a message, or None."""
    if mha.bias_k is not None or mha.bias_v is not None:
        return "add_bias_kv: expected False, got True (bias_k and bias_v are set)"
    if mha.add_zero_attn:
        return "add_zero_attn: expected False, got True"
    for name, width in (("kdim", mha.kdim), ("vdim", mha.vdim)):
        if width != mha.embed_dim:
            return f"{name}: expected embed_dim = {mha.embed_dim}, got {width}"
    if mha.dropout > 0 and not ignore_dropout:
        return f"dropout: expected 0 (ignore_dropout=True leaves it out), got {mha.dropout}"
    return None


def in_projection(mha: nn.MultiheadAttention) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight ``[3 * C, C]`` and bias ``[3 * C]`` of the projection to queries, keys and values, in this order.

    They are the parameters of ``mha`` themselves, unless it keeps the weight in three parts.
    """
    weight: nn.Parameter | None = mha.in_proj_weight
    bias: nn.Parameter | None = mha.in_proj_bias  # type: ignore[assignment] # torch's own annotation says Tensor
    if weight is None:
        parts = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
        weight = nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=parts[0].requires_grad)
    return weight, bias


class WindowMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` in which a token attends the tokens of a window around it.

    Parameters, their names and initial values are those of `nn.MultiheadAttention`, so that checkpoints and optimizers
    fit; ``forward`` takes the same arguments. In place of scores and masks it runs `dskernels.window_attention`.

    Args:
        embed_dim: components ``C`` of a token, a multiple of ``num_heads``.
        num_heads: heads ``H``.
        window: ``(left, right)``, inclusive, as in `dskernels.window_attention`. Default: everything.
        rope: rotary positions for heads of ``C / H`` components; modules may share one. Default: none.
        bias: whether the projections have a bias. Default: True.
        batch_first: tokens come as ``[B, N, C]`` instead of ``[N, B, C]``. Default: False.
        device: of the parameters. Default: torch's.
        dtype: of the parameters. Default: torch's.

    Raises:
        ValueError: ``rope`` was made for heads of another size.

    Differences: there is no dropout of attention weights, no ``add_bias_kv``, ``add_zero_attn``, ``kdim`` or ``vdim``;
    the attention weights cannot be had; a query that sees no key gives the bias of ``out_proj`` instead of NaN. The
    fused inference path of `nn.TransformerEncoderLayer`, which would bypass the window, is not taken.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        window: tuple[int | None, int | None] = (None, None),
        rope: RotaryEmbedding | None = None,
        bias: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=bias, batch_first=batch_first, device=device, dtype=dtype)
        if rope is not None and rope.head_dim != self.head_dim:
            raise ValueError(f"rope: expected one for heads of {self.head_dim} components, got {rope.head_dim}")
        self.window = window
        self.rope = rope
        # torch's encoder layers hand the weights to a fused kernel, past forward, only where this is true.
        self._qkv_same_embed_dim = False

    @classmethod
    def from_multihead_attention(
        cls,
        mha: nn.MultiheadAttention,
        *,
        window: tuple[int | None, int | None],
        rope: RotaryEmbedding | None = None,
        ignore_dropout: bool = False,
    ) -> WindowMultiheadAttention:
        """The same attention over a window; it shares the parameters of ``mha``.

        Args:
            mha: the module to take the parameters, ``batch_first`` and the training mode from.
            window: as above.
            rope: as above. Default: none.
            ignore_dropout: take a module with dropout of its attention weights, and leave the dropout out. Default:
                False.

        Raises:
            ValueError: ``mha`` has an option that cannot be had here; the message names it.
        """
        reason = why_not_windowed(mha, ignore_dropout)
        if reason is not None:
            raise ValueError(reason)
        weight, bias = in_projection(mha)
        module = cls(
            mha.embed_dim,
            mha.num_heads,
            window=window,
            rope=rope,
            bias=bias is not None,
            batch_first=mha.batch_first,
            device="meta",
        )
        module.in_proj_weight = weight
        module.register_parameter("in_proj_bias", bias)
        module.out_proj = mha.out_proj
        return module.train(mha.training)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = True
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Self-attention.

        Args:
            query: shape ``[B, N, C]`` with ``batch_first``, else ``[N, B, C]``; or ``[N, C]``, one sequence.
            key: ``query`` itself.
            value: a tensor of the same shape, most often ``query`` itself.
            key_padding_mask: shape ``[B, N]`` (``[N]`` for one sequence); bool, true where a key is hidden, or
                floating point, added to the scores. Default: none.
            need_weights: must be false, unlike in `nn.MultiheadAttention`, whose default is true: the weights are never
                written down. Default: False.
            attn_mask: shape ``[N, N]`` or ``[B * H, N, N]``; bool, true where a key is hidden, or floating point, added
                to the scores. It adds to the window. Default: none.
            average_attn_weights: without effect, as there are no weights.
            is_causal: no token sees a later one, whatever the window says. As in `nn.MultiheadAttention` it vouches
                that ``attn_mask`` says just that, so the mask is not read, and work stays in proportion to the window.
                Default: False.

        Returns:
            The mixed tokens, shape and dtype of ``query``, and None.

        Raises:
            ValueError: ``key`` is another tensor than ``query`` (cross-attention), ``need_weights`` is true, a tensor
                is nested, or a shape does not fit.
            IndexError: with ``rope``, ``N`` exceeds its ``max_positions``.
        """
        _check_call(self.embed_dim, query, key, value, need_weights)
        if query.dim() == 3:
            return self._attend(query, value, key_padding_mask, attn_mask, is_causal, self.batch_first), None
        one = query.unsqueeze(0)
        padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        out = self._attend(one, one if value is query else value.unsqueeze(0), padding, attn_mask, is_causal, True)
        return out.squeeze(0), None

    def _attend(
        self,
        query: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        batch_first: bool,
    ) -> Tensor:
        # Views of the projections, whatever the order of batch and tokens: [B, H, N, D], nothing is copied.
        order = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
        q, k, v = (x.unflatten(2, (self.num_heads, -1)).permute(order) for x in self._project(query, value))
        left, right = self.window
        if is_causal:
            right, attn_mask = 0 if right is None else min(right, 0), None
        bias = _bias(key_padding_mask, attn_mask, q)
        rope = None if self.rope is None else self.rope()
        mixed = window_attention(q, k, v, window=(left, right), rope=rope, bias=bias)
        out: Tensor = self.out_proj(mixed.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2))
        return out

    def _project(self, query: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if value is query:
            return F.linear(query, weight, bias).chunk(3, -1)
        split = 2 * self.embed_dim
        bias_qk, bias_v = (None, None) if bias is None else (bias[:split], bias[split:])
        return *F.linear(query, weight[:split], bias_qk).chunk(2, -1), F.linear(value, weight[split:], bias_v)


def _check_call(dim: int, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> None:
    if query.is_nested or value.is_nested:
        raise ValueError(
            "query: expected a dense tensor, got a nested one (nn.TransformerEncoder makes them unless its "
            "use_nested_tensor is False)"
        )
    if key is not query:
        raise ValueError("key: expected query itself (windowed self-attention), got another tensor (cross-attention)")
    if query.dim() not in (2, 3) or query.shape[-1] != dim:
        raise ValueError(f"query: expected two or three dimensions, the last of {dim}, got {list(query.shape)}")
    if value.shape != query.shape:
        raise ValueError(f"value: expected the shape of query, {list(query.shape)}, got {list(value.shape)}")
    if need_weights:
        raise ValueError("need_weights: expected False (attention weights are never written down), got True")


def _bias(key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor) -> Tensor | None:
    batch, heads, length, _ = q.shape
    bias = None
    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, length):
            got = list(key_padding_mask.shape)
            raise ValueError(f"key_padding_mask: expected shape [B, N] = {[batch, length]}, got {got}")
        bias = _additive("key_padding_mask", key_padding_mask, q)[:, None, None]
    if attn_mask is not None:
        if attn_mask.shape not in ((length, length), (batch * heads, length, length)):
            expected, got = f"{[length] * 2} or {[batch * heads, length, length]}", list(attn_mask.shape)
            raise ValueError(f"attn_mask: expected shape [N, N] or [B * H, N, N], {expected}, got {got}")
        mask = _additive("attn_mask", attn_mask, q)
        mask = mask if attn_mask.dim() == 2 else mask.unflatten(0, (batch, heads))
        bias = mask if bias is None else mask + bias
    return bias


def _additive(name: str, mask: Tensor, q: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"{name}: expected dtype bool or a floating point one, got {mask.dtype}")
    return hiding_bias(mask, q.dtype)
