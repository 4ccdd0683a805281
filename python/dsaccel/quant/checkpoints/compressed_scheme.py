"""How compressed-tensors says in its configuration what it stores: ``config_groups``, ``targets`` and ``ignore``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dskernels.checks import wrong_value

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")

_AS_THEY_ARE, _PER_TOKEN = "none", "8 bits, dynamic by token"
_STATIC, _BY_128 = "8 bits, static by tensor", "fp8, dynamic by groups of 128"
_ACTIVATIONS = {
    "int4_weight_only": _AS_THEY_ARE,
    "int4_dynamic": _PER_TOKEN,
    "int8_weight_only": _AS_THEY_ARE,
    "int8_dynamic": _PER_TOKEN,
    "int8_static": _STATIC,
    "fp8_block": _BY_128,
}
# Of each type and number of bits of weights: how its schemes begin, and what may share a scale.
_WEIGHTS = {
    ("int", 4): ("int4", ("channel", "group")),
    ("int", 8): ("int8", ("channel", "tensor")),
    ("float", 8): ("fp8", ("block",)),
}
_ARGUMENTS: dict[str, dict[str, Any] | None] = {
    _AS_THEY_ARE: None,
    _PER_TOKEN: {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    _STATIC: {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True},
    _BY_128: {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 128,
        "dynamic": True,
        "symmetric": True,
    },
}


@dataclass(frozen=True)
class CompressedScheme:
    """How a config group of compressed-tensors stores a layer.

    Attributes:
        scheme: that of `dskernels.QuantizedWeight`.
        format: ``"pack-quantized"``, ``"int-quantized"``, ``"float-quantized"`` or ``"naive-quantized"``.
        group_size: columns of an int4 weight that share a scale; None for all, as in the other schemes.
        symmetric: False where the groups of an int4 weight have zero points.
        per_tensor: whether an int8 weight has a single scale.
        ordered: whether ``weight_g_idx`` tells the group of each column.
    """

    scheme: str
    format: str
    group_size: int | None = None
    symmetric: bool = True
    per_tensor: bool = False
    ordered: bool = False

    @classmethod
    def from_config(cls, group: Mapping[str, Any], format: str | None = None) -> CompressedScheme:
        """Reads one of ``config_groups``.

        Args:
            group: the value.
            format: that of the whole checkpoint, for groups that name none.

        Raises:
            ValueError: no scheme of `dskernels` is that.
        """
        stored = group.get("format") or format
        if stored not in FORMATS:
            raise wrong_value("format", f"one of {', '.join(FORMATS)}", repr(stored))
        if group.get("output_activations") is not None:
            raise wrong_value("output_activations", "none", group["output_activations"])
        weights = group.get("weights") or {}
        kind = weights.get("type", "int"), weights.get("num_bits", 8)
        strategy, symmetric = _strategy(weights), weights.get("symmetric", True)
        if kind not in _WEIGHTS:
            raise wrong_value("weights", "int of 4 or 8 bits, or float of 8", f"{kind[0]} of {kind[1]}")
        prefix, strategies = _WEIGHTS[kind]
        if strategy not in strategies:
            raise wrong_value("weights.strategy", f"{' or '.join(strategies)} for {prefix}", strategy)
        if strategy == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
            raise wrong_value("weights.block_structure", "[128, 128]", weights.get("block_structure"))
        if not symmetric and prefix != "int4":
            raise wrong_value("weights.symmetric", f"true for {prefix}", "false")
        schemes = {kept: name for name, kept in _ACTIVATIONS.items() if name.startswith(prefix)}
        activations = _activations(group.get("input_activations"))
        if activations not in schemes:
            raise wrong_value("input_activations", f"one of ({'; '.join(schemes)}) for {prefix}", activations)
        return cls(
            schemes[activations],
            stored,
            weights["group_size"] if strategy == "group" else None,
            symmetric,
            strategy == "tensor",
            # "dynamic" is an older name of "group".
            weights.get("actorder") in ("group", "dynamic", True),
        )

    def to_config(self) -> dict[str, Any]:
        """The value in ``config_groups``, but for its ``targets``."""
        weights: dict[str, Any] = {
            "num_bits": 4 if self.scheme.startswith("int4") else 8,
            "type": "float" if self.scheme == "fp8_block" else "int",
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "dynamic": False,
        }
        if self.scheme == "fp8_block":
            weights.update(strategy="block", block_structure=[128, 128])
        if self.per_tensor:
            weights.update(strategy="tensor")
        if self.ordered:
            weights.update(actorder="group")
        return {
            "weights": weights,
            "input_activations": _ARGUMENTS[_ACTIVATIONS[self.scheme]],
            "output_activations": None,
            "format": self.format,
        }

    def names(self) -> tuple[set[str], set[str]]:
        """The tensors that a layer must have, and those that it may have beside them."""
        required = {"weight_packed", "weight_shape"} if self.format == "pack-quantized" else {"weight"}
        required.add("weight_scale")
        if self.scheme == "int8_static":
            required.add("input_scale")
        if not self.symmetric:
            required.add("weight_zero_point")
        if self.ordered:
            required.add("weight_g_idx")
        return required, {"weight_zero_point", "input_zero_point", "weight_g_idx"} - required


class Targets:
    """What config groups list as ``targets``, or a configuration as ``ignore``: names, expressions, classes.

    Args:
        targets: a name of a module; ``"re:"`` and an expression that the beginning of its name fits; or a class.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._all = frozenset(targets)
        self._expressions = sorted(target for target in self._all if target.startswith("re:"))

    def match(self, name: str, classes: Iterable[str]) -> str | None:
        """The target that a module answers to: its name, before an expression, before one of its classes; or None."""
        if name in self._all:
            return name
        fitting = (target for target in self._expressions if re.match(target[3:], name))
        return next(fitting, None) or min(self._all.intersection(classes), default=None)


def _strategy(arguments: Mapping[str, Any]) -> str:
    strategy, group_size = arguments.get("strategy"), arguments.get("group_size")
    if strategy is None:
        return "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    return str(strategy)


def _activations(arguments: Mapping[str, Any] | None) -> str:
    if arguments is None:
        return _AS_THEY_ARE
    found = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    found |= {key: value for key, value in arguments.items() if value is not None}
    found["strategy"] = _strategy(found)
    for name, known in _ARGUMENTS.items():
        if known is not None and all(found.get(key) == known.get(key) for key in (*known, "group_size")):
            return name
    return ", ".join(
        f"{key} {found[key]}"
        for key in ("type", "num_bits", "strategy", "group_size", "dynamic", "symmetric")
        if key in found
    )
