"""Windowed multi-head attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsaccel.modules.cache import WindowCache
from dsaccel.modules.multihead import in_projection, why_not_windowed
from dsaccel.modules.rotary import RotaryEmbedding
from dskernels import QuantizedWeight, window_attention


class WindowAttention(nn.Module):
    """Multi-head attention over a sliding window, with rotary positions applied inside the kernel.

    ``proj(concat over heads of attention(q, k, v))`` with ``q, k, v = split(qkv(x))`` and `dskernels.window_attention`
    as the attention. The heads are views of the projection's output: nothing is copied or transposed in memory.

    Args:
        dim: components ``C`` of a token.
        num_heads: query heads ``Hq``.
        num_kv_heads: key and value heads ``Hkv``, a divisor of ``num_heads``; query head ``h`` uses key head
            ``h // (num_heads / num_kv_heads)``. Default: ``num_heads``.
        window: ``(left, right)``, inclusive: a token at position ``p`` sees positions ``p - left`` to ``p + right``;
            None is unbounded. Causal with ``W`` visible tokens is ``(W - 1, 0)``. Default: everything.
        rope: rotary positions for heads of ``D`` components; modules may share one. Default: none.
        qkv_bias: whether ``qkv`` has a bias. Default: True.
        proj_bias: whether ``proj`` has a bias. Default: True.
        head_dim: components ``D`` of a head. Default: ``dim / num_heads``.
        scale: factor of the scores. Default: ``D ** -0.5``.
        softcap: bound of the scores, positive. Default: none.

    Attributes:
        qkv: ``nn.Linear(C, (Hq + 2 * Hkv) * D)``; its outputs are the query heads, the key heads, the value heads.
        proj: ``nn.Linear(Hq * D, C)``.

    Raises:
        ValueError: ``dim`` is not a multiple of ``num_heads`` and there is no ``head_dim``, ``num_heads`` is not a
            multiple of ``num_kv_heads``, or ``rope`` was made for heads of another size.

    There is no dropout of attention weights: no weight is ever written to memory. State dict, dtype and device are
    those of the two linear layers; ``qkv`` and ``proj`` are the names of timm's attention, for whose plain form (no
    norm of q and k) a checkpoint loads as it is.

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
        head_dim: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or dim < 1 or (head_dim is None and dim % num_heads):
            raise ValueError(f"dim: expected a positive multiple of num_heads = {num_heads}, got {dim}")
        head_dim = dim // num_heads if head_dim is None else head_dim
        if head_dim < 1:
            raise ValueError(f"head_dim: expected a positive number, got {head_dim}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
        if rope is not None and rope.head_dim != head_dim:
            raise ValueError(f"rope: expected one for heads of {head_dim} components, got {rope.head_dim}")
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.rope = rope
        self.scale = scale
        self.softcap = softcap
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.proj = nn.Linear(num_heads * head_dim, dim, bias=proj_bias)
        self.reset_parameters()

    @classmethod
    def from_multihead_attention(
        cls,
        mha: nn.MultiheadAttention,
        *,
        window: tuple[int | None, int | None],
        rope: RotaryEmbedding | None = None,
        ignore_dropout: bool = False,
    ) -> WindowAttention:
        """A module with a copy of the weights of ``mha``, for which ``module(x)`` is ``mha(x, x, x, mask)[0]``.

        ``mask`` hides what is outside the window; with ``rope`` the positions come in addition.
        `replace_attention` does this in a whole model, and keeps the call signature and the parameters.

        Args:
            mha: self-attention with ``batch_first=True``.
            window: as in `WindowAttention`.
            rope: as in `WindowAttention`. Default: none.
            ignore_dropout: take a module with dropout of its attention weights, and leave the dropout out. Default:
                False.

        Raises:
            ValueError: ``mha`` has an option that cannot be had here; the message names it.
        """
        reason = why_not_windowed(mha, ignore_dropout)
        if reason is None and not mha.batch_first:
            reason = "batch_first: expected True, as the module takes [B, N, C], got False"
        if reason is not None:
            raise ValueError(reason)
        weight, bias = in_projection(mha)
        with torch.device("meta"):
            biased = {"qkv_bias": bias is not None, "proj_bias": mha.out_proj.bias is not None}
            module = cls(mha.embed_dim, mha.num_heads, window=window, rope=rope, **biased)
        state = {"qkv.weight": weight, **({} if bias is None else {"qkv.bias": bias})}
        state.update({f"proj.{name}": parameter for name, parameter in mha.out_proj.named_parameters()})
        module.load_state_dict({name: x.detach().clone() for name, x in state.items()}, assign=True)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(state[name].requires_grad)
        return module.train(mha.training)

    def reset_parameters(self) -> None:
        """Draws new weights (Xavier uniform, q, k and v each by its own size) and sets the biases to 0."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        for part in self.qkv.weight.split([count * self.head_dim for count in heads]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.proj.weight)
        for linear in (self.qkv, self.proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Tensor,
        cache: WindowCache | None = None,
        *,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Mixes the tokens.

        Args:
            x: shape ``[B, N, C]``, in the dtype of the weights.
            cache: of `new_cache`: the tokens before ``x``, which ``x`` is appended to. A first call may bring any
                number of tokens, the later ones up to its ``new_tokens``. Default: ``x`` is all there is.
            positions: int64, shape ``[N]`` or ``[B, N]``: the rotary position of each token, for padded batches; needs
                ``rope``. The window still counts tokens. Default: ``0 .. N - 1``.
            bias: floating point, broadcastable to ``[B, Hq, N, N]``, added to the scores; -inf hides a key, so that
                padding is a row ``[B, 1, 1, N]``. Default: none.

        Returns:
            Shape ``[B, N, C]``, dtype of ``x``.

        Raises:
            ValueError: ``x`` has another shape, or as `dskernels.window_attention`.
            IndexError: with ``rope``, a token stands at a position outside its table.
        """
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x: expected shape [B, N, {self.dim}], got {list(x.shape)}")
        heads = self.qkv(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        # Subclasses that know neither may leave them out of their `attend`.
        given = {name: x for name, x in (("positions", positions), ("bias", bias)) if x is not None}
        if cache is None:
            attended = self.attend(q, k, v, **given)
        else:
            if given:
                raise ValueError(
                    f"{', '.join(given)}: expected None with a cache, whose tokens stand at their own places"
                )
            starts = cache.is_empty
            if not starts and x.shape[1] > cache.new_tokens:
                # Before anything is stored, so that whoever catches this can go on.
                raise ValueError(f"x: expected up to new_tokens = {cache.new_tokens} after the first, got {x.shape[1]}")
            cache.append(k, v)
            attended = self.attend(q, k, v) if starts else cache.attend(q, softcap=self.softcap, scale=self.scale)
        out: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return out

    def new_cache(
        self, batch: int, *, max_tokens: int | None = None, new_tokens: int = 1, dtype: torch.dtype | None = None
    ) -> WindowCache:
        """A cache for ``batch`` sequences, on the device of the weights, for `forward`.

        Args:
            batch: number of sequences.
            max_tokens, new_tokens: as in `WindowCache`.
            dtype: of what is stored. Default: that of the weights; quantized ones answer in that of their input, and
                have none.

        Raises:
            ValueError: the window is not causal, or neither it nor ``max_tokens`` bounds the cache; or there is no
                ``dtype``, and the weights are quantized.
        """
        weight = self.qkv.weight
        if isinstance(weight, QuantizedWeight):
            weight = weight.qweight
            if dtype is None:
                raise ValueError("dtype: expected that of the inputs, as the weights are quantized, got None")
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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """The attention itself, for subclasses to replace; of the tokens after the first, a cache sees to it alone.

        Args:
            q: shape ``[B, Hq, N, D]``.
            k: shape ``[B, Hkv, N, D]``.
            v: shape ``[B, Hkv, N, D]``.
            positions: as in `forward`.
            bias: as in `forward`.

        Returns:
            Shape ``[B, Hq, N, D]``.
        """
        rope = None if self.rope is None else self.rope()
        return window_attention(
            q,
            k,
            v,
            window=self.window,
            rope=rope,
            positions=positions,
            bias=bias,
            softcap=self.softcap,
            scale=self.scale,
        )

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        said = f"{self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, window={self.window}"
        if self.head_dim * self.num_heads != self.dim:
            said += f", head_dim={self.head_dim}"
        options = (("scale", self.scale), ("softcap", self.softcap))
        return said + "".join(f", {name}={value}" for name, value in options if value is not None)
