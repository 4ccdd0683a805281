"""A pipeline over several ranks computes what one process computes on the whole batch."""

from __future__ import annotations

import pytest
import torch
from pipelines import assert_equal_gradients, loss_of, make_batch, make_model, make_pipeline, parameters_of, world
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def two_steps(rank: int, size: int, schedule: str, layers: int, microbatches: int, per_rank: int) -> None:
    model = make_model(layers)
    pipeline = make_pipeline(model, world(size), schedule=schedule, microbatches=microbatches, per_rank=per_rank)
    parameters = list(parameters_of(pipeline).values())
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    whole = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    # Another length and another number of rows in the second step.
    for step, (rows, length) in enumerate([(8, 12), (4, 9)]):
        inputs, targets = make_batch(rows, length, step)
        expected = loss_of(model(inputs), targets)
        expected.backward()
        loss = pipeline.forward_backward(inputs, targets)
        pipeline.sync_tied_gradients()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        assert_equal_gradients(pipeline, model)
        # Evaluation has any number of rows, and leaves gradients as they are.
        held = [parameter.grad.clone() for parameter in parameters]
        inputs, targets = make_batch(3, 7, 10)
        torch.testing.assert_close(
            pipeline.evaluate(inputs, targets), loss_of(model(inputs), targets).detach(), rtol=1e-12, atol=0
        )
        torch.testing.assert_close([parameter.grad for parameter in parameters], held, rtol=0, atol=0)
        for each in (optimizer, whole):
            each.step()
            each.zero_grad()
    expected = dict(model.named_parameters())
    for name, parameter in parameters_of(pipeline).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("size", "schedule", "layers", "microbatches", "per_rank"),
    [
        (2, "gpipe", 3, 1, 1),
        (2, "gpipe", 3, 4, 1),
        (4, "gpipe", 5, 2, 1),
        (2, "1f1b", 3, 2, 1),
        (2, "1f1b", 2, 4, 1),
        (4, "1f1b", 5, 4, 1),
        (2, "interleaved", 5, 1, 2),
        (2, "interleaved", 5, 4, 2),
        (4, "interleaved", 8, 4, 2),
    ],
)
def test_two_steps_equal_one_process(
    ranks: Ranks, size: int, schedule: str, layers: int, microbatches: int, per_rank: int
) -> None:
    arguments = {"layers": layers, "microbatches": microbatches, "per_rank": per_rank}
    ranks.run(two_steps, size, size=size, schedule=schedule, **arguments)


def accumulated(rank: int, schedule: str, per_rank: int) -> None:
    """Calls add up, with a factor each, also after the tied gradients were summed."""
    model = make_model(4)
    pipeline = make_pipeline(model, world(2), schedule=schedule, microbatches=2, per_rank=per_rank)
    for call, (rows, factor) in enumerate([(4, 0.25), (6, torch.tensor(3.0)), (2, torch.tensor([2.0]))]):
        inputs, targets = make_batch(rows, 8, call)
        expected = loss_of(model(inputs), targets)
        (expected * float(factor)).backward()
        loss = pipeline.forward_backward(inputs, targets, factor)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        if call:
            pipeline.sync_tied_gradients()
            pipeline.sync_tied_gradients()
            assert_equal_gradients(pipeline, model)


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("interleaved", 2)])
def test_calls_accumulate_gradients(ranks: Ranks, schedule: str, per_rank: int) -> None:
    ranks.run(accumulated, 2, schedule=schedule, per_rank=per_rank)


def tied(rank: int) -> tuple[list[str], float, Tensor]:
    model = make_model(3)
    expected = model.embed.weight.detach().clone()
    if rank == 2:
        # The last stage starts from another embedding, and gets that of the first.
        nn.init.zeros_(model.embed.weight)
    pipeline = make_pipeline(model, world(3), schedule="gpipe", microbatches=2)
    embeds = [p for name, p in parameters_of(pipeline).items() if name == "embed.weight"]
    assert len(embeds) == (0 if rank == 1 else 1)
    assert all(torch.equal(embed, expected) for embed in embeds)
    pipeline.forward_backward(*make_batch(4, 8, 0))
    pipeline.sync_tied_gradients()
    counted = [p for name, p in parameters_of(pipeline).items() if name not in pipeline.duplicates]
    squares = sum(float(p.grad.square().sum()) for p in counted)
    return list(pipeline.duplicates), squares, embeds[0].grad if embeds else torch.empty(0)


def test_tied_embedding_counts_once(ranks: Ranks) -> None:
    (first, *_), (middle, *_), (last, *_) = results = ranks.run(tied, 3)
    assert (first, middle, last) == ([], [], ["embed.weight"])
    assert torch.equal(results[0][2], results[2][2])
    model = make_model(3)
    inputs, targets = make_batch(4, 8, 0)
    loss_of(model(inputs), targets).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert sum(squares for _, squares, _ in results) ** 0.5 == pytest.approx(norm.item(), rel=1e-12)


def frozen(rank: int, part: str) -> None:
    """A stage with nothing to learn passes on what others need, and waits for nothing."""
    model = make_model(4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(part) and name != "embed.weight")
    pipeline = make_pipeline(model, world(2), schedule="1f1b", microbatches=2)
    for seed in range(2):
        inputs, targets = make_batch(4, 8, seed)
        loss_of(model(inputs), targets).backward()
        pipeline.forward_backward(inputs, targets)
        pipeline.sync_tied_gradients()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in parameters_of(pipeline).items():
        assert (parameter.grad is None) == (expected[name] is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("part", ["blocks.0", ("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")])
def test_frozen_parts_do_not_hang(ranks: Ranks, part: str | tuple[str, ...]) -> None:
    ranks.run(frozen, 2, part=part)


class Dropping(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.5)


def random_state(rank: int) -> None:
    """Finding the shapes leaves the random state alone: the first call draws what later ones draw."""
    model = make_model(2)
    model.blocks = nn.ModuleList(Dropping(block) for block in model.blocks)
    pipeline = make_pipeline(model, world(2), schedule="gpipe", microbatches=2)
    losses = []
    for _ in range(2):
        torch.manual_seed(rank)
        losses.append(pipeline.forward_backward(*make_batch(4, 8, 0)))
    assert losses[0] == losses[1]
    assert pipeline.forward_backward(*make_batch(4, 8, 0)) != losses[0]


def test_random_state_is_that_of_microbatches(ranks: Ranks) -> None:
    ranks.run(random_state, 2)


def checkpointed(rank: int) -> None:
    model = make_model(4)
    inputs, targets = make_batch(4, 8, 0)
    loss_of(model(inputs), targets).backward()

    def wrap(stage: nn.Module) -> nn.Module:
        for block in stage.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        return stage

    pipeline = make_pipeline(model, world(2), schedule="interleaved", microbatches=2, per_rank=2, wrap=wrap)
    pipeline.forward_backward(inputs, targets)
    pipeline.sync_tied_gradients()
    assert_equal_gradients(pipeline, model)


def test_activation_checkpointing(ranks: Ranks) -> None:
    ranks.run(checkpointed, 2)
