"""What becomes of each tensor of a checkpoint, settled before any is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dsaccel.quant.checkpoints._files import TensorInfo, shortened
from dsaccel.quant.checkpoints._formats import Format, Recipe
from dskernels.checks import shape_of, wrong_value

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Slot:
    """A parameter or buffer of a model, and all its places; tied ones have several."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    loaded: Tensor | None = None


@dataclass
class Layer:
    """An `nn.Linear` that becomes quantized: all its names in the model, and what has been read of it so far."""

    module: nn.Linear
    names: list[str]
    recipe: Recipe
    waiting: set[str]
    found: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Plan:
    """Where the tensors of a checkpoint go, by their names in it."""

    layers: dict[str, tuple[Layer, str]] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    floating: list[str] = field(default_factory=list)


def plan_of(
    model: nn.Module, infos: Mapping[str, TensorInfo], format: Format, rename: Callable[[str], str | None] | None
) -> Plan:
    """The plan for a checkpoint with the tensors ``infos``.

    Raises:
        ValueError: tensors are missing or left over, or one does not fit its place.
    """
    by_module: dict[str, dict[str, str]] = defaultdict(dict)
    for name in infos:
        new = rename(name) if rename is not None else name
        if new is None:
            continue
        module_name, _, attribute = new.rpartition(".")
        if attribute in by_module[module_name]:
            raise wrong_value("rename", "a name of its own for each tensor", f"{new} for two")
        by_module[module_name][attribute] = name
    slots = _slots_of(model)
    plan, missing = Plan(), []
    for module, names in _linears_of(model):
        layer = _layer_of(module, names, by_module, infos, format)
        if layer is None:
            plan.floating += names
            continue
        own = next(by_module[name] for name in names if by_module.get(name))
        prefix = next(iter(own.values())).rpartition(".")[0]
        missing += [f"{prefix}.{attribute}" for attribute in sorted(layer.waiting - own.keys())]
        plan.layers |= {own[attribute]: (layer, attribute) for attribute in layer.waiting & own.keys()}
        for slot in (slots[f"{name}.{attribute}"] for name in names for attribute in tensors_of_module(module)):
            slot.places = [place for place in slot.places if place[0] is not module]
    for name, slot in slots.items():
        if not slot.places:
            continue
        module_name, _, attribute = name.rpartition(".")
        file_name = by_module.get(module_name, {}).get(attribute)
        if file_name is not None and file_name not in plan.layers:
            _check_plain(file_name, infos[file_name], slot)
            plan.slots[file_name] = slot
    filled = {id(slot) for slot in plan.slots.values()}
    missing += [
        name for name, slot in slots.items() if slot.places and id(slot) not in filled and name == slot.names[0]
    ]
    known = plan.layers.keys() | plan.slots.keys()
    unexpected = [name for attributes in by_module.values() for name in attributes.values() if name not in known]
    if missing or unexpected:
        parts = [
            f"{len(names)} {kind} ({shortened(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise wrong_value("checkpoint", "the tensors of the model", "; ".join(parts))
    _check_no_meta_left(model)
    return plan


def tensors_of_module(module: nn.Module) -> dict[str, Tensor]:
    # What a state dict holds of a module itself.
    found = {**module._parameters, **module._buffers}
    return {
        name: tensor
        for name, tensor in found.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _slots_of(model: nn.Module) -> dict[str, Slot]:
    slots: dict[int, Slot] = {}
    named: dict[str, Slot] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in tensors_of_module(module).items():
            slot = slots.setdefault(id(tensor), Slot(tensor))
            name = f"{module_name}.{attribute}".removeprefix(".")
            slot.names.append(name)
            named[name] = slot
            if (module, attribute) not in slot.places:
                slot.places.append((module, attribute))
    return named


def _linears_of(model: nn.Module) -> list[tuple[nn.Linear, list[str]]]:
    names: dict[nn.Linear, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names[module].append(name)
    return list(names.items())


def _layer_of(
    module: nn.Linear,
    names: list[str],
    by_module: Mapping[str, dict[str, str]],
    infos: Mapping[str, TensorInfo],
    format: Format,
) -> Layer | None:
    own = next((by_module[name] for name in names if by_module.get(name)), {})
    if not own:
        return None
    file_layer = next(iter(own.values())).rpartition(".")[0]
    classes = [kind.__name__ for kind in type(module).__mro__]
    try:
        recipe = format.recipe(file_layer, classes, {attribute: infos[name] for attribute, name in own.items()})
        if recipe is None:
            return None
        reason = _why_not_replaced(module, names)
        if reason is not None:
            raise wrong_value("module", "one that can become a QuantizedLinear", reason)
    except ValueError as error:
        raise ValueError(f"{file_layer}: {error}") from error
    waiting = recipe.required | (recipe.optional & own.keys())
    if module.bias is not None or "bias" in own:
        waiting = waiting | {"bias"}
    return Layer(module, names, recipe, waiting)


def _why_not_replaced(module: nn.Linear, names: list[str]) -> str | None:
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, which may compute something else than nn.Linear"
    if "" in names:
        return "the model itself, which has no parent"
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return "one with hooks, which would be lost"
    return None


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
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
    ]
    if left:
        raise wrong_value(
            "model", "no meta buffers that no checkpoint holds (build their modules elsewhere)", shortened(left)
        )
