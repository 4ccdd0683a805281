"""torchvision's own function and model of Swin, eager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.case import Competitor, Prepared
from benchmarks.peers._torchvision import swin_transformer, why_no_torchvision

if TYPE_CHECKING:
    from benchmarks.ops import swin_attention_layer, swin_attention_model


def _prepare_layer(problem: swin_attention_layer.LayerProblem, inputs: swin_attention_layer.Inputs) -> Prepared:
    return Prepared(inputs.step(problem.by_torchvision(swin_transformer().shifted_window_attention)))


def _prepare_model(problem: swin_attention_model.ModelProblem, inputs: swin_attention_model.Inputs) -> Prepared:
    model = inputs.copy()
    return inputs.prepared(model, model)


COMPETITORS = {
    "swin_attention_layer": Competitor(
        name="torchvision",
        title="torchvision: shifted_window_attention",
        refuses=why_no_torchvision,
        prepare=_prepare_layer,
    ),
    "swin_attention_model": Competitor(
        name="torchvision", title="torchvision: swin_t", refuses=why_no_torchvision, prepare=_prepare_model
    ),
}
