"""Gradients that are spread over processes: what of a DTensor lies here, and with whom sums have to be added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dskernels.checks import wrong_value


class Shards(NamedTuple):
    """The process groups over which a tensor is cut into pieces, one for each mesh dimension that shards it."""

    groups: tuple[Any, ...] = ()


def add_up(totals: list[Tensor], shards: Sequence[Shards], maximum: bool) -> list[Tensor]:
    """``totals`` of all pieces, one for each of ``shards``: their sums, or their maxima.

    One all-reduce for each process group, whatever the number of tensors and of ways in which they are sharded. All
    processes of a group have to come here with the same ways in the same order.
    """
    totals = list(totals)
    for group in dict.fromkeys(group for each in shards for group in each.groups):
        import torch.distributed as dist

        places = [place for place, each in enumerate(shards) if group in each.groups]
        together = torch.stack([totals[place] for place in places])
        dist.all_reduce(together, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
        for place, total in zip(places, together, strict=True):
            totals[place] = total
    return totals


class Local(NamedTuple):
    """What of a gradient lies in this process.

    Attributes:
        written: the tensor to scale.
        read: the tensor whose norm counts.
        shards: with whom its sum has to be added up.
    """

    written: Tensor
    read: Tensor
    shards: Shards


def local_part(grad: Tensor, place: int) -> Local:
    """The strided tensors behind the gradient at ``place`` of a list, which may be sparse or a DTensor."""
    shards = Shards()
    written = read = grad
    if _is_dtensor(grad):
        whole: Any = grad
        if whole.device_mesh.get_coordinate() is None:
            # Its norm, and whether to write, could not be known here.
            mesh = whole.device_mesh.mesh.tolist()
            raise wrong_value(f"grads[{place}]", "a DTensor on a mesh with this process", f"a mesh of {mesh}")
        if any(placement.is_partial() for placement in whole.placements):
            # The norm of a sum is not the sum of norms: only here a gradient has to be put together first. Scaling
            # the pieces scales their sum.
            placements = [_replicated(placement) for placement in whole.placements]
            whole = whole.redistribute(placements=placements)
        written, read = _local(grad), _local(whole)
        shards = Shards(
            tuple(
                whole.device_mesh.get_group(dim)
                for dim, placement in enumerate(whole.placements)
                if not placement.is_replicate()
            )
        )
    if read.layout == torch.sparse_coo:
        # An entry that comes in parts counts as their sum.
        written, read = written._values(), (read if read.is_coalesced() else read.coalesce())._values()
    return Local(written, read, shards)


def _is_dtensor(tensor: Tensor) -> bool:
    if type(tensor) is Tensor or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _local(tensor: Any) -> Tensor:
    # Not to_local: that is a differentiable view, and what is written here must be the piece itself.
    local: Tensor = tensor._local_tensor
    return local


def _replicated(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement
