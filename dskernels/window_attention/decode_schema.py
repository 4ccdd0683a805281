"""The operator ``dskernels::window_attention_decode``.

Definition, default (the reference), shapes for tracing, autocast rule and operation count, as in `schema`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dskernels._autograd import register_autocast, register_gradient
from dskernels._library import LIBRARY, define, empty_in_layout_of
from dskernels.window_attention.batching import fold_into_batch
from dskernels.window_attention.decode_reference import window_attention_decode_reference
from dskernels.window_attention.reference import compute_dtype
from dskernels.window_attention.schema import count_seen_pairs

FORWARD = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_lengths, Tensor? cos, Tensor? sin, Tensor? sink, "
    "SymInt? left, SymInt? right, float scale, float softcap, bool interleaved, bool keys_rotated)"
    " -> (Tensor out, Tensor lse)"
)

decode_op = define("window_attention_decode", FORWARD)

LIBRARY.impl("window_attention_decode", window_attention_decode_reference, "CompositeExplicitAutograd")


@torch.library.register_fake(decode_op, lib=LIBRARY)
def forward_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return empty_in_layout_of(q, (*q.shape[:3], v_cache.shape[3])), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


def no_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
    raise NotImplementedError(
        "window_attention_decode: a cache has no gradient; window_attention over the whole sequence has, and so has "
        'backend="reference"'
    )


register_gradient(decode_op, no_backward, vmap=fold_into_batch, autocasts=1, lib=LIBRARY)


register_autocast(decode_op, 1, LIBRARY)


@register_flop_formula(torch.ops.dskernels.window_attention_decode, get_raw=True)
def forward_flop(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lengths: Tensor, *options: Any, **_: Any) -> int:
    """Operations of a call; the Triton operator shares it."""
    _cos, _sin, _sink, left, right, *_rest = options
    # Lengths that are no numbers yet are taken to fill the cache.
    unknown = isinstance(cache_lengths, FakeTensor) or cache_lengths.is_meta
    pairs = 0
    for length in [k_cache.shape[2]] * q.shape[0] if unknown else cache_lengths.tolist():
        queries = min(q.shape[2], length)
        pairs += count_seen_pairs(queries, length, left, right, length - queries)
    return 2 * q.shape[1] * pairs * (q.shape[3] + v_cache.shape[3])
