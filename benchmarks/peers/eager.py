"""Swin attention in torch's own operators, one after the other, as torchvision's models run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._windows import eager_attention

if TYPE_CHECKING:
    from benchmarks.ops.swin_attention import Inputs, SwinProblem


def _prepare(problem: SwinProblem, inputs: Inputs) -> Prepared:
    return Prepared(inputs.step(eager_attention(problem)))


COMPETITORS = {
    "swin_attention": Competitor(
        name="eager", title="eager: roll, partition, softmax", refuses=lambda problem: None, prepare=_prepare
    )
}
