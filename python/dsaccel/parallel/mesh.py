"""Device meshes whose dimensions are those of a plan."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dsaccel.parallel.plan import DIMENSIONS, ParallelPlan
from dsaccel.parallel.topology import Place, mesh_order
from dskernels.checks import wrong_value


def read_cluster() -> list[Place]:
    """Where each rank runs: all processes tell their host's name and local rank.

    Hosts are told apart by `socket.gethostname`, devices by ``LOCAL_RANK``, which torchrun sets; without it, ranks of a
    host are numbered in their order. What links the devices of a host have is not asked for: each host is one island.
    For hosts of several, give `make_mesh` your own places (``nvidia-smi topo -m`` shows the links).
    """
    mine = (socket.gethostname(), os.environ.get("LOCAL_RANK"))
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    before: dict[str, int] = {}
    places = []
    for host, device in told:
        places.append(Place(host, before.setdefault(host, 0) if device is None else int(device)))
        before[host] = before.get(host, 0) + 1
    return places


def make_mesh(
    plan: ParallelPlan, device_type: str, *, places: Sequence[Place] | None = None, outermost: str = "pp"
) -> DeviceMesh:
    """The mesh of ``plan`` over all processes, with the dimensions ``("pp", "dp", "shard", "cp", "tp")``.

    Args:
        plan: for as many processes as there are.
        device_type: ``"cpu"`` or ``"cuda"``.
        places: where rank 0, 1, ... runs, the same in every process. Default: of `read_cluster`.
        outermost: as in `mesh_order`. Default: ``"pp"``.

    Raises:
        RuntimeError: `torch.distributed` was not initialised.
        ValueError: there are more or fewer processes than the plan is for, or as `mesh_order`.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            f"plan: {plan.world_size} processes need torch.distributed: start them with torchrun, and call"
            " torch.distributed.init_process_group() in each"
        )
    count = distributed.get_world_size()
    if plan.world_size != count:
        raise wrong_value("plan", f"one for {count} processes", f"{plan.world_size} ({str(plan) or 'no parallelism'})")
    order = mesh_order(plan, read_cluster() if places is None else places, outermost=outermost)
    return DeviceMesh(device_type, torch.tensor(order).view(plan.shape), mesh_dim_names=DIMENSIONS)


def check_mesh(plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Whether ``mesh`` is one of ``plan``.

    Raises:
        ValueError: its dimensions are others.
    """
    if mesh.mesh_dim_names != DIMENSIONS or tuple(mesh.mesh.shape) != plan.shape:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
        raise wrong_value("mesh", f"dimensions {dict(zip(DIMENSIONS, plan.shape, strict=True))}", sizes)
