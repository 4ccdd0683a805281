"""One of the processes of test_clip_and_scale_distributed.py: runs cases, and fails if a value is not right."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dskernels as dk

BACKENDS = ("reference", "cpu") if dk.build_info()["compiled"] else ("reference",)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


class Meshes:
    """A mesh of one dimension, and one of two, of all processes."""

    def __init__(self) -> None:
        world = dist.get_world_size()
        self.line = init_device_mesh("cpu", (world,))
        self.grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("rows", "columns"))


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers in every process, which all have the same seed."""
    return torch.randn(shape).to(dtype)


def spread(mesh: DeviceMesh, placements: list[Placement], *shape: int, dtype: torch.dtype = torch.float32) -> DTensor:
    return distribute_tensor(whole(*shape, dtype=dtype), mesh, placements)


def pieces(mesh: DeviceMesh, placements: list[Placement], *shape: int) -> DTensor:
    """A DTensor with sums that are still to be taken: every process has numbers of its own."""
    own = torch.Generator().manual_seed(dist.get_rank())
    return DTensor.from_local(torch.randn(shape, generator=own), mesh, placements, run_check=False)


LISTS: dict[str, Callable[[Meshes], list[Tensor | None]]] = {
    "rows": lambda m: [spread(m.line, [Shard(0)], 8, 3), None, spread(m.line, [Shard(0)], 12)],
    "columns": lambda m: [spread(m.line, [Shard(1)], 3, 8)],
    "replicas": lambda m: [spread(m.line, [Replicate()], 5, 3)],
    "uneven_and_empty": lambda m: [spread(m.line, [Shard(0)], rows, 3) for rows in (5, 1, 3, 0)],
    "only_on_the_first": lambda m: [spread(m.line, [Shard(0)], 1, 7)],
    "sums": lambda m: [pieces(m.line, [Partial()], 4, 3), pieces(m.line, [Partial("avg")], 6)],
    "dtypes": lambda m: [
        spread(m.line, [Shard(0)], 9, 2, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ],
    "replicas_of_shards": lambda m: [spread(m.grid, [Replicate(), Shard(0)], 5, 3), whole(7)],
    "shards_of_shards": lambda m: [
        spread(m.grid, [Shard(0), Shard(1)], 5, 3),
        spread(m.grid, [Shard(0), Shard(0)], 7, 2),
    ],
    "sums_of_shards": lambda m: [
        pieces(m.grid, [Partial(), Shard(0)], 2, 3),
        pieces(m.grid, [Shard(1), Partial()], 4, 2),
    ],
    "two_meshes_and_plain_ones": lambda m: [
        whole(4, 4),
        spread(m.line, [Shard(0)], 6, 3),
        spread(m.grid, [Shard(0), Shard(1)], 5, 5),
        None,
        spread(m.grid, [Replicate(), Shard(1)], 2, 3),
        spread(m.grid["columns"], [Shard(0)], 3, 2),
        spread(m.grid["rows"], [Shard(0)], 3, 2),
        whole(11, dtype=torch.bfloat16),
        spread(m.line, [Replicate()], 9),
    ],
}


def full(grads: list[Tensor | None]) -> list[Tensor]:
    """What the tensors are as wholes, in float64, copied."""
    wholes = (grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None)
    return [each.detach().double().clone() for each in wholes]


def local(grads: list[Tensor | None]) -> list[Tensor]:
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]


def right_norm(wholes: list[Tensor], norm_type: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in wholes]), norm_type))


@contextmanager
def counted_sums() -> Iterator[list[Any]]:
    """The process groups of all all-reduces."""
    groups: list[Any] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, **options: Any) -> Any:
        groups.append(options["group"])
        return all_reduce(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        yield groups


def norms_are_those_of_the_whole_tensors(backend: str) -> None:
    meshes = Meshes()
    for name, make in LISTS.items():
        grads = make(meshes)
        wholes = full(grads)
        for norm_type in NORM_TYPES:
            for loss_scale in (None, 4.0):
                got = dk.grad_norm(grads, loss_scale=loss_scale, norm_type=norm_type, backend=backend)
                norm = right_norm(wholes, norm_type) / (loss_scale or 1.0)
                # The sums of pieces in float32 are taken by the DTensor itself.
                assert float(got.total_norm) == pytest.approx(norm, rel=1e-6), (name, norm_type)
                assert float(got.found_inf) == 0.0, name


def scaling_is_that_of_the_whole_tensors(backend: str) -> None:
    meshes = Meshes()
    for name, make in LISTS.items():
        grads = make(meshes)
        wholes = full(grads)
        norm = right_norm(wholes, 2.0) / 2
        result = dk.clip_and_scale_(grads, max_norm=0.5 * norm, loss_scale=2.0, backend=backend)
        assert float(result.total_norm) == pytest.approx(norm, rel=1e-6), name
        for after, before, grad in zip(full(grads), wholes, (g for g in grads if g is not None), strict=True):
            rounding = torch.finfo(grad.dtype).eps
            torch.testing.assert_close(after, before * 0.25, rtol=max(2e-6, rounding), atol=1e-6, msg=name)


def what_is_not_finite_in_one_process_is_known_to_all(backend: str) -> None:
    meshes, rank, spoilt = Meshes(), dist.get_rank(), 0
    # What is plain, or replicated, is the same in every process.
    lists = {name: make for name, make in LISTS.items() if not name.startswith(("replicas", "two_meshes"))}
    for name, make in lists.items():
        for norm_type, bad in ((2.0, math.inf), (math.inf, math.nan)):
            for broken in range(dist.get_world_size()):
                grads: list[Any] = make(meshes)
                piece = grads[0].to_local().view(-1)
                # Some have no piece of it.
                holds = torch.tensor(float(rank == broken and piece.numel() > 0))
                if holds:
                    piece[0] = bad
                dist.all_reduce(holds, group=dist.group.WORLD)
                before = [each.clone() for each in local(grads)]
                got = dk.clip_and_scale_(grads, max_norm=0.1, loss_scale=2.0, norm_type=norm_type, backend=backend)
                where = (name, norm_type, broken)
                assert float(got.found_inf) == float(holds), where
                assert bool(got.total_norm.isfinite()) == (not holds), where
                same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(local(grads), before, strict=True)]
                assert all(same) or not holds, where
                spoilt += int(holds)
    assert spoilt > 2 * len(lists)


