"""The attention of Swin as it is usually written, to compare with: rolled, cut into windows, masked, put together."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules import SwinAttention, SwinBlock
from dskernels.checks import wrong_value

# Of tokens that the image was filled up with; those of the image have 0 to 3.
_PADDING = 4


class EagerSwinAttention(nn.Module):
    """What a `SwinAttention` of version 1 computes, in the steps of the papers' code.

    Pad, roll, cut into windows, project, ``softmax(q k^T * scale + bias + mask) v``, project, put together, roll back,
    crop. The masks are kept, one for each size of image, as timm keeps its one.

    Args:
        attention: whose parameters this uses, and shares.

    Raises:
        ValueError: ``attention`` attends by cosines, has rotary positions or no bias, or lets padding take part.

    Source: Liu et al., "Swin Transformer", 2021, section 3.2 and figure 4.
    """

    def __init__(self, attention: SwinAttention) -> None:
        super().__init__()
        if attention.logit_scale is not None or attention.rope is not None or attention.bias is None:
            raise wrong_value("attention", "dot products with a bias and nothing else", attention)
        if attention.padding != "mask":
            raise wrong_value("attention", "padding = 'mask'", repr(attention.padding))
        self.num_heads, self.window_size, self.shift = attention.num_heads, attention.window_size, attention.shift
        self.bias, self.qkv, self.proj = attention.bias, attention.qkv, attention.proj
        self._masks: dict[Sequence[object], Tensor | None] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, H, W, C]`` to the same shape."""
        batch, height, width, dim = x.shape
        window = self.window_size
        axes = zip((height, width), window, self.shift, strict=True)
        shift_y, shift_x = (0 if size <= extent else shift for size, extent, shift in axes)
        bottom, right = -height % window[0], -width % window[1]
        mask = self._mask(x, (shift_y, shift_x), (bottom, right))
        if bottom or right:
            x = F.pad(x, (0, 0, 0, right, 0, bottom))
        padded = x.shape[1:3]
        if shift_y or shift_x:
            x = x.roll((-shift_y, -shift_x), (1, 2))
        qkv = self.qkv(_cut(x, window)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q * (dim // self.num_heads) ** -0.5) @ k.mT + self.bias()
        if mask is not None:
            scores = (scores.unflatten(0, (batch, -1)) + mask).flatten(0, 1)
        out = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        out = _joined(out, window, padded)
        if shift_y or shift_x:
            out = out.roll((shift_y, shift_x), (1, 2))
        return out[:, :height, :width]

    def _mask(self, x: Tensor, shift: tuple[int, int], padding: tuple[int, int]) -> Tensor | None:
        # [windows, 1, N, N]: 0, and -inf between tokens that the roll or the padding brought together.
        key = (*x.shape[1:3], x.device, x.dtype)
        if key not in self._masks:
            below, beside = (torch.arange(n, device=x.device) < by for n, by in zip(x.shape[1:3], shift, strict=True))
            # Whoever is rolled across a border shares windows with tokens of the opposite one.
            regions = 2 * below.long()[:, None] + beside.long()
            regions = F.pad(regions, (0, padding[1], 0, padding[0]), value=_PADDING)
            regions = regions.roll((-shift[0], -shift[1]), (0, 1))
            regions = _cut(regions[None, :, :, None], self.window_size)
            apart = (regions != regions.mT).unsqueeze(1)
            mask = x.new_zeros(apart.shape).masked_fill(apart, -torch.inf)
            self._masks[key] = mask if apart.any() else None
        return self._masks[key]


def with_eager_attention(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in which every `SwinBlock` attends by an `EagerSwinAttention`."""
    model = copy.deepcopy(model)
    for block in [module for module in model.modules() if isinstance(module, SwinBlock)]:
        block.attn = EagerSwinAttention(block.attn)  # type: ignore[assignment]
    return model


def _cut(x: Tensor, window: tuple[int, int]) -> Tensor:
    """``[B, H, W, C]`` as ``[B * windows, N, C]``."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _joined(x: Tensor, window: tuple[int, int], size: Sequence[int]) -> Tensor:
    """The inverse of `_cut`, for images of ``size``."""
    x = x.unflatten(1, window).unflatten(0, (-1, size[0] // window[0], size[1] // window[1]))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
