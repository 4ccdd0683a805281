"""Saves models with quantized layers as compressed-tensors does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dsaccel.quant.checkpoints._files import INDEX, safetensors
from dsaccel.quant.checkpoints._plan import tensors_of_module
from dsaccel.quant.checkpoints.compressed import compressed_scheme_of, to_compressed_tensors
from dsaccel.quant.checkpoints.compressed_scheme import CompressedScheme
from dsaccel.quant.linear import QuantizedLinear
from dskernels.checks import is_integer, wrong_type, wrong_value


def save_compressed_tensors(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Saves a model in the format of compressed-tensors, which vLLM and transformers read too.

    `QuantizedLinear` layers are stored as `to_compressed_tensors` says, a config group for each kind of them;
    everything else that a state dict holds is stored as it is, tied tensors once, under their first name. One file is
    put together at a time. `load_quantized_` gets back the same bits.

    Args:
        model: with at least one `QuantizedLinear`; on any device.
        folder: is made if it does not exist, and must hold no safetensors files yet.
        max_shard_bytes: upper limit of a file, but for single tensors that are larger. Several files come with an
            index. Default: 5 GB.
        config: the rest of ``config.json``. Default: ``model.config.to_dict()`` if there is one, as in transformers.

    Returns:
        The files with tensors, in order.

    Raises:
        TypeError: an argument has the wrong type.
        ImportError: safetensors is not installed (``pip install "dskernels[quant]"``).
        ValueError: there is nothing quantized, the folder holds a checkpoint already, or the format has nothing that
            stands for exactly a layer's weight (the message names the layer). Nothing is written then.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "an nn.Module", model)
    if not is_integer(max_shard_bytes):
        raise wrong_type("max_shard_bytes", "an int", max_shard_bytes)
    if max_shard_bytes < 1:
        raise wrong_value("max_shard_bytes", "a positive number", max_shard_bytes)
    folder = Path(folder)
    there = sorted(path.name for path in (*folder.glob("*.safetensors"), *folder.glob(INDEX)))
    if there:
        raise wrong_value("folder", "one without a checkpoint", f"{there[0]} in {folder}")
    _check_stored(model)
    quantization = _quantization_config(model)
    if config is None:
        own: Any = getattr(model, "config", None)
        config = own.to_dict() if hasattr(own, "to_dict") else {}
    text = json.dumps({**config, "quantization_config": quantization}, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    files = _write_shards(model, folder, max_shard_bytes)
    # Last, so that a folder without it was not finished.
    (folder / "config.json").write_text(text + "\n")
    return files


def _quantization_config(model: nn.Module) -> dict[str, Any]:
    groups: dict[CompressedScheme, list[str]] = {}
    ignored = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear):
            try:
                if not name:
                    raise wrong_value("model", "a module with layers in it", "a layer")
                groups.setdefault(compressed_scheme_of(module.weight), []).append(name)
            except ValueError as error:
                raise ValueError(f"{name or 'model'}: {error}") from error
        elif isinstance(module, nn.Linear):
            ignored.append(name)
    if not groups:
        raise wrong_value("model", "at least one QuantizedLinear", "none")
    # Readers take the class of the float model for a target; names are needed only to tell groups apart.
    targets = [["Linear"]] if len(groups) == 1 else list(groups.values())
    formats = {scheme.format for scheme in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": names, **scheme.to_config()}
            for number, (scheme, names) in enumerate(zip(groups, targets, strict=True))
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _check_stored(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for attribute, tensor in tensors_of_module(module).items():
            if tensor.is_meta:
                raise wrong_value(f"{name}.{attribute}".removeprefix("."), "a tensor with values", "one on meta")
        if "qweight" in module._buffers and not isinstance(module, QuantizedLinear):
            raise wrong_value(name, "a QuantizedLinear (the format has no other layers)", type(module).__name__)


def _tensors_of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    memory: set[int] = set()
    for module_name, module in model.named_modules():
        is_quantized = isinstance(module, QuantizedLinear)
        tensors = _tensors_of_layer(module) if is_quantized else tensors_of_module(module)
        for attribute, tensor in tensors.items():
            if id(tensor) in seen:
                continue
            if not is_quantized:
                seen.add(id(tensor))
                tensor = _alone(tensor.detach().cpu().contiguous(), memory)
            yield f"{module_name}.{attribute}".removeprefix("."), tensor


def _tensors_of_layer(layer: QuantizedLinear) -> dict[str, Tensor]:
    tensors = to_compressed_tensors(layer.weight)[1]
    if layer.bias is not None:
        tensors["bias"] = layer.bias.detach()
    # Copies, as layers may share their codes.
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _alone(tensor: Tensor, memory: set[int]) -> Tensor:
    # safetensors takes no tensors that share memory.
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in memory:
        return tensor.clone()
    memory.add(storage.data_ptr())
    return tensor


def _write_shards(model: nn.Module, folder: Path, max_shard_bytes: int) -> list[Path]:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        safetensors().torch.save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in _tensors_of_model(model):
        if shard and size + tensor.nbytes > max_shard_bytes:
            write()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    # How many there are is part of their names.
    count = len(shards)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(count)]
    for number, file in enumerate(files):
        (folder / f"part-{number}").rename(folder / file)
    if count > 1:
        weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / file for file in files]
