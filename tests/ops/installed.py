"""Packages that a test needs and that need not be there."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """The package, or else a skip that says why. pytest's own way takes an ImportError alone.

    What is built for another torch, such as a CUDA build's torchvision beside a CPU-only torch, fails in its own ways.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        reason = f"{name} is not installed"
    except Exception as error:
        reason = f"{name} cannot be imported: {error}"
    pytest.skip(reason, allow_module_level=True)
