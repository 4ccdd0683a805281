"""Quantizes the linear layers of a model, in place."""

from __future__ import annotations

from typing import Any

from torch import nn

import dskernels as dk
from dsaccel.quant.arguments import Filter, check_filter, check_options
from dsaccel.quant.embedding import QuantizedEmbedding
from dsaccel.quant.linear import QuantizedLinear
from dsaccel.quant.report import QuantizationReport
from dsaccel.quant.survey import Layer, avoid_fused_layers, notes_on_sharing, sort_out, why_kept
from dskernels.checks import wrong_type, wrong_value


def quantize_(
    model: nn.Module,
    scheme: str,
    *,
    filter: Filter | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    embeddings: bool = False,
) -> QuantizationReport:
    """Replaces each `nn.Linear` in ``model`` by a `QuantizedLinear`, in place::

        print(quantize_(model, "int8_dynamic"))

    The report lists every layer that has a matrix of weights: what it is now, or why it was kept. Kept are, beside what
    the filter says: whatever is not computed by `nn.Linear`'s own forward (convolutions, embeddings, recurrent layers,
    subclasses with a forward of their own, the output projection of `nn.MultiheadAttention`); layers whose weight is
    parametrized, computed by a hook, not finite, or no plain tensor; layers that hold more than a weight and a bias,
    or hooks of their state dict.

    A layer that stands in several places is replaced by the same new one in all. Hooks of its forward and backward go
    along. Layers that share one weight share one quantized weight. An embedding that is tied to the head keeps its
    floating point weight, unless ``embeddings`` says otherwise; from then on training does not tie them any more.
    torch's encoder layers leave their fused kernel for inference, which reads weights past the layers.

    A layer is freed once it is replaced, unless someone else holds it: memory never holds more than the model and one
    quantized layer. An optimizer made before goes on holding the old parameters; make it afterwards.

    Args:
        model: any module. Layers that it holds other than as submodules are not found.
        scheme: as in `dskernels.quantize_weight`, but for ``int8_static``, which takes `prepare` and `convert`.
        filter: ``filter(name, module)`` says whether to replace a layer; of one that stands in several places, it is
            asked for each name, and one no is enough. Default: all.
        group_size, symmetric: as in `dskernels.quantize_weight`.
        embeddings: replace each `nn.Embedding`, too, by a `QuantizedEmbedding` with int8 rows. One that is tied to a
            linear layer shares its tensors if ``scheme`` is of int8. Default: False.

    Returns:
        What became of each layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such scheme, or an argument does not fit it.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, section 2.
    """
    check_options(scheme, group_size, symmetric)
    check_filter(filter)
    if scheme == "int8_static":
        raise wrong_value(
            "scheme", "one that needs no calibration (for int8_static: prepare and convert)", repr(scheme)
        )
    if not isinstance(embeddings, bool):
        raise wrong_type("embeddings", "True or False", embeddings)
    chosen, recorder = sort_out(model, lambda layer: _why_kept(layer, filter, embeddings))
    notes = notes_on_sharing(chosen)
    # By parameter: of those that several layers share, for as long as this function runs.
    weights: dict[Any, dk.QuantizedWeight] = {}
    # Embeddings come last, and take the codes that a linear layer has got.
    for layer in sorted(chosen, key=lambda layer: isinstance(layer.module, nn.Embedding)):
        module: Any = layer.module
        if isinstance(module, nn.Embedding):
            new: nn.Module = _quantized_embedding(layer, weights)
            recorder.replace(layer, new, QuantizedEmbedding.scheme, notes[layer.names[0]])
            continue
        weight = weights.get(module.weight)
        if weight is None:
            weight = dk.quantize_weight(module.weight, scheme, group_size=group_size, symmetric=symmetric)
        if layer.sharers:
            weights[module.weight] = weight
        new = QuantizedLinear(weight, None if module.bias is None else module.bias.detach().clone())
        recorder.replace(layer, new, scheme, notes[layer.names[0]])
    avoid_fused_layers(model)
    return recorder.report()


def _why_kept(layer: Layer, filter: Filter | None, embeddings: bool) -> str | None:
    module = layer.module
    if not isinstance(module, nn.Embedding):
        return why_kept(layer, nn.Linear, filter)
    if not embeddings:
        return "embeddings stay in floating point unless embeddings=True"
    if module.max_norm is not None:
        return "it renormalises its rows when they are looked up (max_norm)"
    return why_kept(layer, nn.Embedding, filter)


def _quantized_embedding(layer: Layer, weights: dict[Any, dk.QuantizedWeight]) -> QuantizedEmbedding:
    embedding: Any = layer.module
    weight = weights.get(embedding.weight)
    if weight is None or not weight.scheme.startswith("int8"):
        weight = dk.quantize_weight(embedding.weight, QuantizedEmbedding.scheme)
    if layer.sharers:
        weights[embedding.weight] = weight
    return QuantizedEmbedding(weight, padding_idx=embedding.padding_idx, dtype=embedding.weight.dtype)
