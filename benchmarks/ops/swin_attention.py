"""Cases of Swin attention: from the tensor that one projection produced to the one that the next one takes.

The shapes are those of Swin-T's stages at 224 x 224, and a first stage of SwinV2. Peers start from the same
``[B, H, W, 3 * C]`` as we do. Those who write this by hand roll and partition before the projection, where there is a
third of the bytes to copy; the cases of `benchmarks.ops.swin_attention_layer` have that, with both projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

OP = "swin_attention"

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5

# The targets of the design by image size, float32, forward and with the backward.
_TARGETS: dict[tuple[int, bool], dict[str, float]] = {
    (56, False): {"eager": 5.0, "compiled": 3.0},
    (56, True): {"eager": 3.5, "compiled": 3.0},
    (14, False): {"eager": 4.0, "compiled": 2.5},
    (14, True): {"eager": 3.0, "compiled": 3.0},
}


def step(work: Callable[..., Tensor], tensors: Sequence[Tensor], grad_out: Tensor | None) -> Callable[[], list[Tensor]]:
    """What is timed: ``work`` of ``tensors`` without autograd or, given ``grad_out``, with the gradients of all."""
    if grad_out is None:

        def forward() -> list[Tensor]:
            with torch.inference_mode():
                return [work(*tensors)]

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def forward_and_backward() -> list[Tensor]:
        out = work(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    return forward_and_backward


class Inputs(NamedTuple):
    """``qkv [B, H, W, 3 * C]``, ``bias [heads, N, N]``, SwinV2's ``logit_scale [heads]``; ``grad_out`` where needed."""

    qkv: Tensor
    bias: Tensor
    logit_scale: Tensor | None
    grad_out: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that have a gradient, in the order of the results."""
        return [self.qkv, self.bias, *([] if self.logit_scale is None else [self.logit_scale])]

    def step(self, attend: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
        """The work that is timed, given a function of `tensors`."""
        return step(attend, self.tensors, self.grad_out)


@dataclass(frozen=True, kw_only=True)
class SwinProblem:
    """Sizes of one call; height and width are multiples of the window, so that nothing is padded."""

    height: int
    width: int
    channels: int
    heads: int
    dtype: str
    shift: int = 0
    window: int = 7
    batch: int = 8
    cosine: bool = False
    backward: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        work = "forward + backward" if self.backward else "forward"
        return f"{'cosine ' if self.cosine else ''}{work}, {self.dtype}, {self.sizes}"

    @property
    def sizes(self) -> str:
        """Sizes in words."""
        image = f"B{self.batch} {self.height}x{self.width} C{self.channels} H{self.heads}"
        return f"{image} window {self.window} shift {self.shift}"

    @property
    def head_dim(self) -> int:
        """Components of a head."""
        return self.channels // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a whole window."""
        return self.window * self.window

    @property
    def windows(self) -> int:
        """Whole windows that an image has room for."""
        return (self.height // self.window) * (self.width // self.window)

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return."""
        gradients = ("grad_qkv", "grad_bias", *(["grad_logit_scale"] if self.cosine else []))
        return ("out", *gradients) if self.backward else ("out",)

    @property
    def seen_pairs(self) -> int:
        """Pairs of tokens of an image that attend each other: a shift cuts the first windows in two along an axis."""

        def along(length: int) -> int:
            rest = self.window - self.shift
            uncut = length // self.window - (self.shift > 0)
            return uncut * self.window**2 + (self.shift**2 + rest**2 if self.shift else 0)

        return along(self.height) * along(self.width)

    @property
    def operations(self) -> int:
        """2 products over the seen pairs forward, 5 backward; softmax and normalizing are not counted."""
        products = _FORWARD_PRODUCTS + (_BACKWARD_PRODUCTS if self.backward else 0)
        return 2 * products * self.batch * self.seen_pairs * self.channels

    @property
    def compulsory_bytes(self) -> int:
        """Forward qkv is read and out written; backward qkv and grad_out are read and grad_qkv is written.

        The backward reads qkv once more: it begins when all of out is there, which no cache is to be counted on to
        outlast. The parameters are read in both passes, and their gradients written.
        """
        parameters = self.heads * self.tokens**2 + (self.heads if self.cosine else 0)
        values = self.batch * self.height * self.width * self.channels
        total = 4 * values + parameters
        if self.backward:
            total += 7 * values + 2 * parameters
        return total * DTYPES[self.dtype].itemsize

    @property
    def options(self) -> dict[str, Any]:
        """The sizes as `dskernels.swin_attention` takes them."""
        return {"window_size": self.window, "shift": self.shift, "num_heads": self.heads}

    def draw(self) -> Inputs:
        """Normally distributed qkv and bias from a fixed seed; logit scales from 5 to 20, where training begins."""
        generator, dtype = generator_on(self.device), DTYPES[self.dtype]

        def image(channels: int) -> Tensor:
            return random_tensor((self.batch, self.height, self.width, channels), dtype, generator=generator)

        qkv = image(3 * self.channels)
        bias = torch.randn(self.heads, self.tokens, self.tokens, generator=generator, device=self.device).to(dtype)
        logit_scale = None
        if self.cosine:
            logit_scale = (5 + 15 * torch.rand(self.heads, generator=generator, device=self.device)).to(dtype)
        return Inputs(qkv, bias, logit_scale, image(self.channels) if self.backward else None)

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the reference."""
        grad_out = None if inputs.grad_out is None else inputs.grad_out.to(dtype)
        return step(attention(self, backend="reference"), [x.to(dtype) for x in inputs.tensors], grad_out)()


def attention(problem: SwinProblem, **options: Any) -> Callable[..., Tensor]:
    """`dskernels.swin_attention` with the sizes of ``problem``, as a function of the tensors of `Inputs`."""

    def attend(qkv: Tensor, bias: Tensor, logit_scale: Tensor | None = None) -> Tensor:
        return dk.swin_attention(qkv, bias=bias, logit_scale=logit_scale, **problem.options, **options)

    return attend


def notes(problem: SwinProblem) -> dict[str, Any]:
    """What serves a call of these sizes here."""
    shape = (problem.batch, problem.height, problem.width, 3 * problem.channels)
    qkv = torch.empty(shape, dtype=DTYPES[problem.dtype], device=problem.device)
    return our_notes(dk.explain(dk.swin_attention, qkv, **problem.options))


def _prepare_ours(problem: SwinProblem, inputs: Inputs) -> Prepared:
    return Prepared(inputs.step(attention(problem)), notes(problem))


_OURS = Competitor(name=OURS, title="dskernels", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(problem: SwinProblem, quick: bool) -> Case:
    sized = quick_sizes(problem) if quick else problem
    competitors = [*our_competitors(_OURS, problem.device), *competitors_for(OP, problem.device)]
    lanes = [Lane(name=c.name, title=c.title, problem=sized, competitor=c) for c in competitors]
    aimed = problem.dtype == "fp32" and problem.shift > 0 and not problem.cosine
    targets = _TARGETS.get((problem.height, problem.backward), {}) if aimed else {}
    return Case(
        op=OP,
        name=f"{'cosine-' if problem.cosine else ''}{case_name(problem)}",
        title=str(sized),
        dtype=problem.dtype,
        lanes=lanes,
        **(
            cuda_options(problem)
            if problem.device == "cuda"
            else {"targets": targets, "seconds": 12.0 if targets else 6.0}
        ),
    )


def case_name(problem: SwinProblem) -> str:
    """Work, image size, shift and dtype."""
    work = "forward-backward" if problem.backward else "forward"
    return f"{work}-{problem.height}-shift{problem.shift}-{problem.dtype}"


def with_backward(problem: SwinProblem) -> tuple[SwinProblem, SwinProblem]:
    """The forward alone, and both passes."""
    return problem, replace(problem, backward=True)


def main_sizes() -> tuple[SwinProblem, SwinProblem]:
    """The first and the third stage of Swin-T, shifted, in float32."""
    first = SwinProblem(height=56, width=56, channels=96, heads=3, shift=3, dtype="fp32")
    return first, replace(first, height=14, width=14, channels=384, heads=12)


def quick_sizes(problem: SwinProblem) -> SwinProblem:
    """A tiny problem that has as many windows to a side, up to two, and shifts as ``problem`` does."""
    side = min(2, problem.height // problem.window) * 3
    sizes: dict[str, Any] = {"batch": 2, "channels": 16, "heads": 2}
    return replace(problem, height=side, width=side, window=3, shift=min(problem.shift, 1), **sizes)


def cases(quick: bool = False) -> list[Case]:
    """All cases: those of the targets in two dtypes with and without shift, then other stages and SwinV2."""
    first, third = main_sizes()
    problems = [
        replace(size, shift=shift, dtype=dtype, backward=backward)
        for size in (first, third)
        for shift in (3, 0)
        for dtype in ("fp32", "bf16")
        for backward in (False, True)
    ]
    problems += [replace(size, dtype="fp16") for size in (first, third)]
    second = replace(first, height=28, width=28, channels=192, heads=6)
    last = replace(first, height=7, width=7, channels=768, heads=24, shift=0)
    cosine = replace(first, height=64, width=64, window=8, shift=4, cosine=True)
    problems += [problem for size in (second, last, cosine) for problem in with_backward(size)]
    return [_against_peers(problem, quick) for problem in problems]


def cuda_cases(quick: bool = False) -> list[Case]:
    """The first and the third stage of Swin-B in a batch of 64, and a first stage of SwinV2-B."""
    first = SwinProblem(height=56, width=56, channels=128, heads=4, shift=3, dtype="bf16", batch=64, device="cuda")
    third = replace(first, height=14, width=14, channels=512, heads=16)
    cosine = replace(first, height=64, width=64, window=8, shift=4, cosine=True)
    problems = [problem for size in (first, third) for problem in with_backward(size)]
    problems += [replace(first, dtype="fp32"), replace(first, dtype="fp32", backward=True), cosine]
    return [_against_peers(problem, quick) for problem in problems]
