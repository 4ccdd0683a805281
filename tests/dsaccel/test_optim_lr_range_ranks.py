"""The learning rate range test in several processes: they agree, stop together, and leave no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dsaccel.optim import LRRangeResult, lr_range_test

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def failing_at(step: int) -> Callable[..., Tensor]:
    count = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        loss = loss_of(model, batch)
        if count == step:
            raise RuntimeError("broken")
        return loss

    return loss_fn


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def small_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [tuple(torch.randn(8, n, generator=generator).double() for n in (4, 1)) for _ in range(3)]  # type: ignore[misc]


RANGE = {"lowest": 1e-3, "highest": 30.0, "steps": 25, "smoothing": 0.5}


def one_process() -> LRRangeResult:
    model = small_model()
    return lr_range_test(model, torch.optim.SGD(model.parameters(), 0.1), loss_of, small_batches(), **RANGE)


def case_parallel(rank: int, kind: str, broken_from: int | None) -> tuple[LRRangeResult, bool, list[float]]:
    """The test in one of two processes, each with half of every batch; then whether all is as before."""
    whole = small_model()
    model: nn.Module = fully_shard(whole) if kind == "fully_shard" else DistributedDataParallel(whole)
    if kind == "zero":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5 if broken_from else 0.0)
    batches = [tuple(part[4 * rank : 4 * rank + 4] for part in batch) for batch in small_batches()]
    count = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        # Only one process sees it.
        is_broken = broken_from is not None and count >= broken_from and rank == 1
        return loss_of(model, batch) * (math.nan if is_broken else 1.0)

    def local(parameter: Any) -> Tensor:
        return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach().clone()

    before = [local(parameter) for parameter in model.parameters()]
    result = lr_range_test(model, optimizer, loss_fn, batches, **RANGE)
    same = all(torch.equal(local(p), x) for p, x in zip(model.parameters(), before, strict=True))
    losses = []
    # Training goes on, from where it was.
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result, same, losses


@pytest.mark.parametrize("kind", ["ddp", "zero", "fully_shard"])
def test_processes_agree_with_one_process(ranks: Ranks, kind: str) -> None:
    (first, *rest), (second, *others) = ranks.run(case_parallel, 2, kind=kind, broken_from=None)
    assert first == second
    assert rest[0]
    assert others[0]
    expected = one_process()
    assert first.losses == pytest.approx(expected.losses, rel=1e-8)
    assert (first.suggestion, first.diverged_at) == (expected.suggestion, expected.diverged_at)
    model, losses = small_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in small_batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [(a + b) / 2 for a, b in zip(rest[1], others[1], strict=True)] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_processes_stop_together(ranks: Ranks, kind: str) -> None:
    (first, *_), (second, *_) = ranks.run(case_parallel, 2, kind=kind, broken_from=5)
    assert len(first.losses) == len(second.losses) == 7
    assert first.diverged_at == second.diverged_at == first.rates[4]
    assert all(math.isnan(loss) for loss in (*first.losses[4:], *second.losses[4:]))


def break_off(broken: Callable[..., Tensor], module: nn.Module, inputs: Any, out: Tensor) -> None:
    broken(nn.Identity(), (inputs[0], out))


def case_exception(rank: int, kind: str, where: str) -> tuple[list[float], list[float]]:
    """Losses of training after a test that broke off, and without one."""
    losses: list[list[float]] = []
    for is_tested in (True, False):
        whole = small_model()
        model: nn.Module = fully_shard(whole) if kind == "fully_shard" else DistributedDataParallel(whole)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        if is_tested:
            loss_fn = broken = failing_at(1 if where == "before" else 3)
            if where == "forward":
                loss_fn, hook = loss_of, whole[1].register_forward_hook(partial(break_off, broken))
            elif where == "before":
                loss_fn = partial(lambda broken, model, batch: broken(nn.Identity(), (batch[0], batch[0])), broken)
            with pytest.raises(RuntimeError, match="broken"):
                lr_range_test(model, optimizer, loss_fn, small_batches(), **RANGE)
            if where == "forward":
                hook.remove()
        losses.append([])
        for batch in small_batches():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    return losses[0], losses[1]


@pytest.mark.parametrize("where", ["before", "forward", "after forward"])
@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_exceptions_leave_no_trace_in_parallel(ranks: Ranks, kind: str, where: str) -> None:
    if (kind, where) == ("fully_shard", "forward") and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("fully_shard forgets an unfinished forward from torch 2.13 on")
    for found, expected in ranks.run(case_exception, 2, kind=kind, where=where):
        assert found == expected
