"""Cases of window attention: rotary embedding and a causal window, forward, with backward, and how it grows.

A window of W means that each query sees W keys, itself included (``window=(W - 1, 0)``), for every competitor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

OP = "window_attention"

# Queries that the reference takes at a time: enough to be quick, few enough for a 32k sequence in float64.
_CHUNK = 256


class Inputs(NamedTuple):
    """Contiguous tensors, ``[B, H, N, D]`` or packed ``[T, H, D]``, and the table; ``grad_out`` where it is needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    rope: dk.RopeTable
    grad_out: Tensor | None

    def step(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], list[Tensor]]:
        """The work that is timed, given a function of q, k and v: without autograd, or with its gradients."""
        if self.grad_out is None:

            def forward() -> list[Tensor]:
                with torch.inference_mode():
                    return [attend(self.q, self.k, self.v)]

            return forward
        leaves = [tensor.detach().requires_grad_() for tensor in self[:3]]

        def forward_and_backward() -> list[Tensor]:
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, self.grad_out)]

        return forward_and_backward


@dataclass(frozen=True, kw_only=True)
class WindowProblem:
    """Sizes of one call; ``seen`` is the number of keys in the window."""

    length: int
    seen: int
    dtype: str
    batch: int = 1
    heads: int = 8
    key_heads: int = 8
    head_dim: int = 64
    backward: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.key_heads else f"H{self.heads}/{self.key_heads}"
        work = "forward + backward" if self.backward else "forward"
        return f"{work}, {self.dtype}, B{self.batch} {heads} D{self.head_dim} N{self.length} W{self.seen}"

    @property
    def window(self) -> tuple[int, int]:
        """The window as `dskernels.window_attention` takes it."""
        return self.seen - 1, 0

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return."""
        return ("out", "grad_q", "grad_k", "grad_v") if self.backward else ("out",)

    @property
    def seen_pairs(self) -> int:
        """Pairs of a query and a key it sees, of one head: the first queries have fewer keys before them."""
        seen = min(self.seen, self.length)
        return self.length * seen - seen * (seen - 1) // 2

    @property
    def operations(self) -> int:
        """2 products over the seen pairs forward, 5 backward; softmax and rotation are not counted."""
        products = 7 if self.backward else 2
        return 2 * products * self.batch * self.heads * self.seen_pairs * self.head_dim

    @property
    def compulsory_bytes(self) -> int:
        """Each of q, k, v (and grad_out) and the tables read once, out (and the three gradients) written once."""
        per_head = self.batch * self.length * self.head_dim * DTYPES[self.dtype].itemsize
        query_like, key_like = (4, 4) if self.backward else (2, 2)
        # Cosine and sine, float32, for half of the components each.
        tables = 2 * self.length * self.head_dim // 2 * 4
        return per_head * (query_like * self.heads + key_like * self.key_heads) + tables

    def draw(self) -> Inputs:
        """Normally distributed inputs from a fixed seed."""
        generator = generator_on(self.device)

        def tensor(heads: int) -> Tensor:
            shape = (self.batch, heads, self.length, self.head_dim)
            return random_tensor(shape, DTYPES[self.dtype], generator=generator)

        q, k, v = tensor(self.heads), tensor(self.key_heads), tensor(self.key_heads)
        rope = dk.rope_table(self.head_dim, self.length).to(self.device)
        return Inputs(q, k, v, rope, tensor(self.heads) if self.backward else None)

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the reference, by chunks of queries with the keys, and the rows of the tables, they can see."""
        q, k, v = (tensor.to(dtype) for tensor in inputs[:3])
        out = torch.empty_like(q)
        gradients = [torch.zeros_like(tensor) for tensor in (q, k, v)] if self.backward else []
        for start in range(0, self.length, _CHUNK):
            queries = slice(start, min(start + _CHUNK, self.length))
            keys = slice(max(0, start - self.window[0]), queries.stop)
            parts = ((q, queries), (k, keys), (v, keys))
            # Leaves of their own: gradients through slices of the whole would be as long as the whole, every time.
            leaves = [whole[:, :, span].detach().requires_grad_(self.backward) for whole, span in parts]
            rows = dk.RopeTable(inputs.rope.cos[keys], inputs.rope.sin[keys])
            options: dict[str, Any] = {"rope": rows, "query_offset": start - keys.start, "backend": "reference"}
            chunk = _attend(*leaves, window=self.window, **options)
            out[:, :, queries] = chunk.detach()
            if inputs.grad_out is not None:
                grads = torch.autograd.grad(chunk, leaves, inputs.grad_out[:, :, queries].to(dtype))
                for gradient, (_, span), grad in zip(gradients, parts, grads, strict=True):
                    gradient[:, :, span] += grad
        return [out, *gradients]


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return cast(Tensor, dk.window_attention(q, k, v, **options))


