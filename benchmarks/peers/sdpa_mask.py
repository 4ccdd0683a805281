"""Eager rotary embedding and ``F.scaled_dot_product_attention`` with a dense boolean mask: what most models do.

Packed sequences are padded for it. One mask of the longest sequence serves them all: with the padding at the end, a
causal window keeps it from every token that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._padding import Padding
from benchmarks.peers._rope import rotation

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs, WindowProblem
    from benchmarks.ops.window_attention_varlen import VarlenProblem

_MASK = {"mask": "boolean, dense"}


def _attention(inputs: Inputs, seen: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    position = torch.arange(inputs.q.shape[2], device=inputs.q.device)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < seen)
    rotate = rotation(inputs.rope, inputs.q.dtype)
    group = inputs.q.shape[1] // inputs.k.shape[1]
    grouped = group > 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if grouped and q.is_cuda:
            # The only kernel that takes both a mask and groups there is the one that writes all scores to memory.
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask)
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask, enable_gqa=grouped)

    return attend


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    return Prepared(inputs.step(_attention(inputs, problem.seen)), _MASK)


def _prepare_padded(problem: VarlenProblem, inputs: Inputs) -> Prepared:
    padding = Padding(problem.lengths)
    padded = padding.pad(inputs)
    return Prepared(padded.step(_attention(padded, problem.seen)), {**_MASK, **padding.notes}, padding.unpad)


COMPETITORS = {
    "window_attention": Competitor(
        name="sdpa_mask", title="RoPE + SDPA with mask", refuses=lambda problem: None, prepare=_prepare
    ),
    "window_attention_varlen": Competitor(
        name="sdpa_mask", title="padded, RoPE + SDPA with mask", refuses=lambda problem: None, prepare=_prepare_padded
    ),
}
