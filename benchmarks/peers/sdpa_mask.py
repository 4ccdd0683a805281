"""Eager rotary embedding and ``F.scaled_dot_product_attention`` with a dense boolean mask: what most models do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._rope import rotation

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs, WindowProblem


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    position = torch.arange(problem.length)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < problem.seen)
    rotate = rotation(inputs.rope, inputs.q.dtype)
    grouped = problem.heads != problem.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask, enable_gqa=grouped)

    return Prepared(inputs.step(attend), {"mask": "boolean, dense"})


COMPETITORS = {
    "window_attention": Competitor(
        name="sdpa_mask", title="RoPE + SDPA with mask", refuses=lambda problem: None, prepare=_prepare
    )
}
