"""Models under context parallelism train as in one process, or say why they cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cases import mesh_of_all
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dsaccel.modules import SlidingWindowLM, WindowAttention, WindowMultiheadAttention
from dsaccel.parallel.context import context_parallel, gather_sequence, shard_sequence

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("world", "window"), [(2, 4), (3, 9), (4, 13)])
def test_language_model_trains_as_in_one_process(ranks: Ranks, world: int, window: int) -> None:
    ranks.run(language_model_case, world, window=window)


def language_model_case(rank: int, window: int) -> None:
    mesh = mesh_of_all()
    model = SlidingWindowLM(17, 16, 2, 2, 1, window=window, max_positions=24).double()
    parallel = context_parallel(copy.deepcopy(model), mesh)
    tokens = torch.randint(17, (2, 25))
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    for recompute in (False, True):
        parallel.zero_grad()
        here = shard_sequence(x, mesh)
        own = checkpoint(parallel, here, use_reentrant=False) if recompute else parallel(here)
        part = F.cross_entropy(own.flatten(0, 1), shard_sequence(y, mesh).flatten())
        part.backward()
        torch.testing.assert_close(gather_sequence(own.detach(), mesh), logits, rtol=1e-10, atol=1e-12)
        values = [part.detach(), *(p.grad for p in parallel.parameters())]
        for value, expected in zip(values, [loss, *(p.grad for p in model.parameters())], strict=True):
            dist.all_reduce(value)
            torch.testing.assert_close(value / dist.get_world_size(), expected, rtol=1e-10, atol=1e-12)
    assert list(parallel.state_dict()) == list(model.state_dict())
    with pytest.raises(IndexError, match="the last key stands at position"):
        parallel(tokens[:, : 24 // dist.get_world_size() + 1])


def test_compiles_whole(ranks: Ranks) -> None:
    ranks.run(compile_case, 2)


def compile_case(rank: int) -> None:
    mesh = mesh_of_all()
    model = context_parallel(SlidingWindowLM(17, 16, 1, 2, window=5, max_positions=64), mesh)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (6, 9):
        tokens = torch.randint(17, (2, length))
        grads = []
        for each in (model, compiled):
            out = each(tokens)
            grads.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class OwnAttend(WindowAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return q


class Scaled(WindowAttention):
    def forward(self, x: Tensor, *args: Any, **given: Any) -> Tensor:
        return 2 * super().forward(x, *args, **given)


def test_models_that_cannot_be_parallel(ranks: Ranks) -> None:
    ranks.run(models_case, 1)


def models_case(rank: int) -> None:
    mesh = mesh_of_all()
    attention = WindowAttention(8, 2, window=(3, 0))
    for other, message in (
        (nn.MultiheadAttention(8, 2), "no attention other than WindowAttention, got 1, a MultiheadAttention"),
        (WindowMultiheadAttention(8, 2, window=(3, 0)), "got 1, a WindowMultiheadAttention"),
        (OwnAttend(8, 2), "1: attend: expected WindowAttention's own, got one of OwnAttend"),
    ):
        with pytest.raises(ValueError, match=message):
            context_parallel(nn.Sequential(attention, other), mesh)
        assert type(attention) is WindowAttention
    with pytest.raises(ValueError, match="at least one WindowAttention, got Linear"):
        context_parallel(nn.Linear(2, 2), mesh)
    with pytest.raises(TypeError, match="mesh"):
        context_parallel(attention, None)  # type: ignore[arg-type]

    model = SlidingWindowLM(17, 16, 1, 2, window=5, max_positions=64)
    tokens = torch.randint(17, (2, 9))
    expected, caches = model(tokens), model.new_caches(2)
    assert context_parallel(model, mesh) is model
    assert torch.equal(model(tokens), expected)
    with pytest.raises(ValueError, match="cache: expected None under context parallelism"):
        model(tokens, caches)
    with pytest.raises(ValueError, match="cache: expected none under context parallelism"):
        model.generate(tokens, 1)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn: expected WindowAttention, got"):
        context_parallel(model, mesh)

    # Both kinds of mesh are shared by copies.
    for given in (mesh, dist.group.WORLD):
        attention = context_parallel(WindowAttention(8, 2, window=(3, 0)), given)  # type: ignore[arg-type]
        twin, x = copy.deepcopy(attention), torch.randn(1, 6, 8)
        assert twin.context_mesh is given
        assert torch.equal(twin(x), attention(x))
        assert twin.qkv.weight is not attention.qkv.weight

    # What a subclass adds elsewhere stays, and a module in two places becomes parallel once.
    scaled = Scaled(8, 2, window=(3, 0))
    x = torch.randn(1, 6, 8)
    expected = scaled(x)
    context_parallel(nn.ModuleList((scaled, scaled)), mesh)
    assert torch.equal(scaled(x), expected)
    assert isinstance(scaled, Scaled)
    assert type(scaled).__name__ == "ContextScaled"


@pytest.mark.gpu
@pytest.mark.parametrize("carrier", ["gloo", "nccl"])
def test_language_model_on_gpus(ranks: Ranks, carrier: str) -> None:
    if carrier == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    ranks.run(gpu_case, 2, carrier=carrier)


def gpu_case(rank: int, carrier: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.new_group(backend=carrier)
    model = SlidingWindowLM(17, 32, 2, 2, window=9, max_positions=64).to(device)
    parallel = context_parallel(copy.deepcopy(model), group)
    tokens = torch.randint(17, (2, 48)).to(device)
    expected, own = model(tokens), parallel(shard_sequence(tokens, group))
    torch.testing.assert_close(own, shard_sequence(expected, group), rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    own.square().sum().backward()
    for got, right in zip(parallel.parameters(), model.parameters(), strict=True):
        dist.all_reduce(got.grad, group=group)
        torch.testing.assert_close(got.grad, right.grad, rtol=1e-3, atol=1e-3)
