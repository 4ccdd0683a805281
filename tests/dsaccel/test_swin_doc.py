"""The examples of docs/swin.md run, and print what is said there."""

from __future__ import annotations

import re

import pytest
from documents import blocks_of, run_blocks
from installed import require

import dsaccel.modules

PAGE = "swin.md"
BLOCKS = blocks_of(PAGE)
# From here on they need others' models.
LOADING = next(index for index, (_, block) in enumerate(BLOCKS) if "import torchvision" in block)


@pytest.mark.usefixtures("one_thread")
def test_examples_run_in_order() -> None:
    run_blocks(BLOCKS[:LOADING], PAGE)


@pytest.mark.usefixtures("one_thread")
def test_examples_of_loading_run_in_order() -> None:
    require("torchvision")
    require("timm")
    imports = "import torch\nfrom dsaccel.modules import SwinTransformer\n"
    run_blocks([("python", imports), *BLOCKS[LOADING:]], PAGE)


def test_every_module_is_shown() -> None:
    names = [name for name in dsaccel.modules.__all__ if re.search("Swin|2d$|PositionBias", name)]
    assert len(names) == 7
    for name in names:
        assert any(re.search(rf"\b{name}\b", block) for _, block in BLOCKS), name
