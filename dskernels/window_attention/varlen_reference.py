"""Window attention over packed sequences in plain PyTorch: the dense reference, a sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dskernels.window_attention.reference import window_attention_backward_reference, window_attention_reference


class _Sequence(NamedTuple):
    queries: slice
    keys: slice
    query_offset: int


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[_Sequence]:
    for queries, keys in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        yield _Sequence(slice(*queries), slice(*keys), keys[1] - keys[0] - (queries[1] - queries[0]))


def _alone(x: Tensor, tokens: slice) -> Tensor:
    """The tokens of one sequence, ``[1, H, N, D]``."""
    return x[tokens].transpose(0, 1).unsqueeze(0)


def _packed(parts: list[Tensor], length: int) -> Tensor:
    """Results ``[1, H, N, D]`` one after the other as ``[length, H, D]``, zeros at the end."""
    joined = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])
    rest = joined.new_zeros(length - joined.shape[0], *joined.shape[1:])
    return torch.cat((joined, rest)).contiguous()


def window_attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of `dskernels.window_attention_varlen`; differentiable any number of times."""
    # An empty call comes first, so that there is something to join, and to differentiate, without any sequence.
    sequences = [_Sequence(slice(0, 0), slice(0, 0), 0), *_sequences(cu_seqlens_q, cu_seqlens_k)]
    outs, lses = [], []
    for queries, keys, offset in sequences:
        out, lse = window_attention_reference(
            _alone(q, queries),
            _alone(k, keys),
            _alone(v, keys),
            cos=cos,
            sin=sin,
            positions=None,
            bias=None,
            sink=sink,
            left=left,
            right=right,
            query_offset=offset,
            scale=scale,
            softcap=softcap,
            interleaved=interleaved,
        )
        outs.append(out)
        lses.append(lse.squeeze(0))
    lse = torch.cat(lses, 1)
    rest = lse.new_full((lse.shape[0], q.shape[0] - lse.shape[1]), -torch.inf)
    return _packed(outs, q.shape[0]), torch.cat((lse, rest), 1)


def window_attention_varlen_backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sink: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from those of ``out`` and ``lse``."""
    sequences = [_Sequence(slice(0, 0), slice(0, 0), 0), *_sequences(cu_seqlens_q, cu_seqlens_k)]
    parts = []
    for queries, keys, offset in sequences:
        *grads, _ = window_attention_backward_reference(
            _alone(grad_out, queries),
            None if grad_lse is None else grad_lse[:, queries].unsqueeze(0),
            _alone(q, queries),
            _alone(k, keys),
            _alone(v, keys),
            _alone(out, queries),
            lse[:, queries].unsqueeze(0),
            cos=cos,
            sin=sin,
            positions=None,
            bias=None,
            sink=sink,
            left=left,
            right=right,
            query_offset=offset,
            scale=scale,
            softcap=softcap,
            interleaved=interleaved,
            bias_needs_grad=False,
        )
        parts.append(grads)
    grads_q, grads_k, grads_v = (list(x) for x in zip(*parts, strict=True))
    return _packed(grads_q, q.shape[0]), _packed(grads_k, k.shape[0]), _packed(grads_v, k.shape[0])
