"""What the tests of window_attention_varlen share: the cases, and each sequence computed by itself."""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from window_attention_oracle import Options, Rope, exact, plain

import dskernels as dk

NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v", "grad of sink")


class Case(NamedTuple):
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    key_heads: int = 2
    dim: int = 24
    value_dim: int = 16
    window: tuple[int | None, int | None] = (9, 3)
    rope: Rope | None = None
    softcap: float | None = None
    rest: tuple[int, int] = (0, 0)  # tokens past the last offset

    @property
    def options(self) -> Options:
        return Options(window=self.window, rope=self.rope, softcap=self.softcap)

    @property
    def bounds(self) -> list[tuple[slice, slice]]:
        spans = (pairwise(accumulate(lengths, initial=0)) for lengths in (self.queries, self.keys))
        return [(slice(*q), slice(*k)) for q, k in zip(*spans, strict=True)]

    def offsets(self, dtype: torch.dtype = torch.int64) -> list[Tensor]:
        return [torch.tensor(list(accumulate(x, initial=0)), dtype=dtype) for x in (self.queries, self.keys)]

    def table(self) -> dk.RopeTable | None:
        if self.rope is None:
            return None
        theta, rotary_dim, interleaved = self.rope
        rows = max(*self.keys, *self.queries)
        return dk.rope_table(self.dim, rows, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and sink."""
        tokens, others = sum(self.queries) + self.rest[0], sum(self.keys) + self.rest[1]
        shapes = (
            (tokens, self.heads, self.dim),
            (others, self.key_heads, self.dim),
            (others, self.key_heads, self.value_dim),
        )
        return [*(torch.randn(shape).to(dtype) for shape in shapes), torch.randn(self.heads)]

    def grads(self, dtype: torch.dtype) -> list[Tensor]:
        tokens = sum(self.queries) + self.rest[0]
        return [torch.randn(tokens, self.heads, self.value_dim).to(dtype), torch.randn(self.heads, tokens)]


CASES = {
    "even": Case((20, 33, 7), (20, 33, 7), rope=Rope()),
    "uneven": Case((5, 1, 40), (30, 9, 63), rope=Rope(rotary_dim=12), rest=(3, 5)),
    "empty_queries": Case((0, 5, 0), (7, 5, 0), rope=Rope(interleaved=True)),
    "empty_keys": Case((4, 6), (0, 9), rest=(1, 0)),
    "all_empty": Case((0, 0, 0), (0, 0, 0), rest=(4, 6)),
    "no_sequence": Case((), (), rest=(4, 6)),
    "no_token": Case((0, 0), (0, 0)),
    "more_queries_than_keys": Case((30, 12), (10, 25), window=(None, 0)),
    "unbounded": Case((50, 70, 1), (60, 70, 100), window=(None, None), dim=40, value_dim=40, softcap=2.0),
    "blind": Case((20, 30), (25, 30), window=(-40, None)),
    "one_head": Case((64, 1, 65), (64, 3, 65), heads=1, key_heads=1, dim=32, value_dim=32, window=(16, 0)),
    "several_chunks": Case((700, 0, 333), (700, 2, 400), heads=2, key_heads=1, rope=Rope(), window=(100, 0)),
    "many": Case(tuple(range(25)), tuple(range(3, 28)), rope=Rope(), window=(None, 0), softcap=5.0, rest=(2, 0)),
    # Around the tiles of Triton's interpreter, of 64 tokens.
    "around_a_tile": Case((63, 64, 65, 1), (64, 63, 66, 130), heads=2, key_heads=1, window=(70, 3), rest=(70, 70)),
    "groups_of_three": Case((0, 130, 3), (1, 130, 70), heads=6, rope=Rope(rotary_dim=8), window=(40, 0)),
    "behind_only": Case((100, 20), (63, 90), dim=8, value_dim=40, window=(20, -3)),
    "ahead_only": Case((63, 5), (100, 40), dim=40, value_dim=8, window=(-2, 9), softcap=1.5),
    "never": Case((63, 5), (63, 5), window=(3, -4)),
    "short": Case((3, 0, 1, 7, 2), (5, 2, 1, 9, 2), heads=2, rope=Rope(), window=(None, 0), rest=(2, 0)),
}


def dense(compute, case: Case, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> list[Tensor]:
    """``out`` and ``lse`` of ``compute`` for one sequence after the other."""
    outs = [(q[:0] + 0 * sink[:, None])[..., :1].expand(-1, -1, v.shape[2])]
    lses = [outs[0][..., 0].T.to(sink.dtype)]
    for queries, keys in case.bounds:
        if queries.start == queries.stop:
            continue
        alone = (x[tokens].transpose(0, 1)[None] for x, tokens in ((q, queries), (k, keys), (v, keys)))
        out, lse = compute(*alone, case.options, sink=sink)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].to(sink.dtype))
    rest = q.shape[0] - sum(case.queries)
    outs.append(outs[0].new_zeros(rest, *outs[0].shape[1:]))
    lses.append(lses[0].new_full((case.heads, rest), -torch.inf))
    return [torch.cat([x.to(q.dtype) for x in outs]), torch.cat(lses, 1)]


def packed(case: Case, backend: str | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> list[Tensor]:
    options = {"window": case.window, "rope": case.table(), "sink": sink, "softcap": case.softcap, "backend": backend}
    return list(dk.window_attention_varlen(q, k, v, *case.offsets(), **options, return_lse=True))


def with_gradients(compute, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = compute(*leaves)
    given = [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]
    return [*results, *torch.autograd.grad(results, leaves, given, allow_unused=True, materialize_grads=True)]


@functools.cache
def known(name: str, dtype: torch.dtype):
    torch.manual_seed(len(name))
    case = CASES[name]
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    threads = torch.get_num_threads()
    # Thousands of small operations: waking a second thread for each costs more than it brings.
    torch.set_num_threads(1)
    try:
        right = with_gradients(functools.partial(dense, exact, case), [x.double() for x in inputs], grads)
        usual = with_gradients(functools.partial(dense, plain, case), inputs, grads)
    finally:
        torch.set_num_threads(threads)
    return inputs, grads, right, usual


def strided(x: Tensor, layout: str) -> Tensor:
    if layout == "head_major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        wide = torch.full((x.shape[0] + 2, x.shape[1], 2 * x.shape[2]), torch.nan, dtype=x.dtype)
        wide[1:-1, :, ::2] = x
        return wide[1:-1, :, ::2]
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