def _prepare_ours(problem: WindowProblem, inputs: Inputs) -> Prepared:
    options: dict[str, Any] = {"window": problem.window, "rope": inputs.rope}
    explanation = dk.explain(dk.window_attention, *inputs[:3], **options)
    return Prepared(inputs.step(lambda q, k, v: _attend(q, k, v, **options)), our_notes(explanation))


_OURS = Competitor(name=OURS, title="dskernels", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(name: str, problem: WindowProblem, **targets: float) -> Case:
    competitors = [*our_competitors(_OURS, problem.device), *competitors_for(OP, problem.device)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    options = cuda_options(problem) if problem.device == "cuda" else {"targets": targets}
    return Case(op=OP, name=name, title=str(problem), dtype=problem.dtype, lanes=lanes, **options)


def _growth(name: str, problem: WindowProblem, lengths: tuple[int, ...], limit: float | None = None) -> Case:
    problems = [replace(problem, length=length) for length in lengths]
    names = [f"N={length}" for length in lengths]
    lanes = [
        Lane(name=name, title=name, problem=sized, competitor=_OURS)
        for name, sized in zip(names, problems, strict=True)
    ]
    title = str(problem).replace(f"N{problem.length}", f"N{lengths[0]} to {lengths[-1]}")
    return Case(
        op=OP,
        name=name,
        title=title,
        dtype=problem.dtype,
        lanes=lanes,
        baseline=names[0],
        limits={} if limit is None else {names[-1]: limit},
        sweep=("N", lengths),
        **(cuda_options(problem) if problem.device == "cuda" else {}),
    )


def _sizes(quick: bool) -> tuple[WindowProblem, WindowProblem, tuple[int, ...]]:
    """The small and the large problem, and the lengths of the growth."""
    main = WindowProblem(length=4096, seen=256, dtype="fp32")
    grouped = WindowProblem(length=8192, seen=1024, dtype="fp32", heads=32, key_heads=8, head_dim=128)
    if not quick:
        return main, grouped, (8192, 16384, 32768)
    main = replace(main, length=160, seen=32, heads=2, key_heads=2, head_dim=16)
    grouped = replace(grouped, length=160, seen=64, heads=4, key_heads=2, head_dim=16)
    return main, grouped, (256, 512, 1024)


def cases(quick: bool = False) -> list[Case]:
    """All cases. The targets are those of the design, set on AVX2 with 2 threads."""
    main, grouped, lengths = _sizes(quick)
    bf16, fp16 = replace(main, dtype="bf16"), replace(main, dtype="fp16")
    return [
        _against_peers("forward-fp32", main, flex=4.0, sdpa_mask=18.0, sgemm=0.95),
        _against_peers("forward-bf16", bf16, flex=6.0),
        _against_peers("forward-fp16", fp16),
        _against_peers("forward-backward-fp32", replace(main, backward=True), sdpa_mask=20.0),
        _against_peers("forward-backward-bf16", replace(bf16, backward=True), sdpa_mask=90.0),
        _growth("growth-forward-fp32", main, lengths, 4.4),
        _growth("growth-forward-backward-fp32", replace(main, backward=True), lengths, 4.4),
        _against_peers("grouped-forward-fp32", grouped),
    ]


def cuda_cases(quick: bool = False) -> list[Case]:
    """The same for a GPU, which only a batch of long sequences fills; ``causal`` has a window of the whole length."""
    main, grouped, lengths = _sizes(quick)
    main = replace(main, dtype="bf16", device="cuda")
    grouped = replace(grouped, dtype="bf16", device="cuda")
    batch = replace(grouped, batch=4)
    fp32 = replace(main, dtype="fp32")
    return [
        _against_peers("forward-bf16", main),
        _against_peers("forward-backward-bf16", replace(main, backward=True)),
        _against_peers("grouped-forward-bf16", batch),
        _against_peers("grouped-forward-backward-bf16", replace(batch, backward=True)),
        _against_peers("forward-fp32", fp32),
        _against_peers("forward-backward-fp32", replace(fp32, backward=True)),
        _against_peers("causal-forward-bf16", replace(grouped, seen=grouped.length)),
        _against_peers("forward-fp16", replace(main, dtype="fp16")),
        _growth("growth-forward-backward-bf16", replace(grouped, backward=True), lengths),
    ]
