"""Puts the quantized layers into a model that was calibrated or trained for them."""

from __future__ import annotations

from typing import Any

from torch import nn

import dskernels as dk
from dsaccel.quant.calibration import ObservedLinear
from dsaccel.quant.linear import QuantizedLinear
from dsaccel.quant.qat import QATLinear
from dsaccel.quant.report import QuantizationReport
from dsaccel.quant.survey import Layer, notes_on_sharing, sort_out, why_kept
from dskernels.checks import wrong_value


def convert(model: nn.Module) -> QuantizationReport:
    """Replaces what `prepare` and `prepare_qat` have put into ``model`` by `QuantizedLinear`, in place.

    Args:
        model: after some batches of calibration, or after training.

    Returns:
        What became of each layer.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: there is nothing to convert; a layer saw no batch, or nothing but zeros; its observer has a step for
            each channel, where ``int8_static`` takes one for all of a tensor; a weight is not finite. The message
            names the layers, and the model stays as it was.
    """
    chosen, recorder = sort_out(model, _why_left)
    if not chosen:
        raise wrong_value("model", "layers of prepare or prepare_qat in it", "none")
    reasons = {layer.names[0]: _why_unready(layer.module) for layer in chosen}
    unready = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    if unready:
        raise wrong_value("model", "layers that are ready", "; ".join(unready))
    notes = notes_on_sharing(chosen)
    for layer in chosen:
        new = _converted(layer.module)
        recorder.replace(layer, new, new.scheme, notes[layer.names[0]])
    return recorder.report()


def _why_left(layer: Layer) -> str | None:
    if isinstance(layer.module, (ObservedLinear, QATLinear)):
        return None if layer.places else "it is the model itself, which has no parent"
    return why_kept(layer, nn.Linear, None) or "it was not prepared"


def _why_unready(module: Any) -> str | None:
    weight, observer = module.weight, module.observer
    if weight.device.type != "meta" and not bool(weight.isfinite().all()):
        return "its weight is not finite"
    if observer is None:
        return None
    if observer.per_channel:
        kind = type(observer).__name__
        return f"{kind} has a step for each channel, and int8_static takes one for all of a tensor"
    if not observer.batches:
        return "it has seen no batch"
    clip = float(observer.clip())
    return None if 0 < clip < float("inf") else f"what it has seen gives the clip {clip}"


def _converted(module: Any) -> QuantizedLinear:
    if isinstance(module, ObservedLinear):
        weight = dk.quantize_weight(module.weight, "int8_static", input_scale=module.observer.step())
    else:
        weight = module.quantized_weight()
    return QuantizedLinear(weight, None if module.bias is None else module.bias.detach().clone())
