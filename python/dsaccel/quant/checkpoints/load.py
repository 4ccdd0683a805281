"""Loads quantized checkpoints of others into a model, a file at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dskernels as dk
from dsaccel.quant.checkpoints._files import TensorInfo, files_of, infos_of, quantization_config_of, tensors_of
from dsaccel.quant.checkpoints._formats import format_of
from dsaccel.quant.checkpoints._plan import Layer, Slot, plan_of
from dsaccel.quant.linear import QuantizedLinear
from dskernels.checks import wrong_type, wrong_value


class LoadProgress(NamedTuple):
    """How far `load_quantized_` is.

    Attributes:
        tensor: what was read last.
        file, files: the number of its file, from 1 on, and how many there are.
        last_of_file: whether the file is done.
        done, total: bytes.
    """

    tensor: str
    file: int
    files: int
    last_of_file: bool
    done: int
    total: int


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_quantized_` did; ``print`` lists it.

    Attributes:
        format: ``"gptq"``, ``"awq"``, ``"compressed-tensors"`` or ``"fp8"``.
        quantized: name and scheme of every layer that became a `QuantizedLinear`.
        floating: names of the `nn.Linear` layers whose weights are not quantized.
    """

    format: str
    quantized: dict[str, str]
    floating: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.format}: {len(self.quantized)} layers quantized, {len(self.floating)} floating"]
        lines += [f"  quantized {name}: {scheme}" for name, scheme in self.quantized.items()]
        lines += [f"  floating {name}" for name in self.floating]
        return "\n".join(lines)


def print_progress(progress: LoadProgress) -> None:
    """A line on the standard error for each file."""
    if progress.last_of_file:
        done, total = progress.done / 1e9, progress.total / 1e9
        print(f"{progress.file} of {progress.files} files loaded, {done:.2f} of {total:.2f} GB", file=sys.stderr)


