"""Rotary embedding as most eager models write it, for peers that have none of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dskernels import RopeTable


def rotation(rope: RopeTable, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that rotates ``[B, H, N, D]`` with half-split pairs, its tables built and cast beforehand.

    Cosines and sines are in ``dtype``, as in Hugging Face's models: in half precision that costs accuracy, and it is
    the fast way.
    """
    cos, sin = (torch.cat((half, half), -1).to(dtype) for half in (rope.cos, rope.sin))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return rotate
