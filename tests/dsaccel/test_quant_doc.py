"""The examples of docs/quantization.md run, and print what is said there; and every public name is described."""

from __future__ import annotations

import inspect
import re

import pytest
from documents import blocks_of, run_blocks
from torch import nn

import dsaccel.quant

PAGE = "quantization.md"
BLOCKS = blocks_of(PAGE)


@pytest.mark.usefixtures("one_thread")
def test_examples_run_in_order() -> None:
    run_blocks(BLOCKS, PAGE)


@pytest.mark.parametrize("name", dsaccel.quant.__all__)
def test_every_public_name_is_described_and_shown(name: str) -> None:
    thing = getattr(dsaccel.quant, name)
    assert any(language == "python" and re.search(rf"\b{name}\b", block) for language, block in BLOCKS)
    text = inspect.getdoc(thing)
    assert text
    if inspect.isclass(thing) and issubclass(thing, nn.Module):
        # Without what comes from torch.
        parameters = [p for p in inspect.signature(thing.__init__).parameters if p != "self"]
    elif inspect.isfunction(thing):
        parameters = list(inspect.signature(thing).parameters)
        assert "Returns:" in text
        assert "Raises:" in text
    else:
        parameters = [p for p in inspect.signature(thing).parameters if p != "self"]
    for parameter in parameters:
        assert re.search(rf"\b{parameter}\b[^\n]*:", text), f"{name} does not describe {parameter}"


def test_exported_names_are_sorted() -> None:
    assert dsaccel.quant.__all__ == sorted(dsaccel.quant.__all__)
