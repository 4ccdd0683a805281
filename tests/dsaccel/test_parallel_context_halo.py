"""Halo exchange: what ranks get of their neighbours' slices, and where gradients go."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cases import fails, mesh_of_all
from ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsaccel.parallel.context import exchange_halo, gather_sequence, shard_sequence

pytestmark = pytest.mark.usefixtures("one_thread")


def test_halo_is_what_neighbours_hold_and_its_gradient_goes_back(ranks: Ranks) -> None:
    for world in (1, 2, 3, 4):
        ranks.run(halo_case, world)


def halo_case(rank: int) -> None:
    world, mesh, choice = dist.get_world_size(), mesh_of_all(), random.Random(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for _ in range(5):
            lengths = [choice.choice((0, 1, 2, 5, 7)) for _ in range(world)]
            left, right = (choice.choice((None, 0, 1, 3, 6, 50)) for _ in range(2))
            total = sum(lengths)
            starts = [sum(lengths[:other]) for other in range(world)]
            wanted = [
                (0 if left is None else max(s - left, 0), total if right is None else min(s + n + right, total))
                for s, n in zip(starts, lengths, strict=True)
            ]
            # Small integers, so that sums are exact in every dtype.
            shapes = ((2, 3, total, 4), (2, 1, total, 2))
            whole = [torch.randint(-3, 4, shape).to(dtype).requires_grad_() for shape in shapes]
            weights = [[torch.randint(-3, 4, x[:, :, a:b].shape).to(dtype) for x in whole] for a, b in wanted]
            # One process that has every rank's view of the whole.
            for (a, b), parts in zip(wanted, weights, strict=True):
                sum((x[:, :, a:b] * w).sum() for x, w in zip(whole, parts, strict=True)).backward()  # type: ignore[union-attr]
            start, length, (a, b) = starts[rank], lengths[rank], wanted[rank]
            own = [x.detach()[:, :, start : start + length].clone().requires_grad_() for x in whole]
            halo = exchange_halo(*own, left=left, right=right, mesh=mesh, lengths=lengths)
            assert (halo.before, halo.after) == (start - a, b - start - length)
            for got, x in zip(halo.tensors, whole, strict=True):
                assert torch.equal(got, x[:, :, a:b])
            sum((x * w).sum() for x, w in zip(halo.tensors, weights[rank], strict=True)).backward()  # type: ignore[union-attr]
            for got, x in zip(own, whole, strict=True):
                assert torch.equal(got.grad, x.grad[:, :, start : start + length])  # type: ignore[arg-type, index]
            assert torch.equal(gather_sequence(own[0], mesh, 2, lengths=lengths), whole[0])


def test_integers_and_other_dimensions(ranks: Ranks) -> None:
    ranks.run(integers_case, 3)


def integers_case(rank: int) -> None:
    mesh, whole = mesh_of_all(), torch.arange(24).view(2, 12)
    own = shard_sequence(whole, mesh)
    assert torch.equal(own, whole[:, 4 * rank : 4 * rank + 4])
    for dim, x, all_of_it in ((-1, own, whole), (1, own, whole), (0, own[0], whole[0]), (0, own.T, whole.T)):
        halo = exchange_halo(x, left=2, right=5, mesh=dist.group.WORLD, dim=dim)
        first, count = max(4 * rank - 2, 0), halo.before + 4 + halo.after
        assert torch.equal(halo.tensors[0], all_of_it.narrow(dim, first, count))
    assert torch.equal(gather_sequence(own, mesh), whole)
    assert torch.equal(gather_sequence(shard_sequence(whole, mesh, 1).T, mesh, 0), whole.T)
    empty = torch.empty(0, 3, 4, 2)
    assert exchange_halo(empty, left=1, right=1, mesh=mesh).tensors[0].shape[:1] == (0,)


def test_errors_of_exchange_come_before_anything_is_sent(ranks: Ranks) -> None:
    ranks.run(errors_case, 2)


def errors_case(rank: int) -> None:
    mesh, x = mesh_of_all(), torch.randn(1, 2, 4, 8)
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))

    def halo(*tensors: Any, **options: Any) -> None:
        exchange_halo(*tensors, **{"left": 1, "right": 0, "mesh": mesh, **options})

    fails(ValueError, "tensors: expected at least one", halo)
    fails(TypeError, "tensors: expected tensors", halo, [x])
    fails(ValueError, "tensors: expected a dimension 2, got shape [4]", halo, torch.ones(4))
    fails(ValueError, "tensors: expected one dtype and device, torch.float32 on cpu", halo, x, x.double())
    fails(ValueError, "tensors: expected one length along dimension 2, 4", halo, x, x[:, :, 1:])
    fails(ValueError, "left: expected 0 or more, or None, got -1", halo, x, left=-1)
    fails(TypeError, "right: expected an int or None", halo, x, right=1.5)
    fails(ValueError, "lengths: expected 2 numbers from 0 on", halo, x, lengths=[4])
    fails(ValueError, "lengths: expected 2 numbers from 0 on", halo, x, lengths=[4, -1])
    fails(ValueError, "lengths: expected 4, the length of the slice", halo, x, lengths=[5, 5])
    fails(ValueError, 'mesh: expected one dimension, as mesh["cp"] has, got 2', halo, x, mesh=square)
    fails(TypeError, "mesh: expected a DeviceMesh or a ProcessGroup", halo, x, mesh="cp")

    fails(ValueError, "x: expected a multiple of 2 ranks along dimension 2", shard_sequence, x[:, :, 1:], mesh, 2)
    fails(ValueError, "x: expected a multiple of 2 ranks along dimension 7", shard_sequence, x, mesh, 7)
    fails(TypeError, "x: expected a tensor", shard_sequence, [1, 2], mesh)

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(halo_square(leaf, mesh), leaf, create_graph=True)
    fails(RuntimeError, "once_differentiable", grad.sum().backward)


def halo_square(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return exchange_halo(x, left=1, right=0, mesh=mesh).tensors[0].square().sum()
