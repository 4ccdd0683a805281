"""torch's own FlashAttention, ``torch.nn.attention.varlen.varlen_attn``, with its sliding window; RoPE by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._token_major import offsets_of, positions_of, prepare, prepare_packed, takes_half_only

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs, WindowProblem
    from benchmarks.ops.window_attention_varlen import VarlenProblem


def _attention(problem: Any, lengths: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of packed tensors ``[T, H, D]``."""
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    offsets, longest = offsets_of(lengths, problem.device), max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = (offsets, offsets, longest, longest)
        options = {"window_size": problem.window, "enable_gqa": q.shape[1] != k.shape[1]}
        out: Tensor = varlen_attn(q, k, v, *sizes, **options)
        return out

    return attend


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    packed = _attention(problem, [problem.length] * problem.batch)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed(*(x.flatten(0, 1) for x in (q, k, v))).view_as(q)

    return prepare(inputs, attend)


def _prepare_packed(problem: VarlenProblem, inputs: Inputs) -> Prepared:
    positions = positions_of(problem.lengths, problem.device)
    return prepare_packed(inputs, positions, _attention(problem, problem.lengths))


_ABOUT: dict[str, Any] = {"name": "varlen_attn", "devices": ("cuda",)}
_ABOUT["refuses"] = lambda problem: takes_half_only(problem.dtype)
COMPETITORS = {
    "window_attention": Competitor(title="RoPE + torch's varlen_attn", prepare=_prepare, **_ABOUT),
    "window_attention_varlen": Competitor(title="RoPE + torch's varlen_attn", prepare=_prepare_packed, **_ABOUT),
}
