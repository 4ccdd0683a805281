"""The same step of the fused optimizer with gradients as they come: what a step takes without any clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.case import Competitor, Prepared, Results

if TYPE_CHECKING:
    from benchmarks.ops.clip_and_scale_step import Loop, StepProblem


def _prepare(problem: StepProblem, inputs: Any) -> Prepared:
    loop: Loop = inputs.loop()

    def run() -> Results:
        # Scaled as for the others: AdamW takes about the same step whatever the scale.
        loop.backward(lambda loss: loss * loop.loss_scale)
        loop.optimizer.step()
        return []

    def comparable(results: Results) -> Results:
        # What clipping would have made of it.
        grads = [parameter.grad for parameter in loop.parameters if parameter.grad is not None]
        norm, moments = loop.comparable([torch.nn.utils.get_total_norm(grads) / loop.loss_scale])
        return [norm, moments * (loop.max_norm() / (norm + 1e-6)).clamp(max=1.0) / loop.loss_scale]

    return Prepared(run, {}, comparable)


COMPETITORS = {
    "clip_and_scale_step": Competitor(
        name="unclipped", title="no unscaling, no clipping", refuses=lambda problem: None, prepare=_prepare
    )
}
