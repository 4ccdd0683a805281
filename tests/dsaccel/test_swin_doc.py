"""The examples of docs/swin.md run, and print what is said there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installed import require

import dsaccel.modules

DOC = Path(__file__).parents[2] / "docs" / "swin.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)
# From here on they need others' models.
LOADING = next(index for index, (_, block) in enumerate(BLOCKS) if "import torchvision" in block)


def run(blocks: list[tuple[str, str]], capsys: pytest.CaptureFixture[str], namespace: dict[str, object]) -> None:
    for language, block in blocks:
        if language == "python":
            capsys.readouterr()
            exec(compile(block, DOC.name, "exec"), namespace)
        else:
            assert block in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    run(BLOCKS[:LOADING], capsys, {})


@pytest.mark.usefixtures("one_thread")
def test_examples_of_loading_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    require("torchvision")
    require("timm")
    imports = "import torch\nfrom dsaccel.modules import SwinTransformer\n"
    run([("python", imports), *BLOCKS[LOADING:]], capsys, {})


def test_every_module_is_shown() -> None:
    names = [name for name in dsaccel.modules.__all__ if re.search("Swin|2d$|PositionBias", name)]
    assert len(names) == 7
    for name in names:
        assert any(re.search(rf"\b{name}\b", block) for _, block in BLOCKS), name
