"""Stages that are wrapped, mixed in precision, or not of a language model; and what goes wrong."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pipelines
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dsaccel.parallel.pipeline import Pipeline


def replicated(rank: int, kind: str, schedule: str, per_rank: int) -> list[int]:
    """Pipelines of two ranks, twice, on halves of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = pipelines.make_model(4)
    reduced = []

    def wrap(stage: nn.Module) -> nn.Module:
        if kind == "ddp":
            wrapped = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))

            def count(state, bucket):  # PyTorch takes no other annotations than its own
                reduced.append(bucket.index())
                return allreduce_hook(mesh.get_group("dp"), bucket)

            wrapped.register_comm_hook(None, count)
            return wrapped
        for block in stage.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=kind == "zero3")
        return fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=kind == "zero3")

    pipeline = pipelines.make_pipeline(
        model, mesh["pp"], schedule=schedule, microbatches=2, per_rank=per_rank, wrap=wrap
    )
    optimizer = torch.optim.SGD(pipelines.parameters_of(pipeline).values(), lr=0.3)
    whole = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(2):
        # The second batch has another shape while gradients of the first are held.
        for call, length in enumerate([8, 6]):
            inputs, targets = pipelines.make_batch(8, length, 2 * step + call)
            (0.5 * pipelines.loss_of(model(inputs), targets)).backward()
            half = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
            pipeline.forward_backward(inputs[half], targets[half], 0.5)
        pipeline.sync_tied_gradients()
        pipelines.assert_equal_gradients(pipeline, model)
        expected = pipelines.loss_of(model(inputs[half]), targets[half]).detach()
        torch.testing.assert_close(pipeline.evaluate(inputs[half], targets[half]), expected, rtol=1e-12, atol=0)
        pipelines.assert_equal_gradients(pipeline, model)
        for each in (optimizer, whole):
            each.step()
            each.zero_grad()
    expected = dict(model.named_parameters())
    for name, parameter in pipelines.parameters_of(pipeline).items():
        torch.testing.assert_close(pipelines.full(parameter), expected[name], rtol=1e-10, atol=1e-14, msg=name)
    return reduced


@pytest.mark.parametrize(
    ("kind", "schedule", "per_rank"),
    [
        ("ddp", "1f1b", 1),
        ("ddp", "interleaved", 2),
        ("zero2", "gpipe", 1),
        ("zero3", "1f1b", 1),
        ("zero3", "interleaved", 2),
    ],
)
def test_data_parallel_stages(ranks: Ranks, kind: str, schedule: str, per_rank: int) -> None:
    for reduced in ranks.run(replicated, 4, kind=kind, schedule=schedule, per_rank=per_rank):
        if kind == "ddp":
            # A bucket a stage: gradients are exchanged once a call, not once a microbatch.
            assert len(reduced) == 4 * per_rank


