"""Frequencies of rotary embeddings stretched beyond the length a model was trained on.

Each function takes the unscaled frequencies (radians per position) in float64 and returns the stretched ones, with the
factor by which cosines and sines are multiplied. Keys are Hugging Face's, as in a model's ``rope_scaling``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dskernels.checks import is_integer, is_number, wrong_type, wrong_value


class Rope(NamedTuple):
    """What a scaling depends on: frequencies ``[rotary_dim / 2]``, their base, the length of the table."""

    frequencies: Tensor
    theta: float
    max_positions: int

    @property
    def rotary_dim(self) -> int:
        """How many components are rotated."""
        return 2 * len(self.frequencies)


def _linear(rope: Rope, options: Mapping[str, Any]) -> tuple[Tensor, float]:
    # Chen et al., "Extending Context Window ... via Positional Interpolation", 2023, equation 4.
    return rope.frequencies / options["factor"], 1.0


def _dynamic(rope: Rope, options: Mapping[str, Any]) -> tuple[Tensor, float]:
    # "Dynamic NTK": the base grows with the length of the sequence (Peng et al., "YaRN", 2023, section 3.3 and
    # equation 16 with s = factor * length / original - (factor - 1)).
    original = options["original_max_position_embeddings"]
    length = max(rope.max_positions, original)
    stretch = options["factor"] * length / original - (options["factor"] - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)) if rope.rotary_dim > 2 else rope.theta
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / -rope.rotary_dim
    return theta**exponents, 1.0


def _llama3(rope: Rope, options: Mapping[str, Any]) -> tuple[Tensor, float]:
    # Llama 3.1: long waves are interpolated, short ones kept, those in between blended.
    turns = options["original_max_position_embeddings"] * rope.frequencies / (2 * math.pi)
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return rope.frequencies * (kept + (1 - kept) / options["factor"]), 1.0


def _yarn(rope: Rope, options: Mapping[str, Any]) -> tuple[Tensor, float]:
    # Peng et al., "YaRN", 2023: the ramp of equation 18 over pairs (its ends where a pair makes beta turns in the
    # original length), the blend of equation 19, the attention factor of equation 22, split over q and k.
    original, factor = options["original_max_position_embeddings"], options["factor"]

    def pair_with(turns: float) -> float:
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(options.get("beta_fast") or 32.0), pair_with(options.get("beta_slow") or 1.0)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    interpolated = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    frequencies = rope.frequencies * (1 - interpolated + interpolated / factor)
    return frequencies, _yarn_attention_factor(factor, options)


def _yarn_attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = options.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = options.get("mscale"), options.get("mscale_all_dim")
    if mscale and mscale_all_dim:  # DeepSeek's form
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


class _Type(NamedTuple):
    stretch: Callable[[Rope, Mapping[str, Any]], tuple[Tensor, float]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_LENGTH = "original_max_position_embeddings"
_TYPES = {
    "default": _Type(lambda rope, options: (rope.frequencies, 1.0)),
    "linear": _Type(_linear, ("factor",), (_LENGTH,)),
    "dynamic": _Type(_dynamic, ("factor", _LENGTH)),
    "llama3": _Type(_llama3, ("factor", _LENGTH, "low_freq_factor", "high_freq_factor")),
    "yarn": _Type(
        _yarn,
        ("factor", _LENGTH),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Raises what `dskernels.rope_table` promises for a scaling that is not one."""
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise wrong_type("scaling", "None or a mapping with the key 'rope_type'", scaling)
    if scaling.get("rope_type") not in _TYPES:
        raise wrong_value("scaling", f"a 'rope_type' among {', '.join(map(repr, _TYPES))}", dict(scaling))
    name = scaling["rope_type"]
    kind = _TYPES[name]
    known = {"rope_type", "rope_theta", *kind.required, *kind.optional}
    unknown, missing = sorted(set(scaling) - known), [key for key in kind.required if scaling.get(key) is None]
    if missing:
        raise wrong_value("scaling", f"the keys {', '.join(kind.required)} for the type {name!r}", f"no {missing[0]!r}")
    if unknown:
        raise wrong_value("scaling", f"no keys for the type {name!r} but {', '.join(sorted(known))}", repr(unknown[0]))
    for key in set(scaling) - {"rope_type", "truncate"}:
        value = scaling[key]
        if value is None and key in kind.optional:
            continue
        if not is_number(value) or (key == _LENGTH and not is_integer(value)):
            raise wrong_type(f"scaling[{key!r}]", "an int" if key == _LENGTH else "a number", value)
        if not 0 < value < math.inf:
            raise wrong_value(f"scaling[{key!r}]", "a positive number", value)
    if name != "default" and scaling["factor"] < 1:
        raise wrong_value("scaling['factor']", "a number not below 1", scaling["factor"])
    if name == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise wrong_value("scaling", "low_freq_factor below high_freq_factor", dict(scaling))


def stretched(rope: Rope, scaling: Mapping[str, Any] | None) -> tuple[Tensor, float]:
    """Frequencies and attention factor under a checked scaling."""
    return (rope.frequencies, 1.0) if scaling is None else _TYPES[scaling["rope_type"]].stretch(rope, scaling)
