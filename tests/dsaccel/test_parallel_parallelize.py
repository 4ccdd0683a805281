"""Every combination that fits four processes trains as one process does on the whole batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from parallel_models import gathered, language_model, loss_fn
from ranks import Ranks
from torch import Tensor, nn

from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel import ParallelPlan, make_mesh, parallelize
from dskernels import use_backend

STEPS = 3
MAX_NORM = 0.2


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As trainers make it: groups by the number of dimensions."""
    matrices = [p for p in parameters if p.dim() > 1]
    gains = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    """For each step two, which are accumulated."""
    tokens = torch.randint(0, 32, (STEPS, 2, 8, 25))
    return [(x[..., :-1], x[..., 1:]) for x in tokens]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor | None], rtol: float) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=rtol, atol=rtol * 0.1, msg=lambda m, n=name: f"{n}: {m}")


def equals_one_process(rank: int, spec: str, factory: Any = adamw) -> list[str]:
    plan = ParallelPlan.parse(spec)
    # Of a pipeline, the norm is rounded to float32, 6e-8, before it is used; steps of SGD with lr 0.5 add up to more.
    rtol = 1e-6 if plan.pp > 1 else 1e-9
    with use_backend("reference"):
        whole = language_model()
        parts = parallelize(copy.deepcopy(whole), plan, loss_fn=loss_fn)
        mine, right = parts.optimizer(factory), factory(list(whole.parameters()))
        for inputs, targets in batches():
            for index in range(2):
                wanted = loss_fn(whole(inputs[index]), targets[index])
                (wanted / 2).backward()
                local = parts.local_batch(inputs[index]), parts.local_batch(targets[index])
                loss = parts.forward_backward(*local, factor=0.5, last=index == 1)
                torch.testing.assert_close(loss.double(), wanted.detach(), rtol=rtol, atol=0)
            assert_equal(gathered(parts, "grad"), {name: p.grad for name, p in whole.named_parameters()}, rtol)
            norm = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
            assert norm > MAX_NORM
            torch.testing.assert_close(parts.clip_grad_norm_(MAX_NORM).double(), norm, rtol=1e-6, atol=0)
            right.step()
            right.zero_grad()
            mine.step()
            mine.zero_grad()
            parameters = {name: p.detach() for name, p in whole.named_parameters()}
            assert_equal(gathered(parts), parameters, rtol)
            with torch.no_grad():
                wanted = loss_fn(whole(inputs[0]), targets[0])
            local = parts.local_batch(inputs[0]), parts.local_batch(targets[0])
            torch.testing.assert_close(parts.evaluate(*local).double(), wanted, rtol=rtol, atol=0)
    assert parts.is_main == (rank == 0)
    return [name for name, _ in parts.named_parameters()]


PLANS = [
    "dp=1",
    "dp=2",
    "dp=2,zero=0",
    "dp=4",
    "shard=2,zero=1",
    "shard=2,zero=2",
    "shard=2",
    "shard=4",
    "dp=2,shard=2",
    "dp=2,shard=2,zero=1",
    "dp=2,shard=2,zero=2",
    "cp=2",
    "cp=4",
    "dp=2,cp=2",
    "shard=2,cp=2",
    "shard=2,cp=2,zero=1",
    "shard=2,cp=2,zero=2",
    "pp=2",
    "pp=4",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=interleaved",
    "pp=2,microbatches=4",
    "dp=2,pp=2",
    "shard=2,pp=2",
    "shard=2,pp=2,zero=1",
    "shard=2,pp=2,zero=2",
    "pp=2,cp=2",
    "dp=2,pp=2,schedule=interleaved",
    "tp=2",
    "tp=2,sequence_parallel=false",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=0",
    "shard=2,tp=2",
    "shard=2,tp=2,zero=2",
    "tp=2,cp=2",
    "pp=2,tp=2",
]


@pytest.mark.parametrize("spec", PLANS)
def test_trains_as_one_process_does(ranks: Ranks, spec: str) -> None:
    names = ranks.run(equals_one_process, ParallelPlan.parse(spec).world_size, spec=spec)
    # Nothing is missing.
    assert {name for each in names for name in each} == {name for name, _ in language_model().named_parameters()}


