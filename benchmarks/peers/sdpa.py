"""``F.scaled_dot_product_attention`` over all there is: a cache after eager rotation of the query, or Swin's windows.

Windows are partitioned and merged as by hand, and the bias and the mask of a shift are one ``attn_mask``, as in timm's
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._rope import rotation
from benchmarks.peers._trials import fastest
from benchmarks.peers._windows import merge, partition, region_mask

if TYPE_CHECKING:
    from benchmarks.ops import swin_attention
    from benchmarks.ops.window_attention_decode import DecodeProblem, Inputs


def _prepare(problem: DecodeProblem, inputs: Inputs) -> Prepared:
    # Rotation happened when keys were stored, and the order of slots does not matter to a softmax: no mask is needed.
    rotate = rotation(inputs.last_rows(), inputs.q.dtype)
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


def _prepare_windows(problem: swin_attention.SwinProblem, inputs: swin_attention.Inputs) -> Prepared:
    # A buffer of the model; the bias is a parameter and joins it in every call.
    mask = region_mask(problem, inputs.qkv)[:, None] if problem.shift else None

    def attend(qkv: Tensor, bias: Tensor, logit_scale: Tensor | None = None) -> Tensor:
        q, k, v = partition(qkv, problem)
        scale = problem.head_dim**-0.5
        if logit_scale is not None:
            q, k, scale = F.normalize(q, dim=-1) * logit_scale.view(-1, 1, 1), F.normalize(k, dim=-1), 1.0
        added = bias[None] if mask is None else (bias + mask).repeat(problem.batch, 1, 1, 1)
        return merge(F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale), problem)

    return Prepared(inputs.step(attend), {"mask": "bias and regions, dense"})


COMPETITORS = {
    "window_attention_decode": Competitor(
        name="sdpa", title="RoPE + SDPA over the whole cache", refuses=lambda problem: None, prepare=_prepare
    ),
    "swin_attention": Competitor(
        name="sdpa", title="partition + SDPA", refuses=lambda problem: None, prepare=_prepare_windows
    ),
}
