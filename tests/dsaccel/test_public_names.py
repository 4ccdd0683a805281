"""Every public name of dsaccel is documented, its parameters too, and stands in README or docs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import dsaccel

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
PACKAGES = sorted(
    found.name
    for found in pkgutil.walk_packages(dsaccel.__path__, "dsaccel.")
    # The commands export nothing, and of the integrations each needs another library.
    if found.ispkg and not found.name.startswith(("dsaccel.demo", "dsaccel.examples", "dsaccel.integrations"))
)
NAMES = [(package, name) for package in PACKAGES for name in getattr(importlib.import_module(package), "__all__", ())]


def test_packages_say_what_they_export() -> None:
    assert dsaccel.__file__ is not None, "another folder passes for the package"
    assert "dsaccel.train" in PACKAGES
    without = [package for package in PACKAGES if not hasattr(importlib.import_module(package), "__all__")]
    assert without == []


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_documented(package: str, name: str) -> None:
    thing = getattr(importlib.import_module(package), name)
    if not callable(thing):
        return
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if not inspect.isclass(thing) or "__init__" in vars(thing):
        for parameter in inspect.signature(thing).parameters:
            is_private = parameter.startswith("_")
            assert is_private or re.search(rf"\b{parameter}\b", text), f"{name} does not describe {parameter}"
    # What a function returns is shown where that function is.
    is_result = dataclasses.is_dataclass(thing) or (inspect.isclass(thing) and issubclass(thing, tuple))
    assert is_result or re.search(rf"\b{name}\b", TEXT), f"{name} is in neither README nor docs"
