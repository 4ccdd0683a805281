"""The examples of the pages of docs/ run as they are, and print what is said there."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import blocks_of, run_blocks
from ranks import Ranks

PAGES = (
    "parallel.md",
    "quantized_checkpoints.md",
    "samplers.md",
    "schedules.md",
    "sharing.md",
    "static_graph.md",
    "training.md",
    "training_helpers.md",
)
OF_TWO_RANKS = ("context_parallel.md", "pipeline.md", "tensor_parallel.md")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES)
def test_examples_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Folders are written where one stands.
    monkeypatch.chdir(tmp_path)
    run_blocks(blocks_of(page), page)


def runs(rank: int, page: str) -> None:
    # What the first rank prints is what a page says.
    run_blocks([block for block in blocks_of(page) if rank == 0 or block[0] == "python"], page)


@pytest.mark.parametrize("page", OF_TWO_RANKS)
def test_examples_of_two_ranks_run_in_order(page: str, ranks: Ranks) -> None:
    ranks.run(runs, 2, page=page)


def test_another_text_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"page\.md says\n3\n"):
        run_blocks([("python", "print(2)"), ("", "3\n")], "page.md")
