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
    from benchmarks.ops import window_attention_decode as decode
    from benchmarks.ops.window_attention import Inputs, WindowProblem
    from benchmarks.ops.window_attention_decode import DecodeProblem

# Which one is fastest on a CPU depends on the window, the dtype and the vector width, so each case tries them. A GPU's
# kernels choose their tiles within blocks, whose default is 128, and take long to compile.
_BLOCK_SIZES = {"cpu": (32, 64, 128), "cuda": (128,)}

_Run = Callable[[], Sequence[Tensor]]


def _refuses(problem: WindowProblem) -> str | None:
    if problem.backward and problem.device == "cpu":
        return "FlexAttention has no backward on the CPU (it raises)"
    return None


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    # Every case compiles anew; what earlier ones left behind would count against Dynamo's limit of recompilations.
    torch._dynamo.reset()
    # A block wider than the window is mostly masked.
    known = _BLOCK_SIZES[problem.device]
    sizes = [size for size in known if size <= problem.seen] or [known[0]]
    runs = {size: _compiled(problem, inputs, size) for size in sizes}
    best = fastest(runs)
    return Prepared(runs[best], {"block_size": best, "block_sizes_tried": sizes})


def _compiled(problem: WindowProblem, inputs: Inputs, block_size: int) -> _Run:
    seen, length = problem.seen, problem.length

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < seen)

    block_mask = create_block_mask(visible, None, None, length, length, device=problem.device, BLOCK_SIZE=block_size)
    rotate = rotation(inputs.rope, inputs.q.dtype)
    grouped = problem.heads != problem.key_heads

    @torch.compile(fullgraph=True, dynamic=False)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(rotate(q), rotate(k), v, block_mask=block_mask, enable_gqa=grouped)

    return inputs.step(attend)


def _prepare_decode(problem: DecodeProblem, inputs: decode.Inputs) -> Prepared:
    torch._dynamo.reset()
    rotate = rotation(inputs.last_rows(), inputs.q.dtype)
    grouped = problem.heads != problem.key_heads

    @torch.compile(fullgraph=True, dynamic=False)
    def attend(k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(rotate(inputs.q), k, v, enable_gqa=grouped)

    return Prepared(inputs.step(attend))


_TITLE = "RoPE + FlexAttention, compiled"
COMPETITORS = {
    "window_attention": Competitor(name="flex", title=_TITLE, refuses=_refuses, prepare=_prepare),
    "window_attention_decode": Competitor(
        name="flex", title=_TITLE, refuses=lambda problem: None, prepare=_prepare_decode, devices=("cuda",)
    ),
}