@pytest.mark.parametrize("spec", ["dp=2", "shard=2", "shard=2,zero=1", "pp=2"])
def test_trains_with_momentum(ranks: Ranks, spec: str) -> None:
    ranks.run(equals_one_process, 2, spec=spec, factory=sgd)


def test_one_process_needs_no_others() -> None:
    equals_one_process(0, "")


def recompute(stage: nn.Module) -> None:
    """Activation checkpointing of each block, in place."""
    for block in stage.blocks:
        vars(block)["forward"] = functools.partial(
            torch.utils.checkpoint.checkpoint, type(block).forward.__get__(block), use_reentrant=False
        )


def in_float32(rank: int, spec: str) -> None:
    """With the operators' own backend, and blocks that are recomputed."""
    whole = language_model().float()
    parts = parallelize(copy.deepcopy(whole), ParallelPlan.parse(spec), loss_fn=loss_fn, checkpoint=recompute)
    inputs, targets = (x[0] for x in batches()[0])
    wanted = loss_fn(whole(inputs), targets)
    wanted.backward()
    loss = parts.forward_backward(parts.local_batch(inputs), parts.local_batch(targets))
    # Sums of a few hundred products of size 1, each rounded to 6e-8.
    torch.testing.assert_close(loss.float(), wanted.detach(), rtol=1e-5, atol=0)
    right = dict(whole.named_parameters())
    for name, gradient in gathered(parts, "grad").items():
        torch.testing.assert_close(gradient, right[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["dp=1", "dp=2,tp=2", "shard=2,cp=2", "shard=2,pp=2", "pp=2,tp=2"])
def test_recomputed_in_float32(ranks: Ranks, spec: str) -> None:
    ranks.run(in_float32, ParallelPlan.parse(spec).world_size, spec=spec)


def wrong_calls(rank: int) -> None:
    model = language_model()
    with pytest.raises(ValueError, match=r"plan: expected one for 2 processes, got 1 \(no parallelism\)"):
        parallelize(model, ParallelPlan(), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"plan: expected one for 2 processes, got 4 \(dp=4\)"):
        parallelize(model, ParallelPlan(dp=4), loss_fn=loss_fn)
    mesh = make_mesh(ParallelPlan(dp=2), "cpu")
    with pytest.raises(ValueError, match=r"mesh: expected dimensions \{'pp': 1, 'dp': 1, 'shard': 2, .*, got \{"):
        parallelize(model, ParallelPlan(shard=2), loss_fn=loss_fn, mesh=mesh)
    odd = SlidingWindowLM(32, 24, 1, 3, window=4, max_positions=32)
    with pytest.raises(ValueError, match="num_heads a multiple of 2 ranks, got 3"):
        parallelize(odd, ParallelPlan(tp=2), loss_fn=loss_fn)
    with pytest.raises(TypeError, match="model: expected a SlidingWindowLM"):
        parallelize(nn.Linear(2, 2), ParallelPlan(pp=2), loss_fn=loss_fn)
    with pytest.raises(ValueError, match="count: expected at most a stage for each of 2 layers, got 4"):
        parallelize(language_model(layers=2), ParallelPlan(pp=2, schedule="interleaved"), loss_fn=loss_fn)
    with pytest.raises(ValueError, match="microbatches: expected at least 2 for 1f1b"):
        parallelize(model, ParallelPlan(pp=2, microbatches=1), loss_fn=loss_fn)
    parts = parallelize(language_model(), ParallelPlan(pp=2, microbatches=4), loss_fn=loss_fn)
    x = torch.zeros(6, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="inputs: expected rows that divide into 4 microbatches"):
        parts.forward_backward(x, x)
    parts = parallelize(language_model(), ParallelPlan(cp=2), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"x: expected shape \[B, N\] with B a multiple of 1 and N of 2, got \[6, 7\]"):
        parts.local_batch(x[:, :7])
    parts = parallelize(language_model(), ParallelPlan(dp=2), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"x: expected shape \[B, N\] with B a multiple of 2 and N of 1, got \[5, 8\]"):
        parts.local_batch(x[:5])


def test_what_does_not_fit(ranks: Ranks) -> None:
    ranks.run(wrong_calls, 2)


def test_no_processes() -> None:
    with pytest.raises(RuntimeError, match=r"plan: 2 processes need torch\.distributed"):
        parallelize(language_model(), ParallelPlan(dp=2), loss_fn=loss_fn)
