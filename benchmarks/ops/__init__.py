"""The cases, one file an operator; each has ``cases(quick)``."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.case import Case


def op_names() -> list[str]:
    """The operators that have cases."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def cases_of(op: str, *, quick: bool = False) -> list[Case]:
    """The cases of an operator; ``quick`` gives the same cases in tiny sizes, whose timings mean nothing."""
    cases: list[Case] = importlib.import_module(f"{__name__}.{op}").cases(quick)
    return cases
