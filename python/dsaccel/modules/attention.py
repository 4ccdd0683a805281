"""Windowed multi-head attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsaccel.modules.cache import WindowCache
from dsaccel.modules.rotary import RotaryEmbedding
from dskernels import window_attention


class WindowAttention(nn.Module):
    """Multi-head attention over a sliding window, with rotary positions applied inside the kernel.

    ``proj(concat over heads of attention(q, k, v))`` with ``q, k, v = split(qkv(x))`` and `dskernels.window_attention`
    as the attention. The heads are views of the projection's output: nothing is copied or transposed in memory.

    Args:
        dim: components ``C`` of a token.
        num_heads: query heads ``Hq``; each has ``D = dim / num_heads`` components.
        num_kv_heads: key and value heads ``Hkv``, a divisor of ``num_heads``; query head ``h`` uses key head
            ``h // (num_heads / num_kv_heads)``. Default: ``num_heads``.
        window: ``(left, right)``, inclusive: a token at position ``p`` sees positions ``p - left`` to ``p + right``;
            None is unbounded. Causal with ``W`` visible tokens is ``(W - 1, 0)``. Default: everything.
        rope: rotary positions for heads of ``D`` components; modules may share one. Default: none.
        qkv_bias: whether ``qkv`` has a bias. Default: True.
        proj_bias: whether ``proj`` has a bias. Default: True.

    Attributes:
        qkv: ``nn.Linear(C, (Hq + 2 * Hkv) * D)``; its outputs are the query heads, the key heads, the value heads.
        proj: ``nn.Linear(C, C)``.

    Raises:
        ValueError: ``dim`` is not a multiple of ``num_heads``, ``num_heads`` not one of ``num_kv_heads``, or ``rope``
            was made for heads of another size.

    Sources: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; grouped heads: Ainslie et al., "GQA",
    2023, section 2.2. The weights start as in Glorot and Bengio, 2010, equation 16, for q, k, v and ``proj`` each.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        window: tuple[int | None, int | None] = (None, None),
        rope: RotaryEmbedding | None = None,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(f"dim: expected a positive multiple of num_heads = {num_heads}, got {dim}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
        if rope is not None and rope.head_dim != dim // num_heads:
            raise ValueError(f"rope: expected one for heads of {dim // num_heads} components, got {rope.head_dim}")
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = dim // num_heads
        self.window = window
        self.rope = rope
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights (Xavier uniform, q, k and v each by its own size) and sets the biases to 0."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        for part in self.qkv.weight.split([count * self.head_dim for count in heads]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.proj.weight)
        for linear in (self.qkv, self.proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, cache: WindowCache | None = None) -> Tensor:
        """Mixes the tokens.

        Args:
            x: shape ``[B, N, C]``, in the dtype of the weights.
            cache: of `new_cache`: the tokens before ``x``, which ``x`` is appended to. A first call may bring any
                number of tokens, the later ones up to its ``new_tokens``. Default: ``x`` is all there is.

        Returns:
            Shape ``[B, N, C]``, dtype of ``x``.

        Raises:
            ValueError: ``x`` has another shape.
            IndexError: with ``rope``, ``N`` exceeds its ``max_positions``.
        """
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x: expected shape [B, N, {self.dim}], got {list(x.shape)}")
        heads = self.qkv(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if cache is None:
            attended = self.attend(q, k, v)
        else:
            starts = cache.is_empty
            cache.append(k, v)
            attended = self.attend(q, k, v) if starts else cache.attend(q)
        out: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return out

    def new_cache(
        self, batch: int, *, max_tokens: int | None = None, new_tokens: int = 1, dtype: torch.dtype | None = None
    ) -> WindowCache:
        """A cache for ``batch`` sequences, on the device of the weights, for `forward`.

        Args:
            batch: number of sequences.
            max_tokens, new_tokens: as in `WindowCache`.
            dtype: of what is stored. Default: that of the weights.

        Raises:
            ValueError: the window is not causal, or neither it nor ``max_tokens`` bounds the cache.
        """
        weight = self.qkv.weight
        return WindowCache(
            batch,
            self.num_kv_heads,
            self.head_dim,
            window=self.window,
            max_tokens=max_tokens,
            new_tokens=new_tokens,
            rope=None if self.rope is None else self.rope(),
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention itself, for subclasses to replace.

        Args:
            q: shape ``[B, Hq, N, D]``.
            k: shape ``[B, Hkv, N, D]``.
            v: shape ``[B, Hkv, N, D]``.

        Returns:
            Shape ``[B, Hq, N, D]``.
        """
        rope = None if self.rope is None else self.rope()
        return window_attention(q, k, v, window=self.window, rope=rope)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"{self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, window={self.window}"
