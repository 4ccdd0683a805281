"""What becomes of each tensor of a checkpoint, settled before any is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dsaccel.quant.checkpoints._files import TensorInfo, shortened
from dsaccel.quant.checkpoints._formats import Format, Recipe
from dsaccel.quant.survey import Layer, _why_not_forward
from dskernels.checks import shape_of, wrong_value

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Slot:
    """A parameter or buffer of a model, and all its places; tied ones have several."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    loaded: Tensor | None = None


@dataclass
class QuantizedLayer:
    """An `nn.Linear` that becomes quantized: its name in the checkpoint, and what has been read of it so far."""

    layer: Layer
    file_name: str
    recipe: Recipe
    waiting: set[str]
    found: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Plan:
    """Where the tensors of a checkpoint go, by their names in it, and the layers that stay as they are."""

    layers: dict[str, tuple[QuantizedLayer, str]] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    floating: list[Layer] = field(default_factory=list)


def plan_of(
    model: nn.Module,
    layers: list[Layer],
    infos: Mapping[str, TensorInfo],
    format: Format,
    rename: Callable[[str], str | None] | None,
) -> Plan:
    """The plan for a checkpoint with the tensors ``infos``.

    Raises:
        ValueError: tensors are missing or left over, or one does not fit its place.
    """
    by_module = _by_module(infos, rename)
    plan, slots, missing = Plan(), _slots_of(model), []
    for layer in layers:
        own = next((by_module[name] for name in layer.names if by_module.get(name)), {})
        quantized = _quantized_layer_of(layer, own, infos, format)
        if quantized is None:
            plan.floating.append(layer)
            continue
        missing += [f"{quantized.file_name}.{name}" for name in sorted(quantized.waiting - own.keys())]
        plan.layers |= {own[name]: (quantized, name) for name in sorted(quantized.waiting & own.keys())}
        for attribute in tensors_of_module(layer.module):
            slot = slots[f"{layer.names[0]}.{attribute}"]
            slot.places = [place for place in slot.places if place[0] is not layer.module]
    filled = set()
    for name, slot in slots.items():
        module_name, _, attribute = name.rpartition(".")
        file_name = by_module.get(module_name, {}).get(attribute)
        if slot.places and file_name is not None and file_name not in plan.layers:
            _check_plain(file_name, infos[file_name], slot)
            plan.slots[file_name] = slot
            filled.add(id(slot))
    missing += [
        name for name, slot in slots.items() if slot.places and id(slot) not in filled and name == slot.names[0]
    ]
    known = plan.layers.keys() | plan.slots.keys()
    unexpected = [name for own in by_module.values() for name in own.values() if name not in known]
    if missing or unexpected:
        kinds = {"missing": missing, "unexpected": unexpected}
        got = [f"{len(names)} {kind} ({shortened(names)})" for kind, names in kinds.items() if names]
        raise wrong_value("checkpoint", "the tensors of the model", "; ".join(got))
    _check_no_meta_left(model)
    return plan


def tensors_of_module(module: nn.Module) -> dict[str, Tensor]:
    """What a state dict holds of ``module`` itself."""
    found = {**module._parameters, **module._buffers}
    return {
        name: tensor
        for name, tensor in found.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _by_module(
    infos: Mapping[str, TensorInfo], rename: Callable[[str], str | None] | None
) -> dict[str, dict[str, str]]:
    # By the name of a module, then by that of a tensor in it: the tensor's name in the checkpoint.
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in infos:
        new = rename(name) if rename is not None else name
        if new is None:
            continue
        module_name, _, attribute = new.rpartition(".")
        if attribute in found[module_name]:
            raise wrong_value("rename", "a name of its own for each tensor", f"{new} for two")
        found[module_name][attribute] = name
    return dict(found)


def _slots_of(model: nn.Module) -> dict[str, Slot]:
    slots: dict[int, Slot] = {}
    named: dict[str, Slot] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in tensors_of_module(module).items():
            slot = slots.setdefault(id(tensor), Slot(tensor))
            name = f"{module_name}.{attribute}".removeprefix(".")
            slot.names.append(name)
            named[name] = slot
            slot.places.append((module, attribute))
    return named


def _quantized_layer_of(
    layer: Layer, own: Mapping[str, str], infos: Mapping[str, TensorInfo], format: Format
) -> QuantizedLayer | None:
    if not own or not isinstance(layer.module, nn.Linear):
        return None
    file_name = next(iter(own.values())).rpartition(".")[0]
    classes = [kind.__name__ for kind in type(layer.module).__mro__]
    try:
        recipe = format.recipe(file_name, classes, {attribute: infos[name] for attribute, name in own.items()})
        if recipe is None:
            return None
        reason = _why_not_replaced(layer)
        if reason is not None:
            raise wrong_value("module", "one that can become a QuantizedLinear", f"one that cannot: {reason}")
    except ValueError as error:
        raise ValueError(f"{file_name}: {error}") from error
    waiting = recipe.required | (recipe.optional & own.keys())
    if layer.module.bias is not None or "bias" in own:
        waiting = waiting | {"bias"}
    return QuantizedLayer(layer, file_name, recipe, waiting)


def _why_not_replaced(layer: Layer) -> str | None:
    module = layer.module
    more = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    if more:
        return f"it has {', '.join(sorted(more))} beside weight and bias, which would be lost"
    return _why_not_forward(layer, nn.Linear) or (None if layer.places else "it is the model itself, without a parent")


def _check_plain(name: str, info: TensorInfo, slot: Slot) -> None:
    want = slot.tensor
    if info.dtype != want.dtype and not (info.dtype in _FLOATS and want.is_floating_point()):
        expected = "a floating point tensor" if want.is_floating_point() else str(want.dtype)
        raise wrong_value(name, f"{expected}, as it is not quantized", info.dtype)
    if info.shape != want.shape:
        raise wrong_value(name, f"shape {shape_of(want)}", list(info.shape))


def _check_no_meta_left(model: nn.Module) -> None:
    left = [
        f"{module_name}.{name}".removeprefix(".")
        for module_name, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and buffer is not None and buffer.is_meta
    ]
    if left:
        expected = "values in the buffers that no checkpoint holds (build their modules elsewhere)"
        raise wrong_value("model", expected, f"meta tensors: {shortened(left)}")
