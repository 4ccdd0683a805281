"""Checks of arguments that the samplers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dskernels.checks import is_integer, is_number, shape_of, wrong_type, wrong_value


def check_integer(name: str, value: int, *, least: int) -> None:
    """Whether ``value`` is an int of at least ``least``."""
    if not is_integer(value):
        raise wrong_type(name, "an int", value)
    if value < least:
        raise wrong_value(name, f"at least {least}", value)


def check_share(name: str, value: float) -> None:
    """Whether ``value`` is a number from 0 to 1."""
    if not is_number(value):
        raise wrong_type(name, "a number", value)
    if not 0 <= value <= 1:
        raise wrong_value(name, "from 0 to 1", value)


def checked_vector(name: str, value: Tensor, *, least: float = -math.inf, size: int | None = None) -> Tensor:
    """``value`` as it is, on the CPU: ``[size]``, at least one, all of them finite and not below ``least``."""
    if not isinstance(value, Tensor):
        raise wrong_type(name, "a tensor", value)
    if value.dim() != 1 or not len(value) or (size is not None and len(value) != size):
        raise wrong_value(
            name, "a tensor [n] with n at least 1" if size is None else f"a tensor [{size}]", shape_of(value)
        )
    value = value.detach().cpu()
    wrong = ~value.isfinite() | (value < least)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise wrong_value(name, f"finite numbers{bound}", f"{value[first].item()} at {first}")
    return value


def fingerprint(values: Tensor) -> int:
    """A number that differs, in all likelihood, for other values or another order of them."""
    bits = values.double().view(torch.int64)
    # Products and the sum wrap around; odd factors lose no bit.
    return int((bits * torch.arange(1, 2 * len(bits), 2)).sum())
