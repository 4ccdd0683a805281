"""Rotary embedding and ``F.scaled_dot_product_attention(is_causal=True)``: for windows of the whole length only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._rope import rotation

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs, WindowProblem


def _refuses(problem: WindowProblem) -> str | None:
    return None if problem.seen >= problem.length else "takes no window: the whole triangle is other work"


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    torch._dynamo.reset()
    rotate = torch.compile(rotation(inputs.rope, inputs.q.dtype), fullgraph=True, dynamic=False)
    grouped = problem.heads != problem.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=grouped)

    return Prepared(inputs.step(attend), {"rope": "compiled"})


COMPETITORS = {
    "window_attention": Competitor(
        name="sdpa_causal", title="RoPE + SDPA, causal", refuses=_refuses, prepare=_prepare, devices=("cuda",)
    )
}
