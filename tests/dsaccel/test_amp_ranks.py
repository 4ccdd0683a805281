"""LossScaler in two processes (gloo)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("amp_ranks.py")
CASES = {
    "agreement": ("infinite_on_one_rank", "a_rank_without_gradients", "without_a_group_each_for_itself"),
    "sharded": ("sharded",),
}


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, tmp_path: Path) -> None:
    # Processes of their own: this one's threads and autograd do not survive a fork.
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "store"), *CASES[case]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
