"""One of the two processes of test_amp_ranks.py: runs cases, and fails if a value is not right."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsaccel.amp import LossScaler, StepResult


def step(
    scaler: LossScaler,
    optimizer: torch.optim.Optimizer,
    weights: list[Tensor],
    value: float,
    unscale: bool,
    **options: Any,
) -> StepResult:
    """One window, in which the first gradient has ``value``."""
    loss = torch.zeros(())
    for weight in weights:
        gradient = torch.randn_like(weight)
        gradient.view(-1)[0] = value
        loss = loss + (weight * gradient).sum()
    scaler.scale(loss).backward() if weights else scaler.scale(loss)
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer, **options)
    scaler.update()
    optimizer.zero_grad()
    return result


def infinite_on_one_rank(rank: int) -> None:
    for fused in (False, True):
        for unscale in (False, True):
            for options in ({}, {"max_norm": 1.0}):
                for broken in (0, 1):
                    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
                    before = copy.deepcopy(weights)
                    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=fused)
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
                    scaler = LossScaler("cpu", process_group=dist.group.WORLD)
                    result = step(scaler, optimizer, weights, math.inf if rank == broken else 1.0, unscale, **options)
                    assert not result
                    assert scaler.get_scale() == 4096
                    assert not scaler.step_scheduler(scheduler)
                    torch.testing.assert_close(weights, before, rtol=0, atol=0)
                    assert step(scaler, optimizer, weights, 1.0, unscale, **options)
                    assert scaler.step_scheduler(scheduler)
                    assert not torch.equal(weights[1], before[1])
                    assert weights[0].isfinite().all()


def a_rank_without_gradients(rank: int) -> None:
    for fused in (False, True):
        used = [nn.Parameter(torch.randn(5, 3))]
        optimizer = torch.optim.AdamW(used, fused=fused)
        scaler = LossScaler("cpu", process_group=dist.group.WORLD, growth_interval=1)
        for value, scale in ((1.0, 16384), (math.nan, 8192), (1.0, 16384)):
            result = step(scaler, optimizer, used if rank == 0 else [], value, False, max_norm=1.0)
            assert bool(result) == math.isfinite(value)
            assert scaler.get_scale() == scale


def without_a_group_each_for_itself(rank: int) -> None:
    weights = [nn.Parameter(torch.randn(5, 3))]
    scaler = LossScaler("cpu")
    result = step(scaler, torch.optim.SGD(weights), weights, math.inf if rank == 0 else 1.0, False)
    assert bool(result) == (rank == 1)
    assert scaler.get_scale() == (4096 if rank == 0 else 8192)


def sharded(rank: int) -> None:
    """Parameters sharded by fully_shard, all of them or together with plain ones, against one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for fused, partly in ((True, False), (False, False), (False, True)):
        torch.manual_seed(3)
        whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model = copy.deepcopy(whole)
        fully_shard(model[0] if partly else model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.5, fused=fused)
        right = torch.optim.AdamW(whole.parameters(), lr=0.1, eps=0.5)
        scaler = LossScaler("cpu", init_scale=65536.0)
        for value in (1.0, math.inf, 1.0):
            x = torch.randn(2, 4, 5, dtype=torch.float64)
            x[0, 0, 0] = value  # of rank 0
            # The part that is not sharded has to see the same on both, as nobody averages its gradients.
            mine = x if partly else x[rank]
            scaler.scale(model(mine).square().mean() * 30).backward()
            result = scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            optimizer.zero_grad()
            assert bool(result) == math.isfinite(value)
            assert isinstance(result.stepped, Tensor) == fused
            if not result:
                continue
            right.zero_grad()
            (whole(x).square().mean() * 30).backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            assert norm > 1
            right.step()
            torch.testing.assert_close(result.total_norm.double(), norm, rtol=1e-6, atol=0)
        assert scaler.get_scale() == 32768
        for mine, wanted in zip(model.parameters(), whole.parameters(), strict=True):
            full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            torch.testing.assert_close(full.detach(), wanted.detach(), rtol=1e-6, atol=1e-6)


CASES = {
    case.__name__: case
    for case in (infinite_on_one_rank, a_rank_without_gradients, without_a_group_each_for_itself, sharded)
}

if __name__ == "__main__":
    rank, store, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in names:
        torch.manual_seed(rank)
        CASES[name](rank)
        dist.barrier()
    dist.destroy_process_group()
