"""A block of Swin, in the arrangements of its two versions."""

from __future__ import annotations

from torch import Tensor, nn

from dsaccel.modules._sizes import Pair, check_heads, check_probability, checked_pair
from dsaccel.modules.block import GeluMLP
from dsaccel.modules.swin_attention import SwinAttention
from dsaccel.modules.swin_bias import ContinuousPositionBias, RelativePositionBias
from dsaccel.modules.swin_rope import AxialRope2d, MixedRope2d
from dskernels.checks import is_number, wrong_type, wrong_value

POSITIONS = ("bias", "axial", "mixed", "bias+axial", "bias+mixed")


class StochasticDepth(nn.Module):
    """In training, sets whole samples to 0 with probability ``p`` and scales the others by ``1 / (1 - p)``.

    Args:
        p: from 0 to below 1.

    Raises:
        TypeError, ValueError: ``p`` is no such number.

    Source: Huang et al., "Deep Networks with Stochastic Depth", 2016, equation 3, for each sample on its own.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        check_probability("p", p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, ...]`` to the same shape."""
        if not self.training or self.p == 0:
            return x
        kept = x.new_empty((x.shape[0], *(1,) * (x.dim() - 1))).bernoulli_(1 - self.p)
        return x * (kept / (1 - self.p))

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"p={self.p}"


class SwinBlock(nn.Module):
    """Attention inside windows and an MLP, each added to what comes in.

    Version 1 normalizes before, version 2 after them, and attends by cosines::

        x = x + attn(norm1(x));  x = x + mlp(norm2(x))        (1)
        x = x + norm1(attn(x));  x = x + norm2(mlp(x))        (2)

    Args:
        dim: components ``C`` of a token.
        num_heads: heads.
        window_size: ``w``, or ``(h, w)``.
        shift: of the grid of windows, as in `SwinAttention`. Default: 0.
        version: 1 or 2. Default: 1.
        position: how a token knows its place in the window. ``"bias"``: by a `RelativePositionBias` (version 1) or a
            `ContinuousPositionBias` (version 2); ``"axial"``: by an `AxialRope2d`; ``"mixed"``: by a `MixedRope2d`;
            ``"bias+axial"``, ``"bias+mixed"``: by both. Default: ``"bias"``.
        mlp_ratio: hidden components of the MLP over ``C``. Default: 4.
        stochastic_depth: probability that a sample skips the attention, and that it skips the MLP, in training.
            Default: 0.
        padding: as in `SwinAttention`. Default: ``"mask"``.
        qkv_bias: as in `SwinAttention`. Default: True.
        pretrained_window_size: as in `ContinuousPositionBias`. Default: ``window_size``.
        eps: of the norms. Default: 1e-5.

    Raises:
        TypeError, ValueError: an argument is none of these, or as `SwinAttention`.

    The weights start from a normal distribution of standard deviation 0.02, the biases from 0, the norms from 1 and 0,
    in both versions, as in torchvision. (The authors' code of version 2 starts the norms from 0, so that each block is
    the identity: ``nn.init.zeros_(block.norm1.weight)``, and ``norm2``.)

    Sources: Liu et al., "Swin Transformer", 2021, equation 3; Liu et al., "Swin Transformer V2", 2022, figure 1.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: Pair,
        *,
        shift: Pair = 0,
        version: int = 1,
        position: str = "bias",
        mlp_ratio: float = 4.0,
        stochastic_depth: float = 0.0,
        padding: str = "mask",
        qkv_bias: bool = True,
        pretrained_window_size: Pair | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_version(version)
        check_position(position)
        check_probability("stochastic_depth", stochastic_depth)
        if not is_number(mlp_ratio):
            raise wrong_type("mlp_ratio", "a number", mlp_ratio)
        head_dim, window = check_heads(dim, num_heads), checked_pair("window_size", window_size)
        hidden_dim = int(dim * mlp_ratio)
        if hidden_dim < 1:
            raise wrong_value("mlp_ratio", f"at least 1 / dim = 1 / {dim}", mlp_ratio)
        if pretrained_window_size is not None and not (version == 2 and position.startswith("bias")):
            expected = "None unless version is 2 with a bias"
            raise wrong_value("pretrained_window_size", expected, pretrained_window_size)
        bias: RelativePositionBias | ContinuousPositionBias | None = None
        if position.startswith("bias") and version == 1:
            bias = RelativePositionBias(window, num_heads)
        elif position.startswith("bias"):
            bias = ContinuousPositionBias(window, num_heads, pretrained_window_size=pretrained_window_size)
        rope: AxialRope2d | MixedRope2d | None = None
        if position.endswith("axial"):
            rope = AxialRope2d(head_dim, window)
        elif position.endswith("mixed"):
            rope = MixedRope2d(head_dim, window, num_heads)
        self.version = version
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = SwinAttention(
            dim,
            num_heads,
            window,
            shift=shift,
            bias=bias,
            rope=rope,
            cosine=version == 2,
            qkv_bias=qkv_bias,
            padding=padding,
        )
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = GeluMLP(dim, hidden_dim)
        self.stochastic_depth = StochasticDepth(stochastic_depth)
        for linear in (self.mlp.fc1, self.mlp.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, H, W, C]`` to ``[B, H, W, C]``, for any H and W."""
        if self.version == 1:
            x = x + self.stochastic_depth(self.attn(self.norm1(x)))
            out: Tensor = x + self.stochastic_depth(self.mlp(self.norm2(x)))
        else:
            x = x + self.stochastic_depth(self.norm1(self.attn(x)))
            out = x + self.stochastic_depth(self.norm2(self.mlp(x)))
        return out


def check_version(version: int) -> None:
    """Whether ``version`` is one of Swin's."""
    if version not in (1, 2):
        raise wrong_value("version", "1 or 2", repr(version))


def check_position(position: str) -> None:
    """Whether ``position`` is one of `POSITIONS`."""
    if position not in POSITIONS:
        raise wrong_value("position", f"one of {', '.join(POSITIONS)}", repr(position))
