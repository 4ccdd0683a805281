"""Multi-head attention inside the windows of an image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules._sizes import Pair, check_heads, checked_pair
from dsaccel.modules.swin_bias import ContinuousPositionBias, RelativePositionBias
from dsaccel.modules.swin_rope import AxialRope2d, MixedRope2d
from dskernels import swin_attention
from dskernels.checks import shape_of, wrong_type, wrong_value

PADDINGS = ("mask", "attend")

# Where the learned factor of cosine attention starts, and what it may not exceed.
_FIRST_LOGIT_SCALE = 10.0
_LARGEST_LOGIT_SCALE = 100.0


class QKVLinear(nn.Linear):
    """The projection to queries, keys and values of SwinV2: its bias is 0 for the keys, whatever the parameter says.

    In cosine attention a bias of the keys would not cancel in the softmax. Weight and bias have the names and shapes of
    those of an ``nn.Linear``, so that both versions of Swin have one layout; the keys' part of the bias gets a zero
    gradient.
    """

    def token_bias(self) -> Tensor | None:
        """What the projection gives for a token of zeros: ``[3 * C]``, or None without a bias."""
        if self.bias is None:
            return None
        of_queries, of_keys, of_values = self.bias.chunk(3)
        return torch.cat((of_queries, torch.zeros_like(of_keys), of_values))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., C]`` to ``[..., 3 * C]``."""
        return F.linear(x, self.weight, self.token_bias())


