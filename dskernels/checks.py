"""Argument errors that name the argument, say what was expected, and say what came.

The functions build an exception and the caller raises it: a message is put together only when it is needed,
and a traced call sees one plain comparison.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor


def wrong_value(name: str, expected: str, got: object) -> ValueError:
    """A ``ValueError`` for an argument of the right type whose value does not fit."""
    return ValueError(f"{name}: expected {expected}, got {got}")


def wrong_type(name: str, expected: str, got: object) -> TypeError:
    """A ``TypeError`` for an argument of the wrong type."""
    return TypeError(f"{name}: expected {expected}, got {_describe(got)}")


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer, symbolic ones included; ``True`` and ``False`` are not."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real Python number, symbolic ones included; ``True`` and ``False`` are not."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def is_readable(values: torch.Tensor) -> bool:
    """Whether a check may look at values: for those on a GPU it would have to wait."""
    return values.device.type == "cpu" and not is_hidden(values)


def is_hidden(values: torch.Tensor) -> bool:
    """Whether nobody can look at values: a trace has none, and the transforms of ``torch.func`` wrap them."""
    if torch.compiler.is_compiling() or isinstance(values, FakeTensor):
        return True
    is_wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(values)
    return is_wrapped


def shape_of(tensor: torch.Tensor) -> str:
    """The shape as it is written in messages: ``[2, 8, 128, 64]``."""
    return str(list(tensor.shape))


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {shape_of(value)} and dtype {value.dtype}"
    return f"{value!r} ({type(value).__name__})"