def sums_and_flags_go_together_once_a_group(backend: str) -> None:
    meshes = Meshes()
    grid = meshes.grid
    by_name = {
        "rows": [meshes.line.get_group()],
        "replicas": [],
        "uneven_and_empty": [meshes.line.get_group()],
        "replicas_of_shards": [grid.get_group("columns")],
        "shards_of_shards": [grid.get_group("rows"), grid.get_group("columns")],
        "two_meshes_and_plain_ones": [meshes.line.get_group(), grid.get_group("rows"), grid.get_group("columns")],
    }
    for name, groups in by_name.items():
        grads = LISTS[name](meshes)
        for call in (dk.grad_norm, lambda grads, **o: dk.clip_and_scale_(grads, max_norm=0.1, **o)):
            with counted_sums() as calls:
                call(grads, backend=backend)
            assert {id(group) for group in calls} == {id(group) for group in groups}, name
            assert len(calls) == len(set(groups)), name


def a_process_outside_of_the_mesh_is_told(backend: str) -> None:
    alone = DeviceMesh("cpu", [0])
    grad = distribute_tensor(torch.tensor([3.0, 4.0]), alone, [Shard(0)])
    if dist.get_rank() == 0:
        assert float(dk.grad_norm([grad], backend=backend).total_norm) == 5.0
    else:
        with pytest.raises(ValueError, match=r"grads\[1\]: expected a DTensor on a mesh with this process"):
            dk.grad_norm([torch.ones(2), grad], backend=backend)


def pieces_that_share_elements_are_refused(backend: str) -> None:
    grad = DTensor.from_local(torch.ones(1).expand(4), Meshes().line, [Shard(0)], run_check=False)
    norm = dk.grad_norm([grad], backend=backend).total_norm
    assert float(norm) == pytest.approx(2 * dist.get_world_size() ** 0.5)
    with pytest.raises(ValueError, match="grads: expected a place in memory for each element"):
        dk.clip_and_scale_([grad], max_norm=1.0, backend=backend)


def perceptron() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4)).double()


def as_by_one_process(model: nn.Module, part: slice, backend: str) -> None:
    """Gradients of a spread `perceptron`, of which this process has a part of the batch, clipped."""
    alone, x = perceptron(), torch.randn(8, 6, dtype=torch.float64)
    (alone(x) ** 3).mean().backward()
    right = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert right > 0.2
    (model(x[part]) ** 3).mean().backward()
    result = dk.clip_and_scale_((p.grad for p in model.parameters()), max_norm=0.1, backend=backend)
    assert float(result.total_norm) == pytest.approx(float(right), rel=1e-6)
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full([mine.grad])[0], wanted.grad, rtol=1e-6, atol=1e-8)


def fully_sharded_model(backend: str) -> None:
    rank, world, meshes = dist.get_rank(), dist.get_world_size(), Meshes()
    # The second is the hybrid of replicas of shards.
    for mesh in (meshes.line, meshes.grid):
        model = perceptron()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        as_by_one_process(model, slice(rank, None, world), backend)


def tensor_parallel_model(backend: str) -> None:
    meshes = Meshes()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    # The norm's parameters stay plain ones.
    as_by_one_process(parallelize_module(perceptron(), meshes.line, plan), slice(None), backend)
    columns, rows = meshes.grid["columns"], meshes.grid["rows"]
    model = fully_shard(parallelize_module(perceptron(), columns, plan), mesh=rows)
    as_by_one_process(model, slice(rows.get_local_rank(), None, rows.size()), backend)


CASES = (
    norms_are_those_of_the_whole_tensors,
    scaling_is_that_of_the_whole_tensors,
    what_is_not_finite_in_one_process_is_known_to_all,
    sums_and_flags_go_together_once_a_group,
    a_process_outside_of_the_mesh_is_told,
    pieces_that_share_elements_are_refused,
    fully_sharded_model,
    tensor_parallel_model,
)

if __name__ == "__main__":
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for case in CASES:
        for backend in BACKENDS:
            torch.manual_seed(0)
            case(backend)
            dist.barrier()
    dist.destroy_process_group()
