"""Slices of a sequence, one a rank, and their extension by the nearest tokens of the neighbours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dskernels.checks import is_integer, shape_of, wrong_type, wrong_value


class Slices(NamedTuple):
    """Who of ``group`` holds what: rank ``r`` the next ``lengths[r]`` tokens; this process is ``rank``."""

    group: ProcessGroup
    rank: int
    lengths: tuple[int, ...]

    @property
    def start(self) -> int:
        """Position of this rank's first token."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)


class Halo(NamedTuple):
    """What `exchange_halo` returns.

    Attributes:
        tensors: the tensors, extended.
        before: how many tokens were put before this rank's own.
        after: how many were put behind them.
    """

    tensors: tuple[Tensor, ...]
    before: int
    after: int


def exchange_halo(
    *tensors: Tensor,
    left: int | None,
    right: int | None,
    mesh: DeviceMesh | ProcessGroup,
    dim: int = 2,
    lengths: Sequence[int] | None = None,
) -> Halo:
    """This rank's slice of a sequence with the ``left`` tokens before it and the ``right`` ones behind it.

    Rank ``r`` holds tokens ``[s, e)`` of ``[0, N)`` and gets ``[max(s - left, 0), min(e + right, N))``, from as many
    ranks as hold them. It is one ``all_to_all_single`` whatever the number of tensors, in which only ranks that need
    something of each other exchange anything; none at all if both sides are 0 or there is one rank. The backward is
    its transpose: gradients of the halo go back to the ranks it came from, which add them to their own in the order
    of the ranks. Differentiable once; every rank must call it, and its backward, alike.

    Args:
        tensors: of one dtype, one device and one length along ``dim``; integers have no gradient.
        left: how many tokens to get from before, 0 or more; None is all.
        right: how many to get from behind, 0 or more; None is all.
        mesh: of one dimension, or a process group.
        dim: along which the sequence lies. Default: 2, as in ``[B, H, N, D]``.
        lengths: of the slices of all ranks, 0 or more each. Default: all are as long as this rank's.

    Returns:
        `Halo`: the extended tensors, and how many tokens came on each side. Fewer than ``left`` or ``right`` come where
        the sequence ends.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``left`` or ``right`` is negative, the tensors do not fit each other or ``lengths``, or ``mesh`` has
            several dimensions.
    """
    length = _checked_length(tensors, dim)
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and not is_integer(bound):
            raise wrong_type(name, "an int or None", bound)
        if bound is not None and bound < 0:
            raise wrong_value(name, "0 or more, or None", bound)
    slices = slices_of(mesh, length, lengths)
    # Neighbours that get nothing agree on that without a word.
    if len(slices.lengths) == 1 or (left == 0 and right == 0):
        return Halo(tensors, 0, 0)
    route = _route(slices, left, right)
    return Halo(_Extend.apply(route, dim, *tensors), route.before, route.after)


def slices_of(mesh: DeviceMesh | ProcessGroup, length: int, lengths: Sequence[int] | None) -> Slices:
    """The slices of all ranks, of which this one has ``length`` tokens; ``lengths`` as in `exchange_halo`."""
    group, rank, world = group_of(mesh)
    if lengths is None:
        return Slices(group, rank, (length,) * world)
    if len(lengths) != world or not all(is_integer(n) and n >= 0 for n in lengths):
        raise wrong_value("lengths", f"{world} numbers from 0 on, one a rank", list(lengths))
    if lengths[rank] != length:
        raise wrong_value("lengths", f"{length}, the length of the slice, for rank {rank}", lengths[rank])
    return Slices(group, rank, tuple(lengths))


