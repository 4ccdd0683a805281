"""Which of a checkpoint's tensors make a quantized layer, by format."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import dskernels as dk
from dsaccel.quant.checkpoints._files import TensorInfo
from dsaccel.quant.checkpoints.awq import from_awq
from dsaccel.quant.checkpoints.compressed import from_compressed_tensors
from dsaccel.quant.checkpoints.compressed_scheme import CompressedScheme, Targets
from dsaccel.quant.checkpoints.fp8 import from_fp8_block
from dsaccel.quant.checkpoints.gptq import from_gptq
from dskernels.checks import is_integer, wrong_value

FORMATS = ("gptq", "gptq_v1", "gptq_v2", "awq", "compressed-tensors", "fp8")
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class Recipe(NamedTuple):
    """How a quantized layer is made, and the names in it of tensors that it must have, and of others that it may."""

    required: set[str]
    optional: set[str]
    build: Callable[[Mapping[str, Tensor]], dk.QuantizedWeight]


class Format(Protocol):
    """One of the formats, with the configuration of a checkpoint."""

    name: str

    def recipe(self, layer: str, classes: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Recipe | None:
        """The recipe of a layer, or None if it is not quantized.

        Args:
            layer: its name in the checkpoint.
            classes: names of the classes that it is an instance of.
            tensors: what the checkpoint has of it, by the names in it.

        Raises:
            ValueError: the configuration and the tensors contradict each other, or no scheme can hold it.
        """
        ...


def format_of(format: str | None, config: Mapping[str, Any] | None) -> Format:
    """The format that was asked for, or that ``config`` names.

    Raises:
        ValueError: there is no such format, or ``config`` lacks what it needs or holds what no scheme stands for.
    """
    if format is None:
        if config is None:
            raise wrong_value("format", f"one of {', '.join(FORMATS)} where no config tells it", "None")
        format = str(config.get("quant_method")).lower()
        if format not in FORMATS:
            raise wrong_value("quantization_config.quant_method", f"one of {', '.join(FORMATS)}", repr(format))
    if format not in FORMATS:
        raise wrong_value("format", f"one of {', '.join(FORMATS)}", repr(format))
    config = config or {}
    if format.startswith("gptq"):
        return _GPTQ(format, config)
    if format == "awq":
        return _AWQ(config)
    return _FP8(config) if format == "fp8" else _CompressedTensors(config)


class _GPTQ:
    name = "gptq"

    def __init__(self, format: str, config: Mapping[str, Any]) -> None:
        self._config = config
        stored = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if format == "gptq":
            if stored not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
                got = "marlin" if config.get("is_marlin_format") else stored
                raise wrong_value("quantization_config.checkpoint_format", "gptq or gptq_v2", got)
            format = stored
        self._version = 2 if format == "gptq_v2" else 1
        if config.get("pack_dtype", "int32") != "int32":
            raise wrong_value("quantization_config.pack_dtype", "int32", config["pack_dtype"])

    def recipe(self, layer: str, classes: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Recipe | None:
        if not tensors.keys() & {"qweight", "qzeros", "scales", "g_idx"}:
            return None
        _check_not_listed(layer, self._config)
        values = {**self._config, **self._overrides(layer)}
        build = functools.partial(
            self._build,
            group_size=_integer(values, "group_size", "q_group_size"),
            bits=_integer(values, "bits", "w_bit", default=4),
            symmetric=bool(values.get("sym", False)),
        )
        return Recipe({"qweight", "qzeros", "scales"}, {"g_idx"}, build)

    def _build(self, tensors: Mapping[str, Tensor], **options: Any) -> dk.QuantizedWeight:
        codes, zeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
        return from_gptq(codes, zeros, scales, tensors.get("g_idx"), version=self._version, **options)

    def _overrides(self, layer: str) -> Mapping[str, Any]:
        # GPTQModel's "dynamic": the first expression that fits a layer says what is special about it, and one that
        # begins with "-:" that it is not quantized.
        for pattern, values in (self._config.get("dynamic") or {}).items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), layer):
                if pattern.startswith("-:"):
                    raise wrong_value("qweight", f"none, as quantization_config.dynamic[{pattern!r}] says", "one")
                return dict(values)
        return {}


class _AWQ:
    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm")
        if version.lower() != "gemm":
            raise wrong_value("quantization_config.version", "gemm", version)
        bits = _integer(config, "bits", "w_bit", default=4)
        if bits != 4:
            raise wrong_value("quantization_config.bits", "4", bits)
        self._group_size = _integer(config, "group_size", "q_group_size")

    def recipe(self, layer: str, classes: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Recipe | None:
        names = {"qweight", "qzeros", "scales"}
        if not tensors.keys() & names:
            return None
        _check_not_listed(layer, self._config)
        return Recipe(names, set(), lambda found: from_awq(**found, group_size=self._group_size))


class _FP8:
    name = "fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        for key, expected in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("weight_block_size", [128, 128])):
            if config.get(key, expected) != expected:
                raise wrong_value(f"quantization_config.{key}", str(expected), config[key])

    def recipe(self, layer: str, classes: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Recipe | None:
        weight = tensors.get("weight")
        if "weight_scale_inv" not in tensors and (weight is None or weight.dtype not in _EIGHT_BITS):
            return None
        _check_not_listed(layer, self._config)
        return Recipe({"weight", "weight_scale_inv"}, set(), lambda found: from_fp8_block(**found))


class _CompressedTensors:
    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        if not config.get("config_groups"):
            raise wrong_value("quantization_config.config_groups", "at least one", config.get("config_groups"))
        for key in ("kv_cache_scheme", "transform_config"):
            if config.get(key):
                raise wrong_value(f"quantization_config.{key}", "none", config[key])
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise wrong_value("quantization_config.sparsity_config.format", "dense", sparsity)
        self._groups: dict[str, str] = {}
        for name, group in config["config_groups"].items():
            if not isinstance(group, Mapping):
                raise wrong_value(f"quantization_config.config_groups.{name}", "arguments written out", group)
            # As in the library itself, a target of several groups belongs to the last.
            self._groups |= dict.fromkeys(group["targets"], name)
        self._targets, self._ignore = Targets(self._groups), Targets(config.get("ignore") or ())

    def recipe(self, layer: str, classes: Sequence[str], tensors: Mapping[str, TensorInfo]) -> Recipe | None:
        target = self._targets.match(layer, classes)
        if target is None or self._ignore.match(layer, classes) is not None:
            stray = tensors.keys() & {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}
            if stray:
                why = "no config group targets the layer" if target is None else "ignore lists the layer"
                raise wrong_value(min(stray), f"none, as {why}", "one")
            return None
        name = self._groups[target]
        try:
            scheme = CompressedScheme.from_config(self._config["config_groups"][name], self._config.get("format"))
        except ValueError as error:
            raise ValueError(f"quantization_config.config_groups.{name}.{error}") from error
        required, optional = scheme.names()
        return Recipe(required, optional, lambda found: from_compressed_tensors(found, scheme))


def _check_not_listed(layer: str, config: Mapping[str, Any]) -> None:
    for key in ("modules_to_not_convert", "ignored_layers"):
        for listed in config.get(key) or ():
            if f".{layer}.".endswith(f".{listed}.") or f"{layer}.".startswith(f"{listed}."):
                raise wrong_value("weight", f"one that is not quantized, as {key} lists {listed!r}", "a quantized one")


def _integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        if is_integer(config.get(key)):
            return int(config[key])
    if default is not None and not config.keys() & set(keys):
        return default
    raise wrong_value(f"quantization_config.{keys[0]}", "an integer", config.get(keys[0]))
