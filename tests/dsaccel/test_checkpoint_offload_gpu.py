"""Activations that wait in pinned memory, on hardware."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dsaccel.checkpoint import checkpoint_blocks, memory_report, offload_activations
from dsaccel.modules import SlidingWindowLM


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_on_a_gpu(policy: str) -> None:
    model = SlidingWindowLM(64, 256, 4, 4, window=64).cuda()
    tokens = torch.randint(64, (8, 512), device="cuda")

    def run() -> tuple[list[Tensor], int]:
        model.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())], held

    checkpoint_blocks(model, policy)
    expected, plain = run()
    context = offload_activations(min_bytes=1 << 16)
    for _ in range(3):
        with context:
            results, held = run()
        assert all(map(torch.equal, results, expected))
    assert held < plain
    with memory_report(model) as report, context:
        run()
    assert report.offloaded_bytes > 0
    assert report.peak_allocated > 0


@pytest.mark.gpu
def test_edits_on_a_gpu_are_found() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with offload_activations():
        y = x * 2
        loss = (y * y).sum()
        with torch.no_grad():
            y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
