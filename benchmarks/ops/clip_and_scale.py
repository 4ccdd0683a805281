"""Cases of unscaling and clipping gradients in place: few large tensors, many small ones, and very many tiny ones.

Gradients are scaled where they lie, so every contestant has a copy of its own, and the work must be the same on every
call: no gradients that shrink from call to call until nothing is left of them, and no factor of 1, with which nothing
needs to be written. Dividing by a loss scale of 1/2 doubles the norm, and clipping brings it down to 3/4 of what was
drawn and, on the next call, to what was drawn: the gradients go down and up by turns, by 3/4 and 4/3.

The lists are met again and again, so that the two of 20 and 32 MB may lie in a large processor's cache, for everybody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    Results,
    cuda_options,
    generator_on,
    our_competitors,
    our_notes,
)
from benchmarks.peers import competitors_for

OP = "clip_and_scale"

LOSS_SCALE = 0.5
_LOWER = 0.75


class Turning:
    """The gradients of one contestant, and how far to clip them next: lower and higher by turns."""

    def __init__(self, drawn: Sequence[Tensor], thresholds: tuple[float, float]) -> None:
        self.grads = [grad.clone() for grad in drawn]
        self._drawn, self._thresholds = drawn, thresholds
        self._turns = itertools.cycle(thresholds)

    def max_norm(self) -> float:
        """The threshold of the next call."""
        return next(self._turns)

    def restart(self) -> None:
        """Makes the gradients what was drawn, after trials."""
        torch._foreach_copy_(self.grads, list(self._drawn))
        self._turns = itertools.cycle(self._thresholds)

    def step(self, clip: Callable[[float], Tensor]) -> Callable[[], Results]:
        """The work that is timed, given a function of the threshold that clips `grads` and returns their norm."""

        def run() -> Results:
            with torch.no_grad():
                return [clip(self.max_norm())]

        return run

    def comparable(self, results: Results) -> Results:
        """The norm, in the dtype of the gradients, and all gradients."""
        return [results[0].to(self.grads[0].dtype), torch.cat([grad.flatten() for grad in self.grads])]


class Inputs(NamedTuple):
    """Gradients as drawn, ``[length]`` each, and the thresholds that take turns."""

    grads: list[Tensor]
    thresholds: tuple[float, float]

    def turning(self) -> Turning:
        """A copy for one contestant."""
        return Turning(self.grads, self.thresholds)


@dataclass(frozen=True, kw_only=True)
class ClipProblem:
    """A list of ``count`` gradients of ``length`` elements each."""

    count: int
    length: int
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"unscale and clip, {self.dtype}, {self.count} x {_short(self.length)}"

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return, at last."""
        return ("total_norm", "grads")

    @property
    def elements(self) -> int:
        """Of all gradients."""
        return self.count * self.length

    @property
    def operations(self) -> int:
        """A multiply-add for the norm, and a multiplication by the factor, for each element."""
        return 3 * self.elements

    @property
    def compulsory_bytes(self) -> int:
        """Gradients read twice and written once: the factor is not known before all of them have been read."""
        return 3 * self.elements * DTYPES[self.dtype].itemsize

    def draw(self) -> Inputs:
        """Normally distributed gradients from a fixed seed."""
        generator, dtype = generator_on(self.device), DTYPES[self.dtype]

        def grad() -> Tensor:
            return torch.randn(self.length, generator=generator, device=self.device).to(dtype)

        grads = [grad() for _ in range(self.count)]
        norm = float(_norm(grads, torch.float64))
        return Inputs(grads, (_LOWER * norm, norm))

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the first call."""
        norm = _norm(inputs.grads, dtype) / LOSS_SCALE
        factor = (inputs.thresholds[0] / (norm + 1e-6)).clamp(max=1.0) / LOSS_SCALE
        return [norm, torch.cat([grad.to(dtype) * factor for grad in inputs.grads])]


def _norm(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([grad.to(dtype).square().sum() for grad in grads]).sum().sqrt()


def _short(length: int) -> str:
    shorter = ((length >> shift, unit) for shift, unit in ((20, "M"), (10, "K")) if length % (1 << shift) == 0)
    return next((f"{count}{unit}" for count, unit in shorter), str(length))


def _prepare_ours(problem: ClipProblem, inputs: Inputs) -> Prepared:
    mine, scale = inputs.turning(), torch.tensor(LOSS_SCALE, device=problem.device)
    explanation = dk.explain(dk.clip_and_scale_, mine.grads, loss_scale=scale)

    def clip(max_norm: float) -> Tensor:
        return dk.clip_and_scale_(mine.grads, max_norm=max_norm, loss_scale=scale).total_norm

    return Prepared(mine.step(clip), our_notes(explanation), mine.comparable)


_OURS = Competitor(name=OURS, title="dskernels", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(name: str, problem: ClipProblem) -> Case:
    targets = {"unscale_clip": _TARGETS[name]} if problem.dtype == "fp32" and name in _TARGETS else {}
    competitors = [*our_competitors(_OURS, problem.device), *competitors_for(OP, problem.device)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    return Case(
        op=OP,
        name=f"{name}-{problem.dtype}",
        title=str(problem),
        dtype=problem.dtype,
        lanes=lanes,
        **(cuda_options(problem, launch="eager") if problem.device == "cuda" else {"targets": targets}),
    )


# How many tensors of how many elements.
_LISTS = {"large": (32, 2**20), "small": (2000, 2**12), "tiny": (20_000, 2**8), "model": (1024, 2**20)}
_QUICK_LISTS = {"large": (3, 5000), "small": (20, 40), "tiny": (50, 3), "model": (5, 3000)}
# Of the design for the lists of a CPU, in fp32, set on AVX2 with 2 threads.
_TARGETS = {"large": 1.65, "small": 5.0, "tiny": 50.0}


def _problem(name: str, dtype: str, device: str, quick: bool) -> ClipProblem:
    count, length = (_QUICK_LISTS if quick else _LISTS)[name]
    return ClipProblem(count=count, length=length, dtype=dtype, device=device)


def cases(quick: bool = False) -> list[Case]:
    """All cases, in every dtype; the targets are for fp32."""
    return [_against_peers(name, _problem(name, dtype, "cpu", quick)) for dtype in DTYPES for name in _TARGETS]


def cuda_cases(quick: bool = False) -> list[Case]:
    """The same lists on a GPU, and gradients of a model of a billion parameters."""
    lists = (("large", "fp32"), ("small", "fp32"), ("tiny", "fp32"), ("model", "fp32"), ("small", "bf16"))
    return [_against_peers(name, _problem(name, dtype, "cuda", quick)) for name, dtype in (*lists, ("model", "bf16"))]
