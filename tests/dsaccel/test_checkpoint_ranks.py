"""Recomputed and offloaded blocks of models that several processes share train to the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dsaccel.checkpoint import checkpoint_blocks, memory_report, offload_activations
from dsaccel.modules import SlidingWindowLM


def gradients(rank: int, *, how: str, policy: str | None, offload: bool) -> list[Tensor]:
    """The gradients of a step over two processes, of which each has one row."""
    torch.manual_seed(0)
    model = SlidingWindowLM(40, 16, 2, 2, window=6)
    tokens = torch.randint(40, (2, 16))[rank : rank + 1]
    if policy is not None:
        checkpoint_blocks(model, policy, offload=offload_activations(min_bytes=0) if offload else None)
    trained: Any = model
    if how == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    with memory_report(model):
        trained(tokens).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
def test_gradients_are_the_same(how: str, policy: str, ranks) -> None:
    expected = ranks.run(gradients, 2, how=how, policy=None, offload=False)
    for results in ranks.run(gradients, 2, how=how, policy=policy, offload=policy == "full"):
        assert all(torch.equal(a, b) for a, b in zip(results, expected[0], strict=True))
