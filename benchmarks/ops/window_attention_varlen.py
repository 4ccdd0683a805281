"""Cases of packed sequences of uneven lengths: rotary embedding and a causal window, forward and with backward.

The peers take the same sequences as one batch, padded at the end to the longest. Padding their inputs and picking the
results that count out of theirs are not timed: the difference is what computing the padding costs. It is that of a
batch as it comes; sorted by length into several batches, sequences need less padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

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
from benchmarks.ops.window_attention import Inputs, WindowProblem
from benchmarks.peers import competitors_for
from dskernels.testing import random_tensor

OP = "window_attention_varlen"

# From 64 to 4096 tokens, every octave as likely as the other: the middles of 16 equal parts of that distribution, so
# that no luck of a draw decides how much padding there is, in mixed order.
_LENGTHS = (73, 450, 2774, 267, 1649, 159, 981, 95, 583, 3597, 347, 2139, 206, 1272, 123, 756)
_QUICK_LENGTHS = (9, 70, 1, 33)


@dataclass(frozen=True, kw_only=True)
class VarlenProblem:
    """Sizes of one call; ``seen`` is the number of keys in the window, as in `WindowProblem`."""

    lengths: tuple[int, ...]
    seen: int
    dtype: str
    heads: int = 8
    head_dim: int = 64
    backward: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        work = "forward + backward" if self.backward else "forward"
        spread = f"N{min(self.lengths)} to {max(self.lengths)}"
        sizes = f"B{len(self.lengths)} H{self.heads} D{self.head_dim} {spread} W{self.seen}"
        return f"packed {work}, {self.dtype}, {sizes}, {sum(self.lengths)} tokens"

    @property
    def window(self) -> tuple[int, int]:
        """The window as `dskernels.window_attention_varlen` takes it."""
        return self.seen - 1, 0

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return, each ``[T, H, D]``."""
        return ("out", "grad_q", "grad_k", "grad_v") if self.backward else ("out",)

    @property
    def operations(self) -> int:
        """Those of each sequence by itself."""
        return sum(alone.operations for alone in self._alone())

    @property
    def compulsory_bytes(self) -> int:
        """Each of q, k, v (and grad_out), the tables and the offsets read once, out (and three gradients) written."""
        per_tensor = sum(self.lengths) * self.heads * self.head_dim * DTYPES[self.dtype].itemsize
        # Cosine and sine, float32, for half of the components each, and int64 offsets.
        tables = 2 * max(self.lengths) * self.head_dim // 2 * 4
        return (8 if self.backward else 4) * per_tensor + tables + (len(self.lengths) + 1) * 8

    @property
    def offsets(self) -> Tensor:
        """Where each sequence begins, and where the last one ends."""
        return torch.tensor([0, *self.lengths], device=self.device).cumsum(0)

    def draw(self) -> Inputs:
        """Normally distributed tensors ``[T, H, D]`` from a fixed seed."""
        generator = generator_on(self.device)

        def tensor() -> Tensor:
            shape = (1, sum(self.lengths), self.heads, self.head_dim)
            return random_tensor(shape, DTYPES[self.dtype], generator=generator)[0]

        rope = dk.rope_table(self.head_dim, max(self.lengths)).to(self.device)
        return Inputs(tensor(), tensor(), tensor(), rope, tensor() if self.backward else None)

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the reference of `dskernels.window_attention`, a sequence at a time."""
        q, k, v, rope, grad_out = inputs
        parts = []
        for alone, span in zip(self._alone(), pairwise(self.offsets.tolist()), strict=True):
            tokens = slice(*span)
            one_q, one_k, one_v = (_batch_of_one(x[tokens]) for x in (q, k, v))
            grad = None if grad_out is None else _batch_of_one(grad_out[tokens])
            results = alone.expected(Inputs(one_q, one_k, one_v, rope, grad), dtype)
            parts.append([result[0].transpose(0, 1) for result in results])
        return [torch.cat(results) for results in zip(*parts, strict=True)]

    def _alone(self) -> list[WindowProblem]:
        sizes: dict[str, Any] = {"heads": self.heads, "key_heads": self.heads, "head_dim": self.head_dim}
        sizes |= {"seen": self.seen, "dtype": self.dtype, "backward": self.backward}
        return [WindowProblem(length=length, **sizes) for length in self.lengths]


def _batch_of_one(tokens: Tensor) -> Tensor:
    """``[N, H, D]`` as ``[1, H, N, D]``."""
    return tokens.transpose(0, 1)[None]


def _attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, **options: Any) -> Tensor:
    return cast(Tensor, dk.window_attention_varlen(q, k, v, offsets, offsets, **options))


def _prepare_ours(problem: VarlenProblem, inputs: Inputs) -> Prepared:
    offsets = problem.offsets
    options: dict[str, Any] = {"window": problem.window, "rope": inputs.rope}
    explanation = dk.explain(dk.window_attention_varlen, *inputs[:3], offsets, offsets, **options)
    run = inputs.step(lambda q, k, v: _attend(q, k, v, offsets, **options))
    return Prepared(run, our_notes(explanation))


_OURS = Competitor(name=OURS, title="dskernels", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(name: str, problem: VarlenProblem) -> Case:
    competitors = [*our_competitors(_OURS, problem.device), *competitors_for(OP, problem.device)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    options = cuda_options(problem) if problem.device == "cuda" else {}
    return Case(op=OP, name=name, title=str(problem), dtype=problem.dtype, lanes=lanes, **options)


def _cases(problem: VarlenProblem, quick: bool) -> list[Case]:
    if quick:
        problem = replace(problem, lengths=_QUICK_LENGTHS, seen=32, heads=2, head_dim=16)
    return [
        _against_peers(f"packed-forward-{problem.dtype}", problem),
        _against_peers(f"packed-forward-backward-{problem.dtype}", replace(problem, backward=True)),
    ]


def cases(quick: bool = False) -> list[Case]:
    """All cases. No target is set."""
    return _cases(VarlenProblem(lengths=_LENGTHS, seen=256, dtype="fp32"), quick)


def cuda_cases(quick: bool = False) -> list[Case]:
    """The same in bfloat16 on a GPU, with heads of a larger model."""
    return _cases(VarlenProblem(lengths=_LENGTHS, seen=256, dtype="bf16", heads=16, head_dim=128, device="cuda"), quick)
