"""The pre-norm transformer block and its feed-forward parts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules.attention import WindowAttention
from dsaccel.modules.cache import WindowCache
from dsaccel.modules.rotary import RotaryEmbedding


def _xavier(linears: Iterable[nn.Linear]) -> None:
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


class GeluMLP(nn.Module):
    """``fc2(gelu(fc1(x)))``.

    Args:
        dim: components ``C`` of a token.
        hidden_dim: components in between. Default: ``4 * dim``.
        bias: whether the projections have a bias. Default: True.

    Source: Vaswani et al., 2017, equation 2, with the activation of Hendrycks and Gimpel, "GELUs", 2016.
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)
        _xavier((self.fc1, self.fc2))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., C]`` to ``[..., C]``."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``.

    Args:
        dim: components ``C`` of a token.
        hidden_dim: components in between. Default: ``8/3 * dim`` rounded up to a multiple of 32, which gives about as
            many parameters as a `GeluMLP` of its default size.
        bias: whether the projections have a bias. Default: False.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        hidden_dim = -(-8 * dim // 96) * 32 if hidden_dim is None else hidden_dim
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=bias)
        _xavier((self.gate_proj, self.up_proj, self.down_proj))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., C]`` to ``[..., C]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


MLPS = {"swiglu": SwiGLU, "gelu": GeluMLP}


class TransformerBlock(nn.Module):
    """``x = x + attn(norm1(x)); x = x + mlp(norm2(x))`` with RMS norms.

    Args:
        dim: components ``C`` of a token.
        num_heads: query heads.
        num_kv_heads: key and value heads. Default: ``num_heads``.
        window: ``(left, right)`` as in `WindowAttention`. Default: everything.
        rope: rotary positions. Default: none.
        mlp: ``"swiglu"`` or ``"gelu"``. Default: ``"swiglu"``.
        hidden_dim: components inside the MLP. Default: that of `SwiGLU` or `GeluMLP`.
        bias: whether the linear layers have a bias. Default: False.
        eps: of the norms. Default: 1e-6.

    Raises:
        ValueError: ``mlp`` is neither of the two, or as `WindowAttention`.

    Sources: Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020, table 1 (pre-norm); Zhang
    and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        window: tuple[int | None, int | None] = (None, None),
        rope: RotaryEmbedding | None = None,
        *,
        mlp: str = "swiglu",
        hidden_dim: int | None = None,
        bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if mlp not in MLPS:
            raise ValueError(f"mlp: expected one of {', '.join(MLPS)}, got {mlp!r}")
        self.norm1 = nn.RMSNorm(dim, eps=eps)
        self.attn = WindowAttention(dim, num_heads, num_kv_heads, window, rope, qkv_bias=bias, proj_bias=bias)
        self.norm2 = nn.RMSNorm(dim, eps=eps)
        self.mlp: nn.Module = MLPS[mlp](dim, hidden_dim, bias=bias)

    def forward(self, x: Tensor, cache: WindowCache | None = None) -> Tensor:
        """Maps ``[B, N, C]`` to ``[B, N, C]``; ``cache`` as in `WindowAttention`."""
        x = x + self.attn(self.norm1(x), cache)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out
