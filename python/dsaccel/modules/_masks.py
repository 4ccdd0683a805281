"""Masks of attention as biases."""

from __future__ import annotations

import torch
from torch import Tensor


def hiding_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where ``hidden`` (bool) is true, else 0: the ``bias`` of `dskernels.window_attention` that hides these keys.

    It has the dtype of scores, to which the op would bring it anyway: float64 if ``dtype``, that of the queries, is
    that, else float32.
    """
    scores = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.zeros_like(hidden, dtype=scores).masked_fill_(hidden, -torch.inf)
