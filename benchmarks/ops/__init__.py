"""The cases, one file an operator; each has ``cases(quick)``, and ``cuda_cases(quick)`` if it has some for a GPU."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from benchmarks.case import Case


def op_names() -> list[str]:
    """The operators that have cases."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def cases_of(op: str, *, device: str = "cpu", quick: bool = False) -> list[Case]:
    """The cases of an operator on a device; ``quick`` gives them in tiny sizes, whose timings mean nothing."""
    module = importlib.import_module(f"{__name__}.{op}")
    make: Callable[[bool], list[Case]] | None = getattr(module, "cases" if device == "cpu" else f"{device}_cases", None)
    return [] if make is None else make(quick)
