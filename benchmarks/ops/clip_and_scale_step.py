"""Cases of clipping inside a step of torch's fused AdamW: over lists of gradients, and in the training of a model.

Folded into the optimizer, clipping reads the gradients once, and the optimizer divides them while it reads them itself.
The lists follow `benchmarks.ops.clip_and_scale`: the optimizer leaves the divided gradients behind, so they go down and
up by turns there, too. A model computes its gradients anew for each step, and all of its contestants train the same
one, set back between them. It takes as its baseline the same step without any unscaling and clipping, so that every
ratio says what those add; their share of the step is ``1 - 1 / ratio``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

import dskernels as dk
from benchmarks.case import OURS, Case, Competitor, Lane, Prepared, Results, cuda_options, our_competitors, our_notes
from benchmarks.ops.clip_and_scale import LOSS_SCALE, ClipProblem, Inputs, Turning
from benchmarks.peers import competitors_for

OP = "clip_and_scale_step"

# AdamW's first moment after its first step is the gradient, times this.
_FIRST = 0.1
_TRAINING_SCALE = 8192.0

Scale = Callable[[Tensor], Tensor]


class Loop(Protocol):
    """What a training loop has: `parameters`, their `optimizer` and the `loss_scale`."""

    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    loss_scale: float

    def backward(self, scale: Scale) -> None:
        """Makes gradients, of the scaled loss."""

    def max_norm(self) -> float:
        """The threshold of the next step."""

    def restart(self) -> None:
        """Makes everything as it was, after trials."""

    def comparable(self, results: Results) -> Results:
        """The norm and, from the moments of AdamW, the gradients that its first step has seen."""


class StepProblem(Protocol):
    """A problem whose inputs make a `Loop` for each contestant."""

    device: str

    def draw(self) -> Any:
        """The inputs; ``loop()`` is what a contestant works with."""


def _adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(1 - _FIRST, 0.999), fused=True)


def _moments(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([optimizer.state[parameter]["exp_avg"].flatten() for parameter in parameters])


class ListLoop:
    """A `Loop` over a list of gradients that are there already."""

    def __init__(self, inputs: Inputs) -> None:
        self.loss_scale = LOSS_SCALE
        self._turning: Turning = inputs.turning()
        self.parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in self._turning.grads]
        self.restart()

    def backward(self, scale: Scale) -> None:
        """Nothing to do."""

    def max_norm(self) -> float:
        return self._turning.max_norm()

    def restart(self) -> None:
        self._turning.restart()
        self.optimizer = _adamw(self.parameters)
        for parameter, grad in zip(self.parameters, self._turning.grads, strict=True):
            parameter.grad = grad

    def comparable(self, results: Results) -> Results:
        return [results[0], _moments(self.optimizer, self.parameters)]


class ListInputs(Inputs):
    """Gradients and thresholds, with a loop for each contestant."""

    def loop(self) -> ListLoop:
        return ListLoop(self)


@dataclass(frozen=True, kw_only=True)
class ListStepProblem:
    """A step of AdamW over ``count`` tensors of ``length`` elements, float32."""

    count: int
    length: int
    dtype: str = "fp32"
    device: str = "cpu"

    def __str__(self) -> str:
        return str(self._clipping).replace("unscale and clip", "unscale, clip and AdamW")

    @property
    def _clipping(self) -> ClipProblem:
        return ClipProblem(count=self.count, length=self.length, dtype=self.dtype, device=self.device)

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return, at last."""
        return ("total_norm", "exp_avg")

    @property
    def operations(self) -> int:
        """A multiply-add for the norm, and 12 of AdamW, for each element: division and root count as one each."""
        return 14 * self._clipping.elements

    @property
    def compulsory_bytes(self) -> int:
        """Gradients read for the norm and again for the step; parameters and both moments read and written."""
        return 8 * 4 * self._clipping.elements

    def draw(self) -> ListInputs:
        """As `ClipProblem`."""
        return ListInputs(*self._clipping.draw())

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the first step."""
        norm, grads = self._clipping.expected(inputs, dtype)
        return [norm, _FIRST * grads]


class TrainingInputs:
    """A model with what trains it; the `Loop` of every contestant in turn."""

    def __init__(self, model: torch.nn.Module, tokens: Tensor, max_norm: float) -> None:
        self.model, self.tokens, self.loss_scale = model, tokens, _TRAINING_SCALE
        self.parameters = list(model.parameters())
        self._max_norm = max_norm
        self._first = {name: value.clone() for name, value in model.state_dict().items()}
        self.restart()

    def loop(self) -> TrainingInputs:
        self.restart()
        return self

    def backward(self, scale: Scale) -> None:
        self.optimizer.zero_grad()
        scale(loss_of(self.model, self.tokens)).backward()

    def max_norm(self) -> float:
        return self._max_norm

    def restart(self) -> None:
        self.model.load_state_dict(self._first)
        self.optimizer = _adamw(self.parameters)

    def comparable(self, results: Results) -> Results:
        return [results[0], _moments(self.optimizer, shown(self.model))]


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of every next token."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def shown(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that are compared: those of the first and the last block."""
    return [*model.blocks[0].parameters(), *model.blocks[-1].parameters()]