def group_of(mesh: DeviceMesh | ProcessGroup) -> tuple[ProcessGroup, int, int]:
    """The process group of a mesh of one dimension, this process's rank in it, and its size."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise wrong_value("mesh", 'one dimension, as mesh["cp"] has', f"{mesh.ndim}")
        return mesh.get_group(), mesh.get_local_rank(), mesh.size()
    if not isinstance(mesh, ProcessGroup):
        raise wrong_type("mesh", "a DeviceMesh or a ProcessGroup", mesh)
    return mesh, distributed.get_rank(mesh), distributed.get_world_size(mesh)


def _checked_length(tensors: Sequence[Tensor], dim: int) -> int:
    if not tensors:
        raise wrong_value("tensors", "at least one", "none")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise wrong_type("tensors", "tensors", tensor)
        if not -tensor.dim() <= dim < tensor.dim():
            raise wrong_value("tensors", f"a dimension {dim}", f"shape {shape_of(tensor)}")
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            expected, got = (f"{x.dtype} on {x.device}" for x in (first, tensor))
            raise wrong_value("tensors", f"one dtype and device, {expected}", got)
        if tensor.shape[dim] != first.shape[dim]:
            expected = f"one length along dimension {dim}, {first.shape[dim]}"
            raise wrong_value("tensors", expected, f"shape {shape_of(tensor)}")
    return first.shape[dim]


class _Route(NamedTuple):
    # What this rank gets on each side and, by rank, how many tokens come and which of its own go: (first, count).
    group: ProcessGroup
    before: int
    after: int
    received: list[int]
    sent: list[tuple[int, int]]


def _route(slices: Slices, left: int | None, right: int | None) -> _Route:
    ends = list(itertools.accumulate(slices.lengths))
    held = [(end - length, end) for length, end in zip(slices.lengths, ends, strict=True)]
    wanted = [
        (0 if left is None else max(start - left, 0), ends[-1] if right is None else min(end + right, ends[-1]))
        for start, end in held
    ]
    (start, end), (first, last) = held[slices.rank], wanted[slices.rank]
    received = [_overlap(held[other], (first, last))[1] for other in range(len(held))]
    sent = [_overlap((start, end), wanted[other]) for other in range(len(held))]
    received[slices.rank], sent[slices.rank] = 0, (0, 0)
    return _Route(slices.group, start - first, last - end, received, sent)


def _overlap(held: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """First token, counted from that of ``held``, and number of tokens in both."""
    first = max(held[0], wanted[0])
    return first - held[0], max(min(held[1], wanted[1]) - first, 0)


# An autograd.Function rather than slices of tensors, whose backward would write a whole tensor for every neighbour,
# and add in the order of the engine.
class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: _Route, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.dim = route, dim
        message = _pack(tensors, dim, route.sent)
        rows = _swap(message, route.received, [count for _, count in route.sent], route.group)
        # Ranks are in the order of their tokens, so that the message already is.
        before, after = rows.split((route.before, route.after))
        parts = zip(_unpack(before, tensors, dim), tensors, _unpack(after, tensors, dim), strict=True)
        return tuple(torch.cat(part, dim) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        route, dim = ctx.route, ctx.dim
        length = grads[0].shape[dim] - route.before - route.after
        message = _pack(grads, dim, [(0, route.before), (route.before + length, route.after)])
        counts = [count for _, count in route.sent]
        rows = _swap(message, counts, route.received, route.group)
        own = [grad.narrow(dim, route.before, length).clone() for grad in grads]
        for (first, count), part in zip(route.sent, rows.split(counts), strict=True):
            if count:
                for grad, piece in zip(own, _unpack(part, grads, dim), strict=True):
                    grad.narrow(dim, first, count).add_(piece)
        return None, None, *own


def _swap(rows: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    distributed.all_to_all_single(out, rows, received, sent, group=group)
    return out


def _pack(tensors: Sequence[Tensor], dim: int, ranges: list[tuple[int, int]]) -> Tensor:
    """A row for each token of the ranges, which holds what all tensors have of it."""
    rows = [
        torch.cat([x.narrow(dim, first, count).movedim(dim, 0).unsqueeze(-1).flatten(1) for x in tensors], 1)
        for first, count in ranges
        if count
    ]
    return torch.cat(rows) if rows else tensors[0].new_empty(0, sum(_widths(tensors, dim)))


def _unpack(rows: Tensor, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """The tokens of ``rows`` in the layout of ``tensors``."""
    parts = rows.split(_widths(tensors, dim), 1)
    return [
        part.reshape(part.shape[0], *_shape_without(x, dim)).movedim(0, dim)
        for part, x in zip(parts, tensors, strict=True)
    ]


def _widths(tensors: Sequence[Tensor], dim: int) -> list[int]:
    return [math.prod(_shape_without(x, dim)) for x in tensors]


def _shape_without(x: Tensor, dim: int) -> list[int]:
    shape = list(x.shape)
    del shape[dim]
    return shape
