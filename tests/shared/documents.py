"""The examples of a page of docs/: its blocks of Python run in order, and print what the block after them says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page, in order: the language, and the text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run_blocks(blocks: Sequence[tuple[str, str]], page: str) -> None:
    """Runs blocks of Python in one namespace; a block without a language right after one is what it printed.

    Raises:
        AssertionError: another text was printed.
    """
    # Which module classes say they are of.
    namespace: dict[str, Any] = {"__name__": Path(page).stem}
    said, before = "", ""
    for language, block in blocks:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, page, "exec"), namespace)
            said = out.getvalue()
        elif language == "" and before == "python":
            assert block in said, f"{page} says\n{block}\nbut printed was\n{said}"
        before = language