@dataclass(frozen=True, kw_only=True)
class TrainingProblem:
    """A step of training `dsaccel.modules.SlidingWindowLM`, float32, batch 1."""

    length: int
    dim: int = 768
    layers: int = 12
    vocabulary: int = 20_000
    dtype: str = "fp32"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"training step, {self.dtype}, {self.elements / 1e6:.0f}M parameters, {self.length} tokens"

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return, at last."""
        return ("total_norm", "exp_avg")

    @property
    def elements(self) -> int:
        """Parameters; the head is the embedding."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self._model().parameters())

    @property
    def operations(self) -> int:
        """A multiply-add for each parameter and token forward, and two backward; attention is not counted."""
        return 6 * self.elements * self.length

    @property
    def compulsory_bytes(self) -> int:
        """Parameters and both moments read and written."""
        return 6 * 4 * self.elements

    def draw(self) -> TrainingInputs:
        """A model and random tokens from a fixed seed, and half the norm of the first gradients as threshold."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, tokens = self._model(), torch.randint(self.vocabulary, (1, self.length + 1))
        grads = torch.autograd.grad(loss_of(model, tokens), list(model.parameters()))
        return TrainingInputs(model, tokens, 0.5 * float(torch.nn.utils.get_total_norm(grads)))

    def expected(self, inputs: TrainingInputs, dtype: torch.dtype) -> list[Tensor]:
        """Results of the first step, with the reference of attention."""
        inputs.restart()
        model = copy.deepcopy(inputs.model).to(dtype)
        model.zero_grad()
        with dk.use_backend("reference"):
            loss_of(model, inputs.tokens).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        norm = torch.stack([grad.double().norm() for grad in grads if grad is not None]).norm()
        factor = (inputs.max_norm() / (norm + 1e-6)).clamp(max=1.0)
        parts = [parameter.grad.flatten() for parameter in shown(model) if parameter.grad is not None]
        return [norm.to(dtype), _FIRST * factor.to(dtype) * torch.cat(parts)]

    def _model(self) -> torch.nn.Module:
        from dsaccel.modules import SlidingWindowLM

        heads = self.dim // 64 if self.dim % 64 == 0 else 2
        return SlidingWindowLM(self.vocabulary, self.dim, self.layers, heads, max_positions=self.length)


def _prepare_ours(problem: StepProblem, inputs: Any) -> Prepared:
    # Not at the top: the cases of dskernels need nothing of it.
    from dsaccel.amp import LossScaler

    loop: Loop = inputs.loop()
    scale = loop.loss_scale
    scaler = LossScaler(problem.device, scale, growth_interval=2**31 - 1, min_scale=scale)
    scaler.scale(torch.zeros((), device=problem.device))

    def run() -> Results:
        loop.backward(scaler.scale)
        norm = scaler.step(loop.optimizer, max_norm=loop.max_norm()).total_norm
        scaler.update()
        assert norm is not None
        return [norm]

    explanation = dk.explain(dk.grad_norm, [parameter.detach() for parameter in loop.parameters])
    return Prepared(run, our_notes(explanation), loop.comparable)


_OURS = Competitor(name=OURS, title="dsaccel.amp.LossScaler", refuses=lambda problem: None, prepare=_prepare_ours)


def _against_peers(name: str, problem: Any, baseline: str = OURS) -> Case:
    competitors = [*our_competitors(_OURS, problem.device), *competitors_for(OP, problem.device)]
    lanes = [Lane(name=c.name, title=c.title, problem=problem, competitor=c) for c in competitors]
    options: dict[str, Any] = cuda_options(problem, launch="eager") if problem.device == "cuda" else {}
    return Case(op=OP, name=name, title=str(problem), dtype=problem.dtype, lanes=lanes, baseline=baseline, **options)


def _of_lists(device: str, quick: bool) -> list[Case]:
    large, small, tiny = ((3, 5000), (20, 40), (50, 3)) if quick else ((32, 2**20), (2000, 2**12), (20_000, 2**8))
    lists = {"large": large, "small": small, "tiny": tiny}
    return [
        _against_peers(f"{name}-fp32", ListStepProblem(count=count, length=length, device=device))
        for name, (count, length) in lists.items()
    ]


def cases(quick: bool = False) -> list[Case]:
    """All cases. No target is set."""
    training = TrainingProblem(length=128)
    if quick:
        training = replace(training, length=10, dim=16, layers=2, vocabulary=30)
    return [*_of_lists("cpu", quick), _against_peers("training-fp32", training, baseline="unclipped")]


def cuda_cases(quick: bool = False) -> list[Case]:
    """The lists on a GPU."""
    return _of_lists("cuda", quick)