class Watched(torch.autograd.Function):
    """Notes the dtype that forward and backward would multiply in, and whether autocast is on."""

    seen: ClassVar[list[tuple[str, torch.dtype, bool]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Watched.seen.append(("forward", x.dtype, torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Watched.seen.append(("backward", gradient.dtype, torch.is_autocast_enabled("cpu")))
        return gradient


class Watching(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Watched.apply(self.inner(x))


def chain() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def autocast(rank: int, schedule: str, per_rank: int) -> None:
    """Modules that give bfloat16: so does what is sent. Weights learn after an evaluation under the same autocast."""
    mesh = pipelines.world(2)
    model = chain()
    count = 2 * per_rank
    stages = [Watching(model[index * 4 // count : (index + 1) * 4 // count]) for index in range(rank, count, 2)]
    losses = []

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        losses.append(torch.is_autocast_enabled("cpu"))
        return F.mse_loss(out.float(), targets)

    pipeline = Pipeline(stages, mesh, schedule=schedule, microbatches=2, loss_fn=loss_fn)
    inputs, targets = torch.randn(4, 6), torch.randn(4, 6)
    expected = chain()
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(expected(x).float(), y) / 2
        loss.backward()
    Watched.seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        pipeline.evaluate(inputs, targets)
        pipeline.forward_backward(inputs, targets)
    assert set(Watched.seen) == {("forward", torch.bfloat16, True), ("backward", torch.bfloat16, False)}
    assert all(losses)
    for name, parameter in model.named_parameters():
        stage = int(name.split(".")[0]) * count // 4
        if stage % 2 == rank:
            torch.testing.assert_close(parameter.grad, dict(expected.named_parameters())[name].grad, msg=name)
    # Without it, the same pipeline sends float32.
    Watched.seen.clear()
    pipeline.forward_backward(inputs, targets)
    assert {(dtype, enabled) for _, dtype, enabled in Watched.seen} == {(torch.float32, False)}


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("interleaved", 2)])
def test_autocast_is_for_forward_alone(ranks: Ranks, schedule: str, per_rank: int) -> None:
    ranks.run(autocast, 2, schedule=schedule, per_rank=per_rank)


def half_precision(rank: int) -> None:
    """FSDP stages that compute in bfloat16 send that, and add gradients in float32."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = pipelines.make_model(2).float()
    inputs, targets = pipelines.make_batch(8, 8, 0)
    pipelines.loss_of(model(inputs), targets).backward()
    pipeline = pipelines.make_pipeline(
        model,
        mesh["pp"],
        schedule="1f1b",
        microbatches=2,
        wrap=lambda stage: fully_shard(stage, mesh=mesh["shard"], mp_policy=policy),
        loss_fn=lambda out, y: pipelines.loss_of(out.float(), y),
    )
    half = slice(4 * mesh.get_local_rank("shard"), 4 * mesh.get_local_rank("shard") + 4)
    pipeline.forward_backward(inputs[half], targets[half])
    pipeline.sync_tied_gradients()
    expected = dict(model.named_parameters())
    for name, parameter in pipelines.parameters_of(pipeline).items():
        error = pipelines.full(parameter.grad) - expected[name].grad
        # bfloat16 has eight bits, and errors of a few layers add up.
        assert parameter.grad.dtype == torch.float32
        assert error.norm() < 0.05 * expected[name].grad.norm(), name


def test_fsdp_in_bfloat16(ranks: Ranks) -> None:
    ranks.run(half_precision, 4)


class Halve(nn.Module):
    """Half of the positions, as a stage with sequence parallelism hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, ::2].contiguous()


def other_shapes(rank: int, schedule: str) -> None:
    """Stages of any kind; what goes between them has other shapes than inputs and outputs."""
    torch.manual_seed(5)
    model = nn.Sequential(Halve(), nn.Linear(5, 2, dtype=torch.float64))
    pipeline = Pipeline(model[rank], pipelines.world(2), schedule=schedule, microbatches=2, loss_fn=F.mse_loss)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in [(4, 6, 3), (4, 3, 2)]
    )
    expected = F.mse_loss(model(inputs), targets)
    gradients = dict(zip(model.state_dict(), torch.autograd.grad(expected, model.parameters()), strict=True))
    # Strides are those of a slice in one of two calls of the same shape.
    for x in (inputs, torch.cat((inputs, inputs), 2)[..., :3]):
        model.zero_grad()
        loss = pipeline.forward_backward(x, targets)
        pipeline.sync_tied_gradients()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for name, parameter in model[rank].named_parameters(f"{rank}"):
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)
    assert not pipeline.duplicates


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_any_kind(ranks: Ranks, schedule: str) -> None:
    ranks.run(other_shapes, 2, schedule=schedule)


def refused(rank: int) -> None:
    """Every rank says what is wrong with a call, nothing waits, and the next call is right."""
    model = pipelines.make_model(2)
    pipeline = pipelines.make_pipeline(model, pipelines.world(2), schedule="1f1b", microbatches=4)
    tokens, targets = pipelines.make_batch(4, 8, 0)
    expected = pipelines.loss_of(model(tokens), targets).detach()
    for _ in range(2):
        for inputs, following, message in (
            (tokens[:3], targets[:3], r"inputs: expected rows that divide into 4 microbatches, got shape [3, 8]"),
            (tokens[:0], targets[:0], r"inputs: expected rows that divide into 4 microbatches, got shape [0, 8]"),
            (tokens, targets[:2], r"targets: expected 4 rows like inputs, got shape [2, 8]"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                pipeline.forward_backward(inputs, following)
        with pytest.raises(ValueError, match=r"inputs: expected at least one row, got shape \[0, 8\]"):
            pipeline.evaluate(tokens[:0], targets[:0])
        long = torch.zeros(4, 65, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"stage 0: IndexError: .*64"):
            pipeline.forward_backward(long, long)
        with torch.no_grad(), pytest.raises(RuntimeError, match="gradients"):
            pipeline.forward_backward(tokens, targets)
        torch.testing.assert_close(pipeline.forward_backward(tokens, targets), expected)


def test_refused_calls_leave_no_rank_waiting(ranks: Ranks) -> None:
    ranks.run(refused, 2)


class Transposing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Pairing(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def disagreeing(rank: int) -> None:
    mesh, stage = pipelines.world(2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"microbatches: expected the same on every rank, got \[2, 4\]"):
        Pipeline(stage, mesh, microbatches=2 + 2 * rank, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match=r"schedule: expected the same on every rank, got \['gpipe', '1f1b'\]"):
        Pipeline(stage, mesh, schedule=("gpipe", "1f1b")[rank], microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match=r"stages: expected the same on every rank, got \[1, 2\]"):
        Pipeline([stage] * (1 + rank), mesh, schedule="interleaved", microbatches=2, loss_fn=F.mse_loss)
    stage.tied = ("weight",) if rank else ("bias",)
    with pytest.raises(ValueError, match=r"tied: expected the same on every rank, got \[\[\('bias', \[2\]"):
        Pipeline(stage, mesh, microbatches=2, loss_fn=F.mse_loss)
    x = torch.zeros(2, 3, 4)
    for wrong, message in ((Transposing(), "a contiguous tensor"), (Pairing(), "a tensor from each")):
        pipeline = Pipeline(wrong, mesh, microbatches=2, loss_fn=F.mse_loss)
        with pytest.raises(RuntimeError, match=f"stage 0: .*stages: expected {message}"):
            pipeline.evaluate(x, x)


def test_ranks_that_disagree_are_told(ranks: Ranks) -> None:
    ranks.run(disagreeing, 2)
