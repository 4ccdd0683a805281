"""Which process sits where in a device mesh, so that those who talk most are next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsaccel.parallel.plan import DIMENSIONS, ParallelPlan
from dskernels.checks import wrong_value


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        host: name of the machine.
        device: number of the process's device there, its local rank.
        island: of devices that have fast links (NVLink) to each other, numbered in each host. Default: 0, one for the
            whole host.
    """

    host: str
    device: int = 0
    island: int = 0


# A block of neighbours, and where all of them are: from the closest domain to the widest, None where they are not.
_Block = tuple[list[int], tuple[object, ...]]


def mesh_order(plan: ParallelPlan, places: Sequence[Place], *, outermost: str = "pp") -> list[int]:
    """The ranks in the order of a mesh of ``plan.shape``, last dimension fastest.

    What is sent, and how often, decides who sits closest. From the inside out: ``tp`` (activations of every layer,
    twice, with nothing to hide behind), ``cp`` (halos of every layer), ``shard`` (parameters of every layer), and then
    ``dp`` (gradients once a step) and ``pp`` (activations between stages, point to point), of which ``outermost``
    crosses hosts.

    Ranks are numbered anew by host, island and device, so theirs may be in any order. At each level, blocks that share
    an island are put together first, then those left over that share a host, then the rest. So hosts of different sizes
    do, and islands that are too small: only a group of ``tp`` that would reach over hosts is an error.

    Args:
        plan: for ``len(places)`` processes.
        places: where rank 0, 1, ... runs.
        outermost: ``"pp"`` or ``"dp"``: which of the two crosses hosts. Compare what each sends with
            `pipeline_bytes` and `replica_bytes`. Default: ``"pp"``.

    Returns:
        Each rank once.

    Raises:
        ValueError: the number of places is not that of the plan, two have the same device, the devices of a host are
            no multiple of ``tp``, or ``outermost`` is neither of the two.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
    section 3.2 and takeaway 1 (tensor parallelism inside a server, pipeline across).
    """
    if len(places) != plan.world_size:
        raise wrong_value("places", f"one for each of {plan.world_size} processes", len(places))
    if len({(place.host, place.device) for place in places}) != len(places):
        raise wrong_value("places", "a device of its own for each process", list(places))
    if outermost not in ("pp", "dp"):
        raise wrong_value("outermost", "'pp' or 'dp'", repr(outermost))
    hosts = list(dict.fromkeys(place.host for place in places))
    for host in hosts:
        count = sum(place.host == host for place in places)
        if count % plan.tp:
            raise wrong_value("tp", f"a divisor of the {count} processes on host {host!r}", plan.tp)
    ranks = sorted(
        range(len(places)), key=lambda rank: (hosts.index(places[rank].host), places[rank].island, places[rank].device)
    )
    blocks: list[_Block] = [
        ([rank], ((places[rank].host, places[rank].island), places[rank].host, "everywhere")) for rank in ranks
    ]
    between = "dp" if outermost == "pp" else "pp"
    for name in ("tp", "cp", "shard", between, outermost):
        blocks = _grouped(blocks, getattr(plan, name))
    order = blocks[0][0]
    if outermost == "pp":
        return order
    inside = plan.shard * plan.cp * plan.tp
    stages = [
        order[start : start + inside]
        for stage in range(plan.pp)
        for start in range(stage * inside, len(order), plan.pp * inside)
    ]
    return [rank for stage in stages for rank in stage]


def _grouped(blocks: list[_Block], size: int) -> list[_Block]:
    """Blocks of ``size`` blocks each, of which as many as possible are in one island, then in one host."""
    groups: list[_Block] = []
    left = blocks
    for level in range(3):
        domains: dict[object, list[_Block]] = {}
        for block in left:
            domains.setdefault(block[1][level], []).append(block)
        # Blocks that are in none of this level wait for the next one.
        left = domains.pop(None, [])
        for members in domains.values():
            full = len(members) - len(members) % size
            groups += [_joined(members[start : start + size]) for start in range(0, full, size)]
            left += members[full:]
        left.sort(key=blocks.index)
    # As they were: the first host's first.
    return sorted(groups, key=lambda group: next(at for at, block in enumerate(blocks) if block[0][0] == group[0][0]))


def _joined(members: list[_Block]) -> _Block:
    ranks = [rank for block, _ in members for rank in block]
    shared = tuple(
        first if all(domains[level] == first for _, domains in members) else None
        for level, first in enumerate(members[0][1])
    )
    return ranks, shared


def crossings(plan: ParallelPlan, places: Sequence[Place], order: Sequence[int]) -> dict[str, int]:
    """How many groups of each dimension reach over more than one host.

    Args:
        plan: of the mesh.
        places: where rank 0, 1, ... runs.
        order: of `mesh_order`.

    Returns:
        A number for each of the plan's dimensions, by name.
    """
    counts = dict.fromkeys(DIMENSIONS, 0)
    stride = plan.world_size
    for name, size in zip(DIMENSIONS, plan.shape, strict=True):
        block, stride = stride, stride // size
        for start in (place for place in range(plan.world_size) if place % block < stride):
            group = {places[order[start + member * stride]].host for member in range(size)}
            counts[name] += len(group) > 1
    return counts
