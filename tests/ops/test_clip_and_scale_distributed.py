"""grad_norm and clip_and_scale_ of DTensors, in two and four processes (gloo)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("clip_and_scale_ranks.py")


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
)
@pytest.mark.parametrize("world", [2, 4], ids=["two", "four"])
def test_processes_agree_with_one(world: int, tmp_path: Path) -> None:
    # Processes of their own: this one's threads and autograd do not survive a fork. All cases in one set of them: to
    # start them takes longest.
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(world), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
