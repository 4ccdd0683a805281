"""A causal language model whose layers see a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules.block import TransformerBlock
from dsaccel.modules.cache import WindowCache
from dsaccel.modules.rotary import RotaryEmbedding
from dskernels import QuantizedWeight, quantized_matmul


class SlidingWindowLM(nn.Module):
    """A decoder of `TransformerBlock`: every layer sees the last ``window`` tokens, with rotary positions.

    ``logits = norm(blocks(embed(tokens))) @ embed.weight.T``: the head is the embedding, one parameter. What a token
    says reaches ``num_layers * (window - 1)`` tokens further, while time and memory of the attention grow linearly.

    Args:
        vocab_size: number of tokens ``V``.
        dim: components of a token.
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads. Default: ``num_heads``.
        window: how many tokens a layer sees: the token itself and the ``window - 1`` before it. Default: 128.
        max_positions: the longest sequence. Default: 4096.
        theta: base of the rotary frequencies. Default: 10000.
        mlp: ``"swiglu"`` or ``"gelu"``. Default: ``"swiglu"``.
        hidden_dim: components inside the MLPs. Default: that of `SwiGLU` or `GeluMLP`.

    Raises:
        ValueError: ``window``, ``num_layers`` or ``num_heads`` is below 1, or as `TransformerBlock`.

    Sources: Jiang et al., "Mistral 7B", 2023, section 2 (sliding window and its reach); Press and Wolf, "Using the
    Output Embedding to Improve Language Models", 2017 (tied head); Radford et al., "Language Models are Unsupervised
    Multitask Learners", 2019, section 2.3 (what is added to the residual stream starts smaller by the square root of
    the number of additions).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        window: int = 128,
        max_positions: int = 4096,
        theta: float = 10000.0,
        mlp: str = "swiglu",
        hidden_dim: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("window", window), ("num_layers", num_layers), ("num_heads", num_heads)):
            if value < 1:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        # One table for all layers.
        rope = RotaryEmbedding(dim // num_heads, max_positions, theta=theta)
        self.window = window
        self.max_positions = max_positions
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                dim, num_heads, num_kv_heads, (window - 1, 0), rope, mlp=mlp, hidden_dim=hidden_dim, bias=False
            )
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        nn.init.normal_(self.embed.weight, std=0.02)
        with torch.no_grad():
            for name, weight in self.blocks.named_parameters():
                if name.endswith(("attn.proj.weight", "mlp.down_proj.weight", "mlp.fc2.weight")):
                    weight.mul_((2 * num_layers) ** -0.5)

    @property
    def reach(self) -> int:
        """How many of the last tokens the next one depends on: the token itself and what the windows reach."""
        return len(self.blocks) * (self.window - 1) + 1

    def forward(self, tokens: Tensor, caches: Sequence[WindowCache] | None = None) -> Tensor:
        """The scores of every next token.

        Args:
            tokens: shape ``[B, N]``, int64 or int32, in ``[0, V)``.
            caches: of `new_caches`: what came before ``tokens``, to which they are appended. A first call may bring any
                number of tokens, the later ones up to the caches' ``new_tokens``. Default: nothing came before.

        Returns:
            Logits, shape ``[B, N, V]``, in the dtype of the weights; row ``n`` depends on ``tokens[:, :n + 1]``.

        Raises:
            IndexError: ``N`` exceeds ``max_positions``, or a token is outside the vocabulary.
            ValueError: the caches are not one for each layer, or take no ``N`` tokens at once.
        """
        x = self.embed(tokens)
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"caches: expected one for each of {len(self.blocks)} layers, got {len(caches)}")
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index])
        x, weight = self.norm(x), self.embed.weight
        return quantized_matmul(x, weight) if isinstance(weight, QuantizedWeight) else F.linear(x, weight)

    def new_caches(self, batch: int, *, new_tokens: int = 1, dtype: torch.dtype | None = None) -> list[WindowCache]:
        """A cache for each layer, for ``batch`` sequences; arguments as in `WindowAttention.new_cache`."""
        if dtype is None:
            # What goes through the layers has the dtype of the embedding; quantized layers have none of their own.
            dtype = self.embed(torch.zeros(1, 1, dtype=torch.int64, device=self.norm.weight.device)).dtype
        attentions = (cast(TransformerBlock, block).attn for block in self.blocks)
        return [attention.new_cache(batch, new_tokens=new_tokens, dtype=dtype) for attention in attentions]

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continues sequences, token by token, each drawn from ``softmax(logits / temperature)``.

        Each step computes one token, from caches of the windows. Beyond ``max_positions``, where the table of rotary
        positions ends, the caches are filled anew with the last tokens, as many as matter to the next one: rotary
        positions are relative, so it does not matter that they are counted from the first of these.

        Args:
            tokens: shape ``[B, N]``, int64, ``N`` at least 1.
            count: how many tokens to add, 0 or more.
            temperature: below 1 prefers the likely; 0 takes the likeliest. Default: 1.
            generator: source of randomness. Default: torch's own.

        Returns:
            Shape ``[B, N + count]``: ``tokens`` and what follows.

        Raises:
            ValueError: ``temperature`` is negative, or there is no token to start from.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature: expected a number not below 0, got {temperature}")
        if count < 0:
            raise ValueError(f"count: expected a number not below 0, got {count}")
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens: expected shape [B, N] with N at least 1, got {list(tokens.shape)}")
        context, steps_left = min(self.reach, self.max_positions), 0
        for _ in range(count):
            if steps_left == 0:
                caches, new = self.new_caches(tokens.shape[0]), tokens[:, -context:]
                steps_left = self.max_positions - new.shape[1] + 1
            steps_left -= 1
            logits = self(new, caches)[:, -1].float()
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens, new = torch.cat((tokens, following), 1), following
        return tokens
