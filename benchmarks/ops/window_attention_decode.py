"""Cases of decoding: one new token for each sequence over a rolling cache of the window, long past its first wrap.

In a model the caches of all layers, and the weights, pass through the processor between two uses of the same cache, so
it never lies in a processor's cache when it is needed. A benchmark that called one cache again and again would find it
there. Each problem therefore has several copies of its cache, `_FOOTPRINT` bytes or more together, and every run, of
whichever competitor, takes the next one.

What bounds this work is the bytes of keys and values: the share of the measured copy rate says how near it is. That
rate counts bytes read and written, while decoding hardly writes, so 100 % is no hard limit. No target is set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import dskernels as dk
from benchmarks.case import (
    DTYPES,
    OURS,
    Case,
    Competitor,
    Lane,
    Prepared,
    cuda_options,
    generator_on,
    our_competitors,
    our_notes,
)
from benchmarks.peers import competitors_for
from dskernels.testing import random_tensor

OP = "window_attention_decode"

# Several times what a large server processor's last cache holds, and a GPU's.
_FOOTPRINT, _CUDA_FOOTPRINT = 2**30, 2**28

# By how many tokens a sequence is longer than the one before it: each has wrapped at another slot.
_APART = 61


class Inputs(NamedTuple):
    """``q [B, H, 1, D]`` and equal caches ``(k, v)`` of rotated keys and values, ``[B, Hkv, S, D]`` each.

    ``turn`` goes round the caches, on and on, for all who use these inputs.
    """

    q: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]
    turn: Iterator[tuple[Tensor, Tensor]]
    cache_lengths: Tensor
    rope: dk.RopeTable

    def last_rows(self) -> dk.RopeTable:
        """The rows of the table at which the queries stand: one for each sequence, for all of its heads."""
        last = self.cache_lengths - 1
        return dk.RopeTable(self.rope.cos[last][:, None, None], self.rope.sin[last][:, None, None])

    def step(self, attend: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], list[Tensor]]:
        """The work that is timed, given a function of a cache's keys and values."""

        def forward() -> list[Tensor]:
            with torch.inference_mode():
                return [attend(*next(self.turn))]

        return forward


@dataclass(frozen=True, kw_only=True)
class DecodeProblem:
    """Sizes of one call.

    Attributes:
        seen: the keys in the window, and the slots of the cache.
        length: tokens of the first sequence so far, at least ``seen``; each further one has `_APART` more.
        footprint: bytes that the copies of the cache have together, at least.
    """

    batch: int
    seen: int
    dtype: str
    length: int = 5000
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    footprint: int = _FOOTPRINT
    device: str = "cpu"

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.key_heads else f"H{self.heads}/{self.key_heads}"
        return f"decode, {self.dtype}, B{self.batch} {heads} D{self.head_dim} W{self.seen}"

    @property
    def window(self) -> tuple[int, int]:
        """The window as `dskernels.window_attention_decode` takes it."""
        return self.seen - 1, 0

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return."""
        return ("out",)

    @property
    def operations(self) -> int:
        """2 products over the seen pairs; softmax and rotation are not counted."""
        return 2 * 2 * self.batch * self.heads * self.seen * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one copy."""
        return 2 * self.batch * self.key_heads * self.seen * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def compulsory_bytes(self) -> int:
        """One cache, q, the lengths and a row of the tables for each sequence read once, out written once."""
        queries = self.batch * self.heads * self.head_dim * DTYPES[self.dtype].itemsize
        # Cosine and sine, float32, for half of the components each, and an int64.
        per_sequence = 2 * self.head_dim // 2 * 4 + 8
        return self.cache_bytes + 2 * queries + self.batch * per_sequence

    @property
    def copies(self) -> int:
        """How many caches take turns."""
        return max(2, -(-self.footprint // self.cache_bytes))

    def draw(self) -> Inputs:
        """Normally distributed inputs from a fixed seed."""
        generator = generator_on(self.device)

        def tensor(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            return random_tensor(shape, DTYPES[self.dtype], generator=generator)

        q, k, v = tensor(self.heads, 1), tensor(self.key_heads, self.seen), tensor(self.key_heads, self.seen)
        caches = [(k, v), *((k.clone(), v.clone()) for _ in range(self.copies - 1))]
        lengths = self.length + _APART * torch.arange(self.batch, device=self.device)
        rope = dk.rope_table(self.head_dim, int(lengths[-1])).to(self.device)
        return Inputs(q, caches, itertools.cycle(caches), lengths, rope)

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the reference, a sequence at a time: it repeats the keys for each query head."""
        (k, v), out = inputs.caches[0], []
        for number in range(self.batch):
            one = slice(number, number + 1)
            tensors = (inputs.q[one].to(dtype), k[one].to(dtype), v[one].to(dtype), inputs.cache_lengths[one])
            out.append(_attend(*tensors, **_options(self, inputs), backend="reference"))
        return [torch.cat(out)]


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return cast(Tensor, dk.window_attention_decode(q, k, v, lengths, **options))


def _options(problem: DecodeProblem, inputs: Inputs) -> dict[str, Any]:
    return {"window": problem.window, "rope": inputs.rope, "keys_rotated": True}


def _prepare_ours(problem: DecodeProblem, inputs: Inputs) -> Prepared:
    q, lengths, options = inputs.q, inputs.cache_lengths, _options(problem, inputs)
    explanation = dk.explain(dk.window_attention_decode, q, *inputs.caches[0], lengths, **options)
    run = inputs.step(lambda k, v: _attend(q, k, v, lengths, **options))
    return Prepared(run, {**our_notes(explanation), "caches": len(inputs.caches)})


_OURS = Competitor(name=OURS, title="dskernels", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(name: str, problem: DecodeProblem) -> Case:
    competitors = [*our_competitors(_OURS, problem.device), *competitors_for(OP, problem.device)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    options = cuda_options(problem, launch="queued") if problem.device == "cuda" else {}
    return Case(op=OP, name=f"{name}-{problem.dtype}", title=str(problem), dtype=problem.dtype, lanes=lanes, **options)


def _grouped(quick: bool) -> DecodeProblem:
    problem = DecodeProblem(batch=1, seen=1024, dtype="fp32")
    if quick:
        problem = replace(problem, seen=32, length=100, heads=4, key_heads=2, head_dim=16, footprint=2**15)
    return problem


def cases(quick: bool = False) -> list[Case]:
    """All cases: grouped heads in two dtypes and three batches, and as many key heads as query heads."""
    grouped = _grouped(quick)
    ungrouped = replace(grouped, heads=2) if quick else replace(grouped, seen=4096, heads=8, head_dim=64)
    batches = [
        _against_peers(f"decode-b{batch}", replace(grouped, batch=batch, dtype=dtype))
        for dtype in ("fp32", "bf16")
        for batch in (1, 4, 16)
    ]
    return [*batches, _against_peers("ungrouped-decode-b1", ungrouped)]


def cuda_cases(quick: bool = False) -> list[Case]:
    """Grouped heads on a GPU: batches up to that of a busy server, and one long window."""
    problem = replace(_grouped(quick), dtype="bf16", device="cuda")
    if not quick:
        problem = replace(problem, footprint=_CUDA_FOOTPRINT)
    batches = [_against_peers(f"decode-b{batch}", replace(problem, batch=batch)) for batch in (1, 16, 64)]
    long = problem if quick else replace(problem, seen=4096)
    return [*batches, _against_peers("long-decode-b1", long)]
