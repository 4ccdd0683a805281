"""Swin attention as eager models write it: a copy of all windows, a product, a mask, a softmax and a copy back.

The steps are those of torchvision's ``shifted_window_attention`` between its two projections, from the tensor that the
first has produced to the one that the second takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.ops.swin_attention import SwinProblem

_MASKED = -100.0


def eager_attention(problem: SwinProblem, mask: Tensor | None = None) -> Callable[..., Tensor]:
    """A function of the tensors of a problem's inputs; it makes the mask of a shift each time, unless it is given."""

    def attend(qkv: Tensor, bias: Tensor, logit_scale: Tensor | None = None) -> Tensor:
        q, k, v = partition(qkv, problem)
        if logit_scale is None:
            scores = (q * problem.head_dim**-0.5) @ k.transpose(-2, -1)
        else:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * logit_scale.view(-1, 1, 1)
        scores = scores + bias
        if problem.shift:
            regions = region_mask(problem, qkv) if mask is None else mask
            of_images = scores.view(-1, problem.windows, *scores.shape[1:])
            scores = (of_images + regions[:, None]).view_as(scores)
        return merge(F.softmax(scores, -1) @ v, problem)

    return attend


def partition(qkv: Tensor, problem: SwinProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Rolls the image and copies it into windows: q, k and v, each ``[B * windows, heads, N, D]``."""
    window = problem.window
    if problem.shift:
        qkv = torch.roll(qkv, (-problem.shift, -problem.shift), (1, 2))
    grid = qkv.unflatten(2, (-1, window)).unflatten(1, (-1, window))
    windows = grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, problem.tokens, 3, problem.heads, problem.head_dim)
    q, k, v = windows.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def merge(out: Tensor, problem: SwinProblem) -> Tensor:
    """Copies windows ``[B * windows, heads, N, D]`` back into an image ``[B, H, W, C]``, and rolls it back."""
    window, rows = problem.window, problem.height // problem.window
    windows = out.transpose(1, 2).reshape(-1, rows, problem.windows // rows, window, window, problem.channels)
    image = windows.permute(0, 1, 3, 2, 4, 5).reshape(-1, problem.height, problem.width, problem.channels)
    return torch.roll(image, (problem.shift, problem.shift), (1, 2)) if problem.shift else image


def region_mask(problem: SwinProblem, like: Tensor, masked: float = _MASKED) -> Tensor:
    """``[windows, N, N]``: 0 for tokens of one region of the rolled image, ``masked`` for others.

    With -100 the weights of others are denormal numbers, on which CPUs are slow; with -inf they are 0.
    """
    window, shift = problem.window, problem.shift
    numbers = like.new_zeros((problem.height, problem.width))
    parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for row, rows in enumerate(parts):
        for column, columns in enumerate(parts):
            numbers[rows, columns] = 3 * row + column
    grid = numbers.view(problem.height // window, window, problem.width // window, window)
    tokens = grid.permute(0, 2, 1, 3).reshape(problem.windows, problem.tokens)
    difference = tokens[:, None] - tokens[:, :, None]
    return difference.masked_fill(difference != 0, masked).masked_fill(difference == 0, 0.0)
