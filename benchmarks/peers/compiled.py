"""Swin attention in torch's own operators under ``torch.compile``, in its default mode: by hand, and torchvision's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._torchvision import swin_transformer, why_no_torchvision
from benchmarks.peers._trials import fastest
from benchmarks.peers._windows import eager_attention, region_mask

if TYPE_CHECKING:
    from benchmarks.ops import swin_attention, swin_attention_layer, swin_attention_model

_MODE = {"mode": "default"}


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


def _prepare(problem: swin_attention.SwinProblem, inputs: swin_attention.Inputs) -> Prepared:
    # Every case compiles anew; what earlier ones left behind would count against Dynamo's limit of recompilations.
    torch._dynamo.reset()
    forms: Mapping[str, Callable[..., Any]] = {"as it is": eager_attention(problem)}
    if problem.shift and problem.device == "cuda":
        # No number is slow there, and each form takes long to compile.
        forms = {"mask kept": _with_mask(problem, inputs, -100.0)}
    elif problem.shift:
        # Made in the graph, the mask is computed for each head and image again.
        forms = {
            "mask made": eager_attention(problem),
            "mask kept": _with_mask(problem, inputs, -100.0),
            "mask of -inf kept": _with_mask(problem, inputs, -torch.inf),
        }
    runs = {name: inputs.step(_compile(form)) for name, form in forms.items()}
    if len(runs) == 1:
        ((form, run),) = runs.items()
        return Prepared(run, {**_MODE, "form": form})
    best = fastest(runs)
    return Prepared(runs[best], {**_MODE, "form": best, "forms_tried": list(runs)})


def _with_mask(problem: swin_attention.SwinProblem, inputs: swin_attention.Inputs, masked: float) -> Callable[..., Any]:
    return eager_attention(problem, region_mask(problem, inputs.qkv, masked))


def _prepare_layer(problem: swin_attention_layer.LayerProblem, inputs: swin_attention_layer.Inputs) -> Prepared:
    torch._dynamo.reset()
    form = problem.by_torchvision(swin_transformer().shifted_window_attention)
    return Prepared(inputs.step(_compile(form)), _MODE)


def _prepare_model(problem: swin_attention_model.ModelProblem, inputs: swin_attention_model.Inputs) -> Prepared:
    torch._dynamo.reset()
    model = inputs.copy()
    prepared = inputs.prepared(model, _compile(model))
    return Prepared(prepared.run, _MODE, prepared.comparable)


COMPETITORS = {
    "swin_attention": Competitor(
        name="compiled", title="torch.compile of eager", refuses=lambda problem: None, prepare=_prepare
    ),
    "swin_attention_layer": Competitor(
        name="compiled",
        title="torchvision, torch.compile",
        refuses=why_no_torchvision,
        prepare=_prepare_layer,
    ),
    "swin_attention_model": Competitor(
        name="compiled", title="torchvision, torch.compile", refuses=why_no_torchvision, prepare=_prepare_model
    ),
}
