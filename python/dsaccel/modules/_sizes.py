"""Checks of sizes that a model is given: of windows, shifts and stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from dskernels.checks import is_integer, is_number, wrong_type, wrong_value

Pair: TypeAlias = int | tuple[int, int]
Windows: TypeAlias = Pair | Sequence[Pair]


def checked_pair(name: str, value: Pair, *, least: int = 1) -> tuple[int, int]:
    """``(height, width)`` of an int or a pair of ints, none below ``least``."""
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(is_integer(x) for x in pair):
        raise wrong_type(name, "an int or a pair of ints (height, width)", value)
    if min(pair) < least:
        raise wrong_value(name, f"at least {least}", value)
    return pair[0], pair[1]


def checked_windows(name: str, value: Windows, stages: int) -> list[tuple[int, int]]:
    """A window for each stage, of one for all (an int, or a pair of ints) or a sequence of one pair a stage."""
    if not isinstance(value, (tuple, list)) or all(is_integer(x) for x in value):
        return [checked_pair(name, value)] * stages  # type: ignore[arg-type]
    if len(value) != stages:
        raise wrong_value(name, f"one window, or a pair (height, width) for each of {stages} stages", value)
    return [checked_pair(name, window) for window in value]


def check_count(name: str, value: int) -> None:
    """Whether ``value`` is a positive int."""
    if not is_integer(value):
        raise wrong_type(name, "an int", value)
    if value < 1:
        raise wrong_value(name, "a positive number", value)


def check_probability(name: str, value: float) -> None:
    """Whether ``value`` is a number from 0 to below 1."""
    if not is_number(value):
        raise wrong_type(name, "a number", value)
    if not 0 <= value < 1:
        raise wrong_value(name, "from 0 to below 1", value)


def check_heads(dim: int, num_heads: int) -> int:
    """The components of a head."""
    check_count("dim", dim)
    check_count("num_heads", num_heads)
    if dim % num_heads:
        raise wrong_value("dim", f"a multiple of num_heads = {num_heads}", dim)
    return dim // num_heads
