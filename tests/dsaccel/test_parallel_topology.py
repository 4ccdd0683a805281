"""Who sits next to whom in a mesh, on clusters that are made up."""

from __future__ import annotations

import random
import re

import pytest
import torch
from ranks import Ranks

from dsaccel.parallel import ParallelPlan, Place, crossings, make_mesh, mesh_order, read_cluster


def cluster(*sizes: int, island: int = 8) -> list[Place]:
    return [Place(f"host{host}", gpu, gpu // island) for host, size in enumerate(sizes) for gpu in range(size)]


def groups(plan: ParallelPlan, order: list[int], name: str) -> list[list[int]]:
    dimension = ("pp", "dp", "shard", "cp", "tp").index(name)
    return torch.tensor(order).view(plan.shape).movedim(dimension, -1).reshape(-1, getattr(plan, name)).tolist()


def test_two_hosts_of_eight() -> None:
    plan = ParallelPlan(pp=2, dp=2, tp=4)
    order = mesh_order(plan, cluster(8, 8))
    assert order == list(range(16))
    # Stages are hosts; replicas of a stage are in one host, as is each group of tp.
    assert groups(plan, order, "tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(plan, order, "pp") == [[gpu, gpu + 8] for gpu in range(8)]
    assert crossings(plan, cluster(8, 8), order) == {"pp": 8, "dp": 0, "shard": 0, "cp": 0, "tp": 0}


def test_replicas_outermost() -> None:
    plan = ParallelPlan(pp=2, dp=2, tp=4)
    order = mesh_order(plan, cluster(8, 8), outermost="dp")
    assert groups(plan, order, "pp") == [[gpu, gpu + 4] for gpu in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert crossings(plan, cluster(8, 8), order) == {"pp": 0, "dp": 8, "shard": 0, "cp": 0, "tp": 0}


def test_every_dimension_from_the_inside_out() -> None:
    plan = ParallelPlan(pp=2, dp=2, shard=2, cp=2, tp=2)
    places = cluster(8, 8, 8, 8, island=4)
    order = mesh_order(plan, places)
    assert order == list(range(32))
    assert crossings(plan, places, order) == {"pp": 16, "dp": 16, "shard": 0, "cp": 0, "tp": 0}


def test_shuffled_ranks_give_the_same_mesh_of_places() -> None:
    plan, places = ParallelPlan(pp=2, dp=2, tp=4), cluster(8, 8, island=4)
    shuffled = list(places)
    random.Random(0).shuffle(shuffled)
    order = mesh_order(plan, shuffled)
    assert sorted(order) == list(range(16))
    assert crossings(plan, shuffled, order) == crossings(plan, places, mesh_order(plan, places))
    for group in groups(plan, order, "tp"):
        assert len({(shuffled[rank].host, shuffled[rank].island) for rank in group}) == 1
        # Neighbours are in the order of their devices.
        assert [shuffled[rank].device for rank in group] == sorted(shuffled[rank].device for rank in group)


def test_islands_in_a_host() -> None:
    # Devices 0, 2, 4, 6 are linked, and 1, 3, 5, 7.
    places = [Place("host", device, device % 2) for device in range(8)]
    plan = ParallelPlan(dp=2, tp=4)
    assert groups(plan, mesh_order(plan, places), "tp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_islands_that_are_too_small_share_a_host() -> None:
    places = [Place("host", device, 0 if device < 3 else 1) for device in range(8)]
    plan = ParallelPlan(dp=4, tp=2)
    # One pair has to reach over both islands; the others need not.
    assert groups(plan, mesh_order(plan, places), "tp") == [[0, 1], [2, 7], [3, 4], [5, 6]]


def test_uneven_hosts() -> None:
    plan = ParallelPlan(cp=2, dp=4, tp=2)
    places = cluster(6, 4, 6)
    order = mesh_order(plan, places)
    # Host 0 and host 2 have a pair left each, which go together; host 1 keeps both of its pairs.
    assert groups(plan, order, "tp")[:4] == [[0, 1], [2, 3], [4, 5], [14, 15]]
    assert crossings(plan, places, order)["cp"] == 2
    assert crossings(plan, places, order)["tp"] == 0


def test_tensor_parallelism_never_leaves_a_host() -> None:
    with pytest.raises(ValueError, match=re.escape("tp: expected a divisor of the 6 processes on host 'host0', got 4")):
        mesh_order(ParallelPlan(dp=3, tp=4), cluster(6, 6))


def test_places_that_do_not_fit() -> None:
    plan = ParallelPlan(dp=4)
    with pytest.raises(ValueError, match="places: expected one for each of 4 processes, got 3"):
        mesh_order(plan, cluster(3))
    with pytest.raises(ValueError, match="places: expected a device of its own for each process"):
        mesh_order(plan, [*cluster(3), Place("host0", 1)])
    with pytest.raises(ValueError, match="outermost: expected 'pp' or 'dp', got 'tp'"):
        mesh_order(plan, cluster(4), outermost="tp")


def mesh_of_a_real_cluster(rank: int) -> None:
    places = read_cluster()
    assert [place.device for place in places] == [0, 1, 2, 3]
    assert len({place.host for place in places}) == 1
    plan = ParallelPlan(pp=2, tp=2)
    mesh = make_mesh(plan, "cpu")
    assert mesh.mesh_dim_names == ("pp", "dp", "shard", "cp", "tp")
    assert mesh["tp"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert mesh["pp"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    with pytest.raises(ValueError, match="plan: expected one for 4 processes, got 2 \\(dp=2\\)"):
        make_mesh(ParallelPlan(dp=2), "cpu")
    # As if ranks 0 and 2 were on one host.
    apart = make_mesh(plan, "cpu", places=[Place("a", 0), Place("b", 0), Place("a", 1), Place("b", 1)])
    assert apart.mesh.flatten().tolist() == [0, 2, 1, 3]


def test_mesh_of_processes(ranks: Ranks) -> None:
    ranks.run(mesh_of_a_real_cluster, 4)


def devices_without_torchrun(rank: int) -> None:
    import os

    os.environ.pop("LOCAL_RANK")
    assert [place.device for place in read_cluster()] == [0, 1]


def test_devices_are_counted_without_torchrun(ranks: Ranks) -> None:
    ranks.run(devices_without_torchrun, 2)


def test_no_processes() -> None:
    with pytest.raises(RuntimeError, match=r"plan: 2 processes need torch\.distributed: start them with torchrun"):
        make_mesh(ParallelPlan(dp=2), "cpu")
