"""Swin attention in torch's own operators, with a mask of -inf that is made once: the quicker way to write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._windows import eager_attention, region_mask

if TYPE_CHECKING:
    from benchmarks.ops.swin_attention import Inputs, SwinProblem


def _refuses(problem: SwinProblem) -> str | None:
    return None if problem.shift else "without a shift there is no mask: the same as eager"


def _prepare(problem: SwinProblem, inputs: Inputs) -> Prepared:
    return Prepared(inputs.step(eager_attention(problem, region_mask(problem, inputs.qkv, -torch.inf))))


COMPETITORS = {
    "swin_attention": Competitor(
        name="eager_inf", title="eager, a kept mask of -inf", refuses=_refuses, prepare=_prepare
    )
}