class SwinAttention(nn.Module):
    """Multi-head attention of each token over the tokens of its window, in one pass.

    ``proj(swin_attention(qkv(x)))`` with `dskernels.swin_attention`: nothing is rolled, cut into windows or put back
    together, and there is no mask. The module keeps nothing between calls: images of any size can follow each other.

    Args:
        dim: components ``C`` of a token.
        num_heads: heads.
        window_size: ``w``, or ``(h, w)``.
        shift: of the grid of windows, one for both axes or ``(rows, columns)``, below ``window_size``. On an axis that
            has a single window nothing is shifted. Default: 0.
        bias: `RelativePositionBias` or `ContinuousPositionBias` for this window and these heads. Default: none.
        rope: `AxialRope2d` or `MixedRope2d` for this window and these heads. Default: none.
        cosine: SwinV2's attention: queries and keys are normalized, the scores scaled by ``exp(min(logit_scale, log
            100))``, and the keys have no bias. Default: False, scores are scaled by ``(C / num_heads) ** -0.5``.
        qkv_bias: whether ``qkv`` has a bias. Default: True.
        padding: of images that are no multiple of the window: ``"mask"``, there is nothing to attend beyond the border;
            or ``"attend"``, the image is filled up with tokens of zeros, which take part, as in the models of
            torchvision. Default: ``"mask"``.

    Attributes:
        qkv: ``nn.Linear(C, 3 * C)``; with ``cosine`` one that leaves out the bias of the keys. Its outputs are the
            queries of all heads, the keys, the values.
        proj: ``nn.Linear(C, C)``.
        logit_scale: with ``cosine``, a parameter ``[num_heads]``, which starts from ``log 10``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: sizes do not fit each other.

    There is no dropout of attention weights: no weight is ever written to memory. The weights start from a normal
    distribution of standard deviation 0.02, the biases from 0.

    Sources: Liu et al., "Swin Transformer", 2021, section 3.2; Liu et al., "Swin Transformer V2", 2022, equation 2.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: Pair,
        *,
        shift: Pair = 0,
        bias: RelativePositionBias | ContinuousPositionBias | None = None,
        rope: AxialRope2d | MixedRope2d | None = None,
        cosine: bool = False,
        qkv_bias: bool = True,
        padding: str = "mask",
    ) -> None:
        super().__init__()
        head_dim = check_heads(dim, num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.window_size = checked_pair("window_size", window_size)
        self.shift = checked_pair("shift", shift, least=0)
        if self.shift[0] >= self.window_size[0] or self.shift[1] >= self.window_size[1]:
            raise wrong_value("shift", f"below window_size = {self.window_size}", shift)
        if padding not in PADDINGS:
            raise wrong_value("padding", "'mask' or 'attend'", repr(padding))
        self.padding = padding
        if bias is not None and not isinstance(bias, (RelativePositionBias, ContinuousPositionBias)):
            raise wrong_type("bias", "a RelativePositionBias, a ContinuousPositionBias or None", bias)
        if rope is not None and not isinstance(rope, (AxialRope2d, MixedRope2d)):
            raise wrong_type("rope", "an AxialRope2d, a MixedRope2d or None", rope)
        wanted = {"window_size": self.window_size, "num_heads": num_heads, "head_dim": head_dim}
        for name, module in (("bias", bias), ("rope", rope)):
            for attribute, value in wanted.items():
                found = getattr(module, attribute, value)
                if found != value:
                    raise wrong_value(name, f"one for {attribute} = {value}", found)
        self.bias = bias
        self.rope = rope
        linear = QKVLinear if cosine else nn.Linear
        self.qkv = linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.empty(num_heads)) if cosine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights of the projections, sets their biases to 0, and ``logit_scale`` to where it starts."""
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(_FIRST_LOGIT_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the tokens of each window.

        Args:
            x: shape ``[B, H, W, C]``, in the dtype of the weights; any H and W.

        Returns:
            Shape and dtype of ``x``.

        Raises:
            ValueError: ``x`` has another shape.
        """
        if x.dim() != 4 or x.shape[3] != self.dim:
            raise wrong_value("x", f"shape [B, H, W, {self.dim}]", f"shape {shape_of(x)}")
        sizes = zip(x.shape[1:3], self.window_size, self.shift, strict=True)
        shift_height, shift_width = (0 if size <= window else shift for size, window, shift in sizes)
        shift = (shift_height, shift_width)
        qkv = self.qkv(x)
        pad_qkv = self._padded_token() if self.padding == "attend" else None
        rope = None
        if isinstance(self.rope, MixedRope2d) and self.rope.learns:
            if self.padding == "attend":
                qkv = _filled_up(qkv, self.window_size, pad_qkv)
            qkv = self.rope(qkv, shift=shift)
        elif self.rope is not None:
            rope = self.rope.table()
        attended = swin_attention(
            qkv,
            window_size=self.window_size,
            shift=shift,
            num_heads=self.num_heads,
            bias=None if self.bias is None else self.bias(),
            rope=rope,
            logit_scale=self._factor(),
            padding=self.padding,
            pad_qkv=pad_qkv,
        )
        out: Tensor = self.proj(attended[:, : x.shape[1], : x.shape[2]])
        return out

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        said = f"{self.dim}, num_heads={self.num_heads}, window_size={self.window_size}, shift={self.shift}"
        return said + f", cosine={self.logit_scale is not None}, padding={self.padding!r}"

    def _padded_token(self) -> Tensor | None:
        # The image is filled up with zeros before the projection, which makes its bias of them.
        if isinstance(self.qkv, QKVLinear):
            return self.qkv.token_bias()
        bias: Tensor | None = self.qkv.bias
        return bias

    def _factor(self) -> Tensor | None:
        if self.logit_scale is None:
            return None
        return self.logit_scale.clamp(max=math.log(_LARGEST_LOGIT_SCALE)).exp()


def _filled_up(qkv: Tensor, window: tuple[int, int], token: Tensor | None) -> Tensor:
    """``qkv`` with tokens at the bottom and the right, so that it is a multiple of the window."""
    bottom, right = -qkv.shape[1] % window[0], -qkv.shape[2] % window[1]
    filled = F.pad(qkv, (0, 0, 0, right, 0, bottom))
    if token is None:
        return filled
    inside = qkv.new_ones(qkv.shape[1:3], dtype=torch.bool)
    inside = F.pad(inside, (0, right, 0, bottom)).unsqueeze(-1)
    return torch.where(inside, filled, token.to(qkv.dtype))
