"""Which slice of the data is this process's, and what the others have seen."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from dsaccel.data._arguments import check_integer
from dskernels.checks import wrong_value


def is_distributed() -> bool:
    """Whether there are process groups at all."""
    return distributed.is_available() and distributed.is_initialized()


def data_coordinates(
    num_replicas: int | None, rank: int | None, group: distributed.ProcessGroup | None
) -> tuple[int, int]:
    """``(num_replicas, rank)``: what is None is that of the group, or of one process where there is none."""
    if num_replicas is None:
        num_replicas = distributed.get_world_size(group) if is_distributed() else 1
    if rank is None:
        rank = distributed.get_rank(group) if is_distributed() else 0
    check_integer("num_replicas", num_replicas, least=1)
    check_integer("rank", rank, least=0)
    if rank >= num_replicas:
        raise wrong_value("rank", f"below num_replicas = {num_replicas}", rank)
    return num_replicas, rank


def gather(
    ids: Tensor, losses: Tensor, num_replicas: int, group: distributed.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The ids, int64 ``[k]``, and losses, float64 ``[k]``, of all ranks, in the order in which one process has them.

    Slices are dealt out in turn, so that is: the first of each rank, the second of each, and so on.
    """
    size = distributed.get_world_size(group) if is_distributed() else 1
    if size != num_replicas:
        raise wrong_value(
            "group", f"num_replicas = {num_replicas} processes, whose losses are combined", f"{size} processes"
        )
    device = torch.device("cuda" if distributed.get_backend(group) == "nccl" else "cpu")
    counts = torch.empty(size, dtype=torch.int64, device=device)
    distributed.all_gather(list(counts.split(1)), torch.tensor([len(ids)], device=device), group=group)
    longest = int(counts.max())
    # float64 has every id below 2^53 exactly.
    ours = torch.zeros(longest, 2, dtype=torch.float64, device=device)
    ours[: len(ids), 0] = ids.to(device, torch.float64)
    ours[: len(ids), 1] = losses.to(device)
    everyone = torch.empty(size, longest, 2, dtype=torch.float64, device=device)
    distributed.all_gather(list(everyone.unbind()), ours, group=group)
    is_filled = torch.arange(longest)[:, None] < counts.cpu()
    flat = everyone.cpu().transpose(0, 1)[is_filled]
    return flat[:, 0].long(), flat[:, 1]
