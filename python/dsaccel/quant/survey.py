"""Finds the layers of a model, says which of them can be replaced, and replaces them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from dsaccel.modules import WindowMultiheadAttention
from dsaccel.quant.arguments import Filter
from dsaccel.quant.embedding import QuantizedEmbedding
from dsaccel.quant.linear import QuantizedLinear
from dsaccel.quant.report import LayerReport, QuantizationReport, bytes_of
from dskernels.checks import wrong_type

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A hook of a call goes on being called with the new module; the dictionaries move, so that handles go on removing.
_CALL_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


@dataclass
class Layer:
    """A module with a matrix of weights, and all places where it stands.

    Attributes:
        module: the module.
        names: as in ``model.named_modules(remove_duplicate=False)``.
        places: the modules that hold it, each with the name of the attribute.
        sharers: other modules that have its ``weight``, by name.
    """

    module: nn.Module
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    sharers: dict[str, nn.Module] = field(default_factory=dict)


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers that a report lists: those with a matrix of weights of their own, quantized ones included.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "an nn.Module", model)
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[nn.Module, Layer] = {}
    owners: dict[int, dict[nn.Module, str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), {}).setdefault(module, name)
        if not _is_layer(module):
            continue
        layer = layers.setdefault(module, Layer(module))
        layer.names.append(name)
        if name:
            parent, _, attribute = name.rpartition(".")
            layer.places.append((modules[parent], attribute))
    for module, layer in layers.items():
        weight = module._parameters.get("weight")
        if weight is not None:
            layer.sharers = {name: other for other, name in owners[id(weight)].items() if other is not module}
    return list(layers.values())


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, (nn.Linear, nn.Embedding, QuantizedLinear, QuantizedEmbedding)):
        return True
    if isinstance(module, parametrize.ParametrizationList):
        # Its layer is listed.
        return False
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return any(nn.parameter.is_lazy(parameter) or parameter.dim() > 1 for parameter in own)


def why_kept(layer: Layer, base: type[nn.Module], filter: Filter | None) -> str | None:
    """The reason why a layer cannot take the place of one of class ``base``, `nn.Linear` or `nn.Embedding`; or None."""
    module = layer.module
    reason = _why_other(module, base) or _why_not_forward(layer, base) or _why_not_plain(module)
    if reason is not None:
        return reason
    if not layer.places:
        return f"it is the model itself, which has no parent; see Quantized{base.__name__}.from_{base.__name__.lower()}"
    if filter is not None:
        for name in layer.names:
            if not filter(name, module):
                return "the filter says so" + (f" of {name}" if len(layer.names) > 1 else "")
    return None


def _why_other(module: nn.Module, base: type[nn.Module]) -> str | None:
    if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
        return "it is quantized already"
    if isinstance(module, LazyModuleMixin) or any(nn.parameter.is_lazy(p) for p in module.parameters(False)):
        return "it is lazy and has no weight yet; call the model once first"
    if isinstance(module, base):
        return None
    if isinstance(module, _CONVOLUTIONS):
        return "convolutions stay in floating point"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embeddings stay in floating point"
    if isinstance(module, nn.MultiheadAttention):
        return "the weights of its input projections are parameters of its own, no layers"
    return f"its class, {type(module).__name__}, has weights of its own that no nn.{base.__name__} computes"


def _why_not_forward(layer: Layer, base: type[nn.Module]) -> str | None:
    # What replaces a layer replaces its forward. Whoever reads the weight past it would not be served.
    module = layer.module
    if parametrize.is_parametrized(module):
        return "it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    if "forward" in vars(module):
        return "its forward was replaced by another function"
    if type(module).forward is not base.forward:
        return f"its class, {type(module).__name__}, has a forward of its own"
    for parent, attribute in layer.places:
        # Subclasses may call the forward of their base; that one is known not to.
        if isinstance(parent, nn.MultiheadAttention) and not isinstance(parent, WindowMultiheadAttention):
            return f"nn.MultiheadAttention reads the weight of its {attribute} past the layer's forward"
    return None


def _why_not_plain(module: nn.Module) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter, but computed from others"
    more = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    if more:
        return f"it has {', '.join(sorted(more))} beside weight and bias, which would be lost"
    for name in _STATE_HOOKS:
        if getattr(module, name, None):
            return "it has hooks of its state dict, which would be lost"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    if weight.device.type != "meta" and not bool(weight.isfinite().all()):
        return f"its weight has {int((~weight.isfinite()).sum())} values that are not finite"
    return None


def avoid_fused_layers(model: nn.Module) -> None:
    """Keeps torch's encoder layers from their fused kernel for inference where it would read weights that it finds no
    more, or take them past the layers that stand for them."""
    unfused = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not (
            _is_plain_linear(module.linear1) and _is_plain_linear(module.linear2)
        ):
            # The fused kernel is only for these two activations; forward itself reads `activation`.
            module.activation_relu_or_gelu = 0
            unfused.add(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not unfused.isdisjoint(module.modules()):
            # Nested tensors are for the fused kernel alone.
            module.use_nested_tensor = False


def _is_plain_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def notes_on_sharing(chosen: list[Layer]) -> dict[str, str]:
    """What to say of each of the layers that are to be replaced, by its name, where others have its weight."""
    modules = {layer.module for layer in chosen}
    notes = {}
    for layer in chosen:
        keepers = [name for name, module in layer.sharers.items() if module not in modules]
        others = [name for name in layer.sharers if name not in keepers]
        parts = [f"tied to {', '.join(others)}"] if others else []
        if keepers:
            size = layer.module._parameters["weight"].nbytes  # type: ignore[union-attr]
            parts.append(f"tied to {', '.join(keepers)}, which keeps its {size} bytes of weight")
        notes[layer.names[0]] = "; ".join(parts)
    return notes


class Recorder:
    """Replaces layers, and collects what the report says."""

    def __init__(self, model: nn.Module, layers: list[Layer]) -> None:
        self._model = model
        self._order = [layer.names[0] for layer in layers]
        self._bytes_before = bytes_of(model)
        self._entries: dict[str, LayerReport] = {}

    def kept(self, layer: Layer, reason: str) -> None:
        """Notes that ``layer`` stays, and why."""
        self._enter(layer, layer.module, None, reason)

    def replace(self, layer: Layer, new: nn.Module, became: str, note: str = "") -> None:
        """Puts ``new`` wherever ``layer`` stands, with the hooks and the mode of what stood there."""
        old = layer.module
        new.train(old.training)
        fresh = nn.Module()
        for name in _CALL_HOOKS:
            # Moved, not shared: the old layer may live on inside the new one.
            setattr(new, name, getattr(old, name))
            setattr(old, name, getattr(fresh, name))
        for parent, attribute in layer.places:
            setattr(parent, attribute, new)
        also = f"also {', '.join(layer.names[1:])}" if len(layer.names) > 1 else ""
        self._enter(layer, new, became, "; ".join(part for part in (also, note) if part))
        # Lets go of the old one.
        layer.module = new

    def report(self) -> QuantizationReport:
        """Of all layers that the model had."""
        layers = tuple(self._entries[name] for name in self._order)
        return QuantizationReport(layers, self._bytes_before, bytes_of(self._model))

    def _enter(self, layer: Layer, now: nn.Module, became: str | None, reason: str) -> None:
        name, kind = layer.names[0], type(layer.module).__name__
        self._entries[name] = LayerReport(name, kind, became, reason, bytes_of(layer.module), bytes_of(now))


def sort_out(model: nn.Module, why: Callable[[Layer], str | None]) -> tuple[list[Layer], Recorder]:
    """The layers of ``model`` that are to be replaced, for which ``why`` gives no reason; the others are recorded.

    All are judged before the first is replaced, so that a filter that raises leaves the model as it was.
    """
    layers = layers_of(model)
    recorder = Recorder(model, layers)
    chosen = []
    for layer in layers:
        reason = why(layer)
        if reason is None:
            chosen.append(layer)
        else:
            recorder.kept(layer, reason)
    return chosen, recorder


def replace_linears(
    model: nn.Module, make: Callable[[nn.Linear, str], nn.Module], became: str, filter: Filter | None
) -> QuantizationReport:
    """Replaces each `nn.Linear` that can be by ``make(linear, name)``, over the same parameters."""
    chosen, recorder = sort_out(model, lambda layer: why_kept(layer, nn.Linear, filter))
    for layer in chosen:
        linear: Any = layer.module
        recorder.replace(layer, make(linear, layer.names[0]), became)
    avoid_fused_layers(model)
    return recorder.report()
