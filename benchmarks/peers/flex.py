"""Rotary embedding and FlexAttention, compiled together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._rope import rotation
from benchmarks.peers._trials import fastest

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs, WindowProblem

# Which one is fastest depends on the window, the dtype and the vector width, so each case tries them.
_BLOCK_SIZES = (32, 64, 128)

_Run = Callable[[], Sequence[Tensor]]


def _refuses(problem: WindowProblem) -> str | None:
    return "FlexAttention has no backward on the CPU (it raises)" if problem.backward else None


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    # Every case compiles anew; what earlier ones left behind would count against Dynamo's limit of recompilations.
    torch._dynamo.reset()
    # A block wider than the window is mostly masked.
    sizes = [size for size in _BLOCK_SIZES if size <= problem.seen] or [_BLOCK_SIZES[0]]
    runs = {size: _compiled(problem, inputs, size) for size in sizes}
    best = fastest(runs)
    return Prepared(runs[best], {"block_size": best, "block_sizes_tried": sizes})


def _compiled(problem: WindowProblem, inputs: Inputs, block_size: int) -> _Run:
    seen, length = problem.seen, problem.length

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < seen)

    block_mask = create_block_mask(visible, None, None, length, length, device="cpu", BLOCK_SIZE=block_size)
    rotate = rotation(inputs.rope, inputs.q.dtype)
    grouped = problem.heads != problem.key_heads

    @torch.compile(fullgraph=True, dynamic=False)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(rotate(q), rotate(k), v, block_mask=block_mask, enable_gqa=grouped)

    return inputs.step(attend)


COMPETITORS = {
    "window_attention": Competitor(
        name="flex", title="RoPE + FlexAttention, compiled", refuses=_refuses, prepare=_prepare
    )
}
