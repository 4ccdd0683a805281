"""The examples of docs/quantized_checkpoints.md run, and print what is said there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "quantized_checkpoints.md"


@pytest.mark.usefixtures("one_thread")
def test_examples_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Folders are written where one stands.
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            capsys.readouterr()
            exec(compile(block, DOC.name, "exec"), namespace)
        else:
            assert block in capsys.readouterr().out
