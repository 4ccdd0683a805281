"""Checkpoints on disk: which tensors their files hold, and reading one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dskernels.checks import wrong_value

INDEX = "model.safetensors.index.json"
# Where a checkpoint says how it is quantized, and what a file says about the method by its name.
_CONFIGS = (("config.json", None), ("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorInfo(NamedTuple):
    """What the header of a file says about a tensor; ``dtype`` is None where torch has none of that name."""

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def safetensors() -> Any:
    """The module, or an ImportError that says how to get it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'reading and writing checkpoints needs safetensors: pip install "dskernels[quant]"'
        ) from error
    return safetensors


def files_of(source: Path) -> list[Path]:
    """The safetensors files of a folder, those of its index where there is one; or ``source``, if it is a file.

    Raises:
        FileNotFoundError: there is none, or one that the index names is missing.
        ValueError: ``source`` is a file of another kind, or the index names something outside of the folder.
    """
    if source.is_file():
        if source.suffix != ".safetensors":
            raise wrong_value("source", "a folder or a .safetensors file", str(source))
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"source: expected a folder or a .safetensors file, got {source}, which does not exist")
    index = source / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name]
        if strange:
            raise wrong_value(INDEX, "names of files beside it", strange[0])
        files = [source / name for name in names]
    else:
        files = sorted(source.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        found = f"no {', '.join(missing)}" if missing else "none"
        raise FileNotFoundError(f"{source}: expected safetensors files, got {found}")
    return files


def infos_of(files: list[Path]) -> dict[str, TensorInfo]:
    """Name and description of every tensor, in the order of ``files``; only headers are read.

    Raises:
        ValueError: two files hold tensors of the same name, or an index names tensors that are not there.
    """
    found: dict[str, TensorInfo] = {}
    for file in files:
        with safetensors().safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                if name in found:
                    raise wrong_value(
                        file.name, "tensors that no other file has", f"{name}, as in {found[name].file.name}"
                    )
                part = opened.get_slice(name)
                found[name] = TensorInfo(file, _DTYPES.get(part.get_dtype()), tuple(part.get_shape()))
    index = files[0].parent / INDEX
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        absent = [name for name, file in weight_map.items() if index.parent / file in files and name not in found]
        if absent:
            raise wrong_value(INDEX, "tensors that its files hold", shortened(absent))
    return found


def tensors_of(file: Path, names: Iterable[str]) -> Iterator[Tensor]:
    """Tensors of a file, one after the other. They are views of the file, which keep it open: what is to stay must be
    copied."""
    with safetensors().safe_open(file, framework="pt") as opened:
        for name in names:
            yield opened.get_tensor(name)


def quantization_config_of(source: Path) -> dict[str, Any] | None:
    """``quantization_config`` of the ``config.json`` beside the tensors, or what older writers put in a file of its
    own, with the ``quant_method`` that its name tells; None where there is neither."""
    folder = source if source.is_dir() else source.parent
    for name, method in _CONFIGS:
        if not (folder / name).is_file():
            continue
        config = json.loads((folder / name).read_text())
        if method is None:
            config = config.get("quantization_config")
        if config is not None:
            return {"quant_method": method, **config} if method else dict(config)
    return None


def shortened(names: list[str]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
