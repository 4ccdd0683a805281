"""``GradScaler.unscale_`` and ``clip_grad_norm_``: what training loops do with the gradients of mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.case import Competitor, Prepared, Results
from benchmarks.peers._scaler import grad_scaler, unscale_
from benchmarks.peers._trials import fastest

if TYPE_CHECKING:
    from benchmarks.ops.clip_and_scale import ClipProblem, Inputs
    from benchmarks.ops.clip_and_scale_step import Loop, StepProblem

_FORMS = {"foreach": True, "for loop": False}


def _prepare(problem: ClipProblem, inputs: Inputs) -> Prepared:
    from benchmarks.ops.clip_and_scale import LOSS_SCALE

    mine = inputs.turning()
    parameters = [torch.nn.Parameter(torch.empty_like(grad)) for grad in mine.grads]
    for parameter, grad in zip(parameters, mine.grads, strict=True):
        parameter.grad = grad
    optimizer, scaler = torch.optim.SGD(parameters), grad_scaler(LOSS_SCALE, problem.device)

    def clipping(foreach: bool) -> Callable[[float], Tensor]:
        def clip(max_norm: float) -> Tensor:
            unscale_(scaler, optimizer, again=True)
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=foreach)

        return clip

    runs = {name: mine.step(clipping(foreach)) for name, foreach in _FORMS.items()}
    best = fastest(runs)
    mine.restart()
    notes: dict[str, Any] = {"form": best, "forms_tried": list(runs)}
    if problem.dtype == "fp16":
        notes["allow_fp16"] = "True, which the public unscale_ refuses"
    return Prepared(runs[best], notes, mine.comparable)


def _prepare_step(problem: StepProblem, inputs: Any) -> Prepared:
    loop: Loop = inputs.loop()
    scaler = grad_scaler(loop.loss_scale, problem.device)

    def stepping(foreach: bool) -> Callable[[], Results]:
        def run() -> Results:
            loop.backward(scaler.scale)
            unscale_(scaler, loop.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(loop.parameters, loop.max_norm(), foreach=foreach)
            scaler.step(loop.optimizer)
            scaler.update()
            return [norm]

        return run

    runs = {name: stepping(foreach) for name, foreach in _FORMS.items()}
    best = fastest(runs)
    loop.restart()
    return Prepared(runs[best], {"form": best, "forms_tried": list(runs)}, loop.comparable)


_TITLE = "GradScaler.unscale_ + clip_grad_norm_"
COMPETITORS = {
    "clip_and_scale": Competitor(name="unscale_clip", title=_TITLE, refuses=lambda problem: None, prepare=_prepare),
    "clip_and_scale_step": Competitor(
        name="unscale_clip", title=_TITLE, refuses=lambda problem: None, prepare=_prepare_step
    ),
}
