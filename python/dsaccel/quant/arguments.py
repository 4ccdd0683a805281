"""The arguments that the functions over whole models share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import dskernels as dk
from dskernels.checks import wrong_type, wrong_value

Filter = Callable[[str, nn.Module], bool]


def check_filter(filter: Filter | None) -> None:
    """Raises:
    TypeError: ``filter`` can neither be called nor is None.
    """
    if filter is not None and not callable(filter):
        raise wrong_type("filter", "a function or None", filter)


def check_options(scheme: str, group_size: int | None, symmetric: bool) -> None:
    """Whether the options of `dskernels.quantize_weight` fit each other, before the first weight is quantized.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such scheme, or an argument does not fit it.
    """
    step = 1.0 if scheme == "int8_static" else None
    weight = torch.empty(1, 16, device="meta")
    dk.quantize_weight(weight, scheme, group_size=group_size, symmetric=symmetric, input_scale=step)


def check_layer(name: str, layer: nn.Module, base: type[nn.Module]) -> None:
    """Whether ``layer`` computes what ``base``, `nn.Linear` or `nn.Embedding`, does.

    Raises:
        TypeError: it is no ``base``.
        ValueError: it has a forward of its own.
    """
    if not isinstance(layer, base):
        raise wrong_type(name, f"an nn.{base.__name__}", layer)
    if type(layer).forward is not base.forward or "forward" in vars(layer):
        raise wrong_value(name, f"one with the forward of nn.{base.__name__}", f"{type(layer).__name__} with another")
