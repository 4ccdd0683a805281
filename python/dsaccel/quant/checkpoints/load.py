"""Loads quantized checkpoints of others into a model, a file at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dskernels as dk
from dsaccel.quant.checkpoints._files import TensorInfo, files_of, infos_of, quantization_config_of, tensors_of
from dsaccel.quant.checkpoints._formats import format_of
from dsaccel.quant.checkpoints._plan import Plan, QuantizedLayer, Slot, plan_of
from dsaccel.quant.linear import QuantizedLinear
from dsaccel.quant.report import QuantizationReport
from dsaccel.quant.survey import Layer, Recorder, avoid_fused_layers, layers_of
from dskernels.checks import wrong_value


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


def print_progress(progress: LoadProgress) -> None:
    """A line on the standard error for each file that is read to its end, of which ``progress`` tells."""
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
) -> QuantizationReport:
    """Loads a checkpoint in GPTQ's, AWQ's, compressed-tensors' or DeepSeek's format into a float model, in place.

    Each `nn.Linear` whose weight the checkpoint holds in codes is replaced by a `QuantizedLinear` that stands for
    exactly the same weight; all other tensors are loaded as they are, with the dtype that they have in the checkpoint.
    One file is open at a time and read tensor by tensor: with a model on the meta device, memory never holds more than
    the quantized model and one file.

    All names are checked before anything is loaded, and the shapes and dtypes of what is not quantized. What shows only
    in a quantized layer itself raises when its turn comes, and then leaves a part of the model loaded.

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
        What became of each layer.

    Raises:
        TypeError: ``model`` is no module.
        ImportError: safetensors is not installed (``pip install "dskernels[quant]"``).
        FileNotFoundError: there are no such files.
        ValueError: the format is unknown; tensors are missing or left over; a layer's weight is one that no scheme can
            hold exactly (the message names the layer).
    """
    layers = layers_of(model)
    source = Path(source)
    files = files_of(source)
    config = quantization_config_of(source) if quantization_config is None else quantization_config
    chosen = format_of(format, config)
    infos = infos_of(files)
    plan = plan_of(model, layers, infos, chosen, rename)
    recorder = Recorder(model, layers)
    for layer in plan.floating:
        recorder.kept(layer, "the checkpoint has its weight in floating point")

    def replace(layer: Layer, new: QuantizedLinear) -> None:
        recorder.replace(layer, new, new.scheme, f"from {chosen.name}")

    _read(plan, files, infos, device, replace, progress)
    avoid_fused_layers(model)
    return recorder.report()


def _read(
    plan: Plan,
    files: list[Path],
    infos: Mapping[str, TensorInfo],
    device: torch.device | str,
    replace: Callable[[Layer, QuantizedLinear], None],
    progress: Callable[[LoadProgress], None] | None,
) -> None:
    names_in: dict[Path, list[str]] = {file: [] for file in files}
    for name in (*plan.slots, *plan.layers):
        names_in[infos[name].file].append(name)
    done, total = 0, sum(_bytes_of(infos[name]) for names in names_in.values() for name in names)
    for number, (file, names) in enumerate(names_in.items(), 1):
        for name, tensor in zip(names, tensors_of(file, names), strict=True):
            if name in plan.slots:
                _fill(plan.slots.pop(name), name, tensor, device)
            else:
                quantized, attribute = plan.layers.pop(name)
                quantized.found[attribute] = tensor
                if quantized.found.keys() == quantized.waiting:
                    replace(quantized.layer, _made(quantized, device))
            done += _bytes_of(infos[name])
            if progress is not None:
                progress(LoadProgress(name, number, len(files), name == names[-1], done, total))
        # What waits for tensors of a later file must not keep this one open.
        for quantized in {id(layer): layer for layer, _ in plan.layers.values() if layer.found}.values():
            quantized.found = {attribute: tensor.clone() for attribute, tensor in quantized.found.items()}


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


def _made(quantized: QuantizedLayer, device: torch.device | str) -> QuantizedLinear:
    tensors, quantized.found = quantized.found, {}
    bias = tensors.pop("bias", None)
    linear: Any = quantized.layer.module
    try:
        weight = quantized.recipe.build(tensors)
        sizes = [weight.out_features, weight.in_features]
        if sizes != [linear.out_features, linear.in_features]:
            raise wrong_value("weight", f"shape {[linear.out_features, linear.in_features]}", sizes)
        if bias is not None and linear.bias is None:
            # Some writers store a bias of zeros for every layer.
            if bool(bias.any()):
                raise wrong_value("bias", "none, or zeros, as the model has none", "others")
            bias = None
        place = _place(linear.weight, device)
        bias = None if bias is None else torch.empty_like(bias, device=place).copy_(bias)
        return QuantizedLinear(_owned(weight, tensors, place), bias)
    except ValueError as error:
        raise ValueError(f"{quantized.file_name}: {error}") from error


def _owned(weight: dk.QuantizedWeight, read: dict[str, Tensor], device: torch.device) -> dk.QuantizedWeight:
    # On its device, and without tensors that are views of a file.
    files = {tensor.untyped_storage().data_ptr() for tensor in read.values()}

    def owned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.to(device)
        return moved.clone() if moved.untyped_storage().data_ptr() in files else moved

    return dk.QuantizedWeight(*map(owned, weight))