def load_quantized_(
    model: nn.Module,
    source: str | Path,
    *,
    format: str | None = None,
    quantization_config: dict[str, Any] | None = None,
    rename: Callable[[str], str | None] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[LoadProgress], None] | None = print_progress,
) -> LoadedCheckpoint:
    """Loads a checkpoint in GPTQ's, AWQ's, compressed-tensors' or DeepSeek's format into a float model, in place.

    Each `nn.Linear` whose weight the checkpoint holds in codes is replaced by a `QuantizedLinear` that stands for
    exactly the same weight; all other tensors are loaded as they are, with the dtype that they have in the checkpoint.
    One file is open at a time and read tensor by tensor: with a model on the meta device, memory never holds more than
    the quantized model and one file.

    All names, shapes and dtypes are checked before anything is loaded. What shows only in the values raises later, and
    then leaves a part of the model loaded.

    Args:
        model: as the checkpoint's author built it, but in floats; on the meta device, or any other.
        source: a folder with ``config.json`` and safetensors files (with their index, where there are several); or one
            such file, with or without ``config.json`` beside it.
        format: ``"gptq"`` (with the version of the configuration), ``"gptq_v1"``, ``"gptq_v2"``, ``"awq"``,
            ``"compressed-tensors"`` or ``"fp8"``. Default: what the configuration says.
        quantization_config: the configuration, in place of that of ``source``.
        rename: from the name of a tensor in the checkpoint to that in ``model``; None for those to leave out. Lists of
            layers in the configuration are of the checkpoint's names. Default: names are the same.
        device: of what is on the meta device in ``model``; the rest stays where it is. Default: ``"cpu"``.
        progress: called after each tensor. Default: a line on the standard error for each file; None: nothing.

    Returns:
        Which layers are quantized now, and which are not.

    Raises:
        TypeError: ``model`` is no module.
        ImportError: safetensors is not installed (``pip install "dskernels[quant]"``).
        FileNotFoundError: there are no such files.
        ValueError: the format is unknown; tensors are missing or left over; a layer's weight is one that no scheme can
            hold exactly (the message names the layer).
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a module", model)
    source = Path(source)
    files = files_of(source)
    config = quantization_config_of(source) if quantization_config is None else quantization_config
    chosen = format_of(format, config)
    infos = infos_of(files)
    plan = plan_of(model, infos, chosen, rename)
    wanted = {name: info for name, info in infos.items() if name in plan.layers or name in plan.slots}
    total, done = sum(map(_bytes_of, wanted.values())), 0
    quantized: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        names = [name for name, info in wanted.items() if info.file == file]
        for name, tensor in zip(names, tensors_of(file, names), strict=True):
            if name in plan.slots:
                _fill(plan.slots.pop(name), name, tensor, device)
            else:
                layer, attribute = plan.layers.pop(name)
                layer.found[attribute] = tensor
                if layer.found.keys() == layer.waiting:
                    quantized |= dict.fromkeys(layer.names, _replace(model, layer, name.rpartition(".")[0], device))
            done += _bytes_of(wanted[name])
            if progress is not None:
                progress(LoadProgress(name, number, len(files), name == names[-1], done, total))
        # What waits for tensors of a later file must not keep this one open.
        for layer in {id(layer): layer for layer, _ in plan.layers.values()}.values():
            layer.found = {name: tensor.clone() for name, tensor in layer.found.items()}
    return LoadedCheckpoint(chosen.name, quantized, tuple(plan.floating))


def _bytes_of(info: TensorInfo) -> int:
    return prod(info.shape) * (0 if info.dtype is None else info.dtype.itemsize)


def _place(tensor: Tensor, device: torch.device | str) -> torch.device:
    return torch.device(device) if tensor.is_meta else tensor.device


def _fill(slot: Slot, name: str, tensor: Tensor, device: torch.device | str) -> None:
    if slot.loaded is not None:
        if not torch.equal(slot.loaded, tensor.to(slot.loaded.device)):
            raise wrong_value(
                name, f"the values of {' and '.join(slot.names)}, which are one tensor in the model", "others"
            )
        return
    new = torch.empty_like(tensor, device=_place(slot.tensor, device)).copy_(tensor)
    if isinstance(slot.tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=slot.tensor.requires_grad)
    for module, attribute in slot.places:
        places: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
        places[attribute] = new
    # What was there before is held no longer.
    slot.tensor = slot.loaded = new


def _replace(model: nn.Module, layer: Layer, file_layer: str, device: torch.device | str) -> str:
    # The scheme of the layer that stands in its place now.
    tensors, layer.found = layer.found, {}
    bias = tensors.pop("bias", None)
    try:
        weight = layer.recipe.build(tensors)
        module = layer.module
        expected = (module.out_features, module.in_features)
        if (weight.out_features, weight.in_features) != expected:
            raise wrong_value("weight", f"shape {list(expected)}", [weight.out_features, weight.in_features])
        if bias is not None and module.bias is None:
            # Some writers store a bias of zeros for every layer.
            if bool(bias.any()):
                raise wrong_value("bias", "none, or zeros, as the model has none", "others")
            bias = None
        place = _place(module.weight, device)
        weight = _owned(weight, tensors, place)
        bias = None if bias is None else torch.empty_like(bias, device=place).copy_(bias)
        new = QuantizedLinear(weight, bias).train(module.training)
    except ValueError as error:
        raise ValueError(f"{file_layer}: {error}") from error
    for name in layer.names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new)
    return weight.scheme


def _owned(weight: dk.QuantizedWeight, read: dict[str, Tensor], device: torch.device) -> dk.QuantizedWeight:
    # On its device, and without tensors that are views of a file.
    files = {tensor.untyped_storage().data_ptr() for tensor in read.values()}

    def owned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.to(device)
        return moved.clone() if moved.untyped_storage().data_ptr() in files else moved

    return dk.QuantizedWeight(*map(owned, weight))
