"""Eager rotary embedding of the query and ``F.scaled_dot_product_attention`` over a cache that is seen whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._rope import rotation
from benchmarks.peers._trials import fastest
from dskernels import RopeTable

if TYPE_CHECKING:
    from benchmarks.ops.window_attention_decode import DecodeProblem, Inputs


def _prepare(problem: DecodeProblem, inputs: Inputs) -> Prepared:
    # Rotation happened when keys were stored, and the order of slots does not matter to a softmax: no mask is needed.
    last = inputs.cache_lengths - 1
    # Each sequence has a row of its own, for all of its heads.
    rows = RopeTable(inputs.rope.cos[last][:, None, None], inputs.rope.sin[last][:, None, None])
    rotate = rotation(rows, inputs.q.dtype)
    grouped = problem.heads != problem.key_heads

    def by_heads(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rotate(inputs.q), k, v, enable_gqa=grouped)

    def by_queries(k: Tensor, v: Tensor) -> Tensor:
        # The query heads that share a key head, as so many queries of it.
        shared = rotate(inputs.q).view(problem.batch, problem.key_heads, -1, problem.head_dim)
        return F.scaled_dot_product_attention(shared, k, v).view_as(inputs.q)

    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"enable_gqa": by_heads, "group as queries": by_queries}
    runs = {name: inputs.step(attend) for name, attend in forms.items()}
    if not grouped:
        return Prepared(runs["enable_gqa"])
    best = fastest(runs)
    return Prepared(runs[best], {"form": best, "forms_tried": list(runs)})


COMPETITORS = {
    "window_attention_decode": Competitor(
        name="sdpa", title="RoPE + SDPA over the whole cache", refuses=lambda problem: None, prepare=_prepare
    )
}
