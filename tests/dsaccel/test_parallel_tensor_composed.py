"""Tensor parallelism together with the rest: fully_shard, checkpointing, autocast, caches, shared parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Ranks
from split_models import (
    VOCABULARY,
    assert_same,
    batch,
    canonical,
    gradients,
    language_model,
    loss_of,
    parameters,
    tp_mesh,
    train,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dskernels
from dsaccel.parallel.tensor import canonical_layout, tensor_parallel


def composes(rank: int, sequence_parallel: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    alone = language_model()
    model = tensor_parallel(copy.deepcopy(alone), mesh["tp"], sequence_parallel=sequence_parallel)
    for block in model.blocks:
        block.forward = _checkpointed(block.forward)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    assert_same(parameters(model), parameters(alone))
    results = []
    for module, rows in ((alone, slice(None)), (model, slice(mesh.get_local_rank(0), mesh.get_local_rank(0) + 1))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        norms = []
        for length in (24, 25):
            optimizer.zero_grad()
            inputs, targets = batch(length)
            F.cross_entropy(module(inputs[rows]).flatten(0, 1), targets[rows].flatten()).backward()
            norms.append(dskernels.clip_and_scale_([x.grad for x in module.parameters()], max_norm=0.5)[0].double())
            optimizer.step()
        # The layout holds for moments, too.
        state = optimizer.state_dict()["state"]
        named = dict(zip(dict(module.named_parameters()), state.values(), strict=True))
        moments = canonical(module, {name: entry["exp_avg"] for name, entry in named.items()})
        results.append([{"norms": torch.stack(norms)}, gradients(module), moments, parameters(module)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert_same(found, expected)
    for name, (to_canonical, from_canonical) in canonical_layout(model).items():
        parameter = model.get_parameter(name).detach()
        again = from_canonical(to_canonical(parameter))
        assert again.placements == parameter.placements
        assert torch.equal(again.full_tensor(), parameter.full_tensor())


def _checkpointed(forward: Any) -> Any:
    return lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
def test_composes_with_fully_shard_and_checkpointing(ranks: Ranks, sequence_parallel: bool) -> None:
    ranks.run(composes, 4, sequence_parallel=sequence_parallel)


def generates_alike(rank: int, sequence_parallel: bool) -> None:
    alone = language_model()
    model = tensor_parallel(copy.deepcopy(alone), tp_mesh(), sequence_parallel=sequence_parallel)
    tokens, _ = batch(9)
    expected = alone.generate(tokens, 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(model.generate(tokens, 5, generator=torch.Generator().manual_seed(3)), expected)
    cache = model.new_caches(2)[0]
    assert cache.keys.shape[1] == alone.new_caches(2)[0].keys.shape[1] // torch.distributed.get_world_size()


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
def test_generation_draws_the_same_tokens(ranks: Ranks, sequence_parallel: bool) -> None:
    ranks.run(generates_alike, 2, sequence_parallel=sequence_parallel)


def keeps_logits_sharded(rank: int) -> None:
    alone = language_model()
    model = tensor_parallel(copy.deepcopy(alone), tp_mesh(), sharded_logits=True)
    inputs, targets = batch(13)
    logits = model(inputs)
    assert logits.to_local().shape[2] == VOCABULARY // 2
    with loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    expected = loss_of(alone, 13)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-10, atol=0)
    assert_same(gradients(model), gradients(alone))


def test_logits_stay_sharded_for_loss_parallel(ranks: Ranks) -> None:
    ranks.run(keeps_logits_sharded, 2)


def shares_layers(rank: int) -> None:
    alone = language_model()
    alone.blocks[1].attn.qkv.weight = alone.blocks[0].attn.qkv.weight
    alone.blocks[1].norm2.weight = alone.blocks[0].norm1.weight
    alone.blocks.append(alone.blocks[0])
    model = tensor_parallel(copy.deepcopy(alone), tp_mesh())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in alone.named_parameters()]
    assert model.state_dict().keys() == alone.state_dict().keys()
    assert model.blocks[1].attn.qkv.weight is model.blocks[0].attn.qkv.weight
    names = {f"blocks.{index}.attn.qkv.weight" for index in range(3)}
    assert canonical_layout(model).keys() == names
    assert_same(parameters(model), parameters(alone))
    expected, found = train(alone, [24, 25]), train(model, [24, 25])
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-10, atol=0)
    assert_same(parameters(model), parameters(alone))


def test_shared_parameters_stay_shared(ranks: Ranks) -> None:
    ranks.run(shares_layers, 2)


def autocasts(rank: int, sequence_parallel: bool) -> None:
    alone = language_model().float()
    model = tensor_parallel(copy.deepcopy(alone), tp_mesh(), sequence_parallel=sequence_parallel)
    exact = loss_of(alone, 24)
    exact.backward()
    expected = gradients(alone)
    errors = []
    for module in (alone, model):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(module, 24)
        loss.backward()
        # The loss, whose sum hides most of it, and the gradients, each of which counts.
        found = gradients(module)
        total = sum(float((found[name] - x).square().sum()) for name, x in expected.items())
        errors.append((abs(float(loss - exact)), total**0.5))
    # Sums over ranks are rounded once more.
    assert errors[1][1] <= 2 * errors[0][1]
    assert errors[1][0] <= 2 * errors[0][0] + 2**-8


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "plain"])
def test_autocast_rounds_as_in_one_process(ranks: Ranks, sequence_parallel: bool) -> None:
    ranks.run(autocasts, 2, sequence_parallel=sequence_parallel)
