"""FlashAttention's own package, with its sliding window, after a rotary embedding by itself."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._token_major import offsets_of, positions_of, prepare, prepare_packed, takes_half_only

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs, WindowProblem
    from benchmarks.ops.window_attention_varlen import VarlenProblem


def _refuses(problem: Any) -> str | None:
    try:
        importlib.import_module("flash_attn")
    except ImportError:
        return "flash_attn is not installed"
    except Exception as error:
        # One built for another torch fails in its own ways.
        return f"flash_attn cannot be imported: {error}"
    return takes_half_only(problem.dtype)


def _function(name: str) -> Any:
    return getattr(importlib.import_module("flash_attn"), name)


def _prepare(problem: WindowProblem, inputs: Inputs) -> Prepared:
    return prepare(inputs, partial(_function("flash_attn_func"), causal=True, window_size=problem.window))


def _prepare_packed(problem: VarlenProblem, inputs: Inputs) -> Prepared:
    offsets, longest = offsets_of(problem.lengths, problem.device), max(problem.lengths)
    function = _function("flash_attn_varlen_func")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = (offsets, offsets, longest, longest)
        out: Tensor = function(q, k, v, *sizes, causal=True, window_size=problem.window)
        return out

    return prepare_packed(inputs, positions_of(problem.lengths, problem.device), attend)


_ABOUT: dict[str, Any] = {"name": "flash_attn", "refuses": _refuses, "devices": ("cuda",)}
COMPETITORS = {
    "window_attention": Competitor(title="RoPE + FlashAttention", prepare=_prepare, **_ABOUT),
    "window_attention_varlen": Competitor(title="RoPE + FlashAttention", prepare=_prepare_packed, **_ABOUT),
}
