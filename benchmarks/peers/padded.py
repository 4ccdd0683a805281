"""Our own `dskernels.window_attention` over the padded batch: what packing alone brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

import dskernels as dk
from benchmarks.case import Competitor, Prepared
from benchmarks.peers._padding import Padding

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs
    from benchmarks.ops.window_attention_varlen import VarlenProblem


def _prepare(problem: VarlenProblem, inputs: Inputs) -> Prepared:
    padding = Padding(problem.lengths)
    padded = padding.pad(inputs)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dk.window_attention(q, k, v, window=problem.window, rope=padded.rope)

    return Prepared(padded.step(attend), padding.notes, padding.unpad)


COMPETITORS = {
    "window_attention_varlen": Competitor(
        name="padded", title="padded, dskernels", refuses=lambda problem: None, prepare=_prepare
    )
}
