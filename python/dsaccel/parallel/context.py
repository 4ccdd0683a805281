"""Context parallelism for windowed attention: ranks hold slices of the sequence, and exchange what windows reach."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast, overload

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dsaccel.modules import WindowAttention, WindowCache
from dsaccel.parallel.context_halo import Halo, exchange_halo, group_of, slices_of
from dskernels import RopeTable, window_attention
from dskernels.checks import is_integer, shape_of, wrong_type, wrong_value

__all__ = ["Halo", "context_parallel", "exchange_halo", "gather_sequence", "shard_sequence", "window_attention_context"]

Model = TypeVar("Model", bound=nn.Module)


def shard_sequence(x: Tensor, mesh: DeviceMesh | ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's slice of a sequence that every rank has: the ``rank``-th of equal ones, in order.

    Args:
        x: any tensor, the same on every rank of ``mesh``.
        mesh: of one dimension, or a process group.
        dim: along which the sequence lies, a multiple of the ranks long. Default: 1, as in ``[B, N]``.

    Returns:
        A view of ``x``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the length is no multiple of the number of ranks. Pad the sequence behind its end, where a causal
            window never looks, with targets that the loss ignores.
    """
    _, rank, world = group_of(mesh)
    if not isinstance(x, Tensor):
        raise wrong_type("x", "a tensor", x)
    if not -x.dim() <= dim < x.dim() or x.shape[dim] % world:
        raise wrong_value("x", f"a multiple of {world} ranks along dimension {dim}", f"shape {shape_of(x)}")
    length = x.shape[dim] // world
    return x.narrow(dim, rank * length, length)


def gather_sequence(
    x: Tensor, mesh: DeviceMesh | ProcessGroup, dim: int = 1, *, lengths: Sequence[int] | None = None
) -> Tensor:
    """The whole sequence, on every rank, from the slices of all: the inverse of `shard_sequence`.

    Differentiable: a slice's gradient is the sum of what all ranks have for it. A loss that every rank computes of the
    whole sequence therefore counts as often as there are ranks.

    Args:
        x: this rank's slice; of the same shape on every rank, except along ``dim`` with ``lengths``.
        mesh: of one dimension, or a process group.
        dim: along which the sequence lies. Default: 1.
        lengths: of the slices of all ranks. Default: all are as long as this rank's.

    Returns:
        ``x`` of all ranks, in their order, along ``dim``.

    Raises:
        TypeError, ValueError: as `exchange_halo`.
    """
    return exchange_halo(x, left=None, right=None, mesh=mesh, dim=dim, lengths=lengths).tensors[0]


@overload
def window_attention_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    positions: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    lengths: Sequence[int] | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def window_attention_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup,
    window: tuple[int | None, int | None] = ...,
    rope: RopeTable | None = ...,
    positions: Tensor | None = ...,
    bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    softcap: float | None = ...,
    scale: float | None = ...,
    lengths: Sequence[int] | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def window_attention_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup,
    window: tuple[int | None, int | None] = (None, None),
    rope: RopeTable | None = None,
    positions: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """This rank's rows of `dskernels.window_attention` over a sequence that lies in slices on the ranks of ``mesh``.

    A rank gets the ``left`` keys and values before its slice and the ``right`` ones behind it by `exchange_halo`, and
    computes its own queries: the communication grows with the window, not with the sequence. Forward, a rank of ``R``
    receives ``B * Hkv * (D + Dv)`` numbers for each of those tokens, and sends as many gradients back in backward.

    Where the loss of the whole sequence is the sum of the ranks' losses, q, k and v get its gradients. ``sink`` and
    ``bias`` get the part of this rank's queries: add it over the ranks, as is done with gradients of parameters.

    Args:
        q: this rank's queries, shape ``[B, Hq, N, D]``; ``i`` stands at key ``i``.
        k: this rank's keys, shape ``[B, Hkv, N, D]``.
        v: this rank's values, shape ``[B, Hkv, N, Dv]``.
        mesh: of one dimension, or a process group; slices lie in the order of its ranks.
        window: ``(left, right)``, inclusive, as in `dskernels.window_attention`, wider than a slice if need be. A bound
            of None fetches everything on its side. Default: all keys.
        rope: table for the positions of the whole sequence, at which queries and keys are rotated. Default: none.
        positions: int64, shape ``[N]`` or ``[B, N]``: this rank's slice of that of `dskernels.window_attention`, which
            costs a second message. Default: positions in the whole sequence.
        bias: broadcastable to ``[B, Hq, N, total]``: this rank's queries, but the keys of the whole sequence, of which
            the ones in reach are taken. Default: none.
        sink, softcap, scale: as in `dskernels.window_attention`.
        lengths: of the slices of all ranks, 0 or more each. Default: all are as long as this rank's.
        return_lse, backend: as in `dskernels.window_attention`.

    Returns:
        Rows of this rank's queries, as from `dskernels.window_attention`: ``out`` of shape ``[B, Hq, N, Dv]``, and with
        ``return_lse`` the pair of it and ``lse``, ``[B, Hq, N]``.

    Raises:
        TypeError, ValueError, RuntimeError: as `dskernels.window_attention` and `exchange_halo`.
        IndexError: the sequence is longer than the table of ``rope``, on every rank alike.

    Sources: halo exchange of a domain that is cut into slices, as in Dryden et al., "Improving Strong-Scaling of CNN
    Training by Exploiting Finer-Grained Parallelism", 2019; the window as in `dskernels.window_attention`.
    """
    left, right = _reach(window)
    _check_slices(q, k, v)
    slices = slices_of(mesh, k.shape[2], lengths)
    if rope is not None and not isinstance(rope, RopeTable):
        raise wrong_type("rope", "a RopeTable, as made by rope_table, or None", rope)
    if rope is not None and positions is None and slices.total > rope.max_positions:
        raise IndexError(
            f"rope: the last key stands at position {slices.total - 1}, the table holds {rope.max_positions} positions"
        )
    # One that is the same for all keys is taken as it is.
    by_keys = bias if isinstance(bias, Tensor) and bias.dim() > 0 and bias.shape[-1] != 1 else None
    if by_keys is not None and by_keys.shape[-1] != slices.total:
        expected = f"1 or all {slices.total} keys of the whole sequence along its last dimension"
        raise wrong_value("bias", expected, f"shape {shape_of(by_keys)}")
    _check_positions(positions, k)
    halo = exchange_halo(k, v, left=left, right=right, mesh=mesh, lengths=lengths)
    keys, values = halo.tensors
    first, count = slices.start - halo.before, keys.shape[2]
    if positions is not None:
        (positions,), _, _ = exchange_halo(positions, left=left, right=right, mesh=mesh, dim=-1, lengths=lengths)
    elif rope is not None:
        rope = RopeTable(rope.cos.narrow(-2, first, count), rope.sin.narrow(-2, first, count), rope.interleaved)
    attended = window_attention(  # type: ignore[call-overload, misc] # of either overload
        q,
        keys,
        values,
        window=window,
        rope=rope,
        positions=positions,
        bias=bias if by_keys is None else by_keys.narrow(-1, first, count),
        sink=sink,
        softcap=softcap,
        scale=scale,
        query_offset=halo.before,
        return_lse=return_lse,
        backend=backend,
    )
    return cast("Tensor | tuple[Tensor, Tensor]", attended)


def context_parallel(model: Model, mesh: DeviceMesh | ProcessGroup) -> Model:
    """Makes every `WindowAttention` of ``model`` attend over a sequence that lies in slices on the ranks, in place.

    The model is then called with this rank's slice (`shard_sequence`) and gives the logits of it. Slices must be
    equally long. All else in the model must treat tokens one by one. Parameters, names and state dict stay; of a mean
    loss of each slice, the mean over the ranks is the loss of the whole sequence, and the mean of the gradients its
    gradient: a task of data parallelism, whose mesh takes the dimension in.

    Args:
        model: any module; after `tensor_parallel`, before `fully_shard` and the like. Modules that are shared become
            parallel once.
        mesh: of one dimension, or a process group.

    Returns:
        ``model``.

    Raises:
        TypeError: ``mesh`` is something else.
        ValueError: there is no `WindowAttention`, one is context parallel already, one has an ``attend`` of its own,
            or there is attention of another kind (`nn.MultiheadAttention`); ``model`` is then as it was.

    ``positions`` and ``bias`` that modules are called with are those of `window_attention_context`: this rank's slice,
    and this rank's queries with the keys of the whole sequence.

    A cache belongs to one process: `WindowAttention.new_cache` and ``generate`` raise a ValueError, as does a
    ``cache`` that is passed.
    """
    group_of(mesh)
    found: list[WindowAttention] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            got = f"{name or 'the model itself'}, a {type(module).__name__}"
            raise wrong_value("model", "no attention other than WindowAttention", got)
        if isinstance(module, WindowAttention):
            reason = _why_not_parallel(module)
            if reason is not None:
                raise ValueError(f"model: {name or 'the model itself'}: {reason}")
            found.append(module)
    if not found:
        raise wrong_value("model", "at least one WindowAttention", type(model).__name__)
    for attention in found:
        attention.__class__ = _parallel_class(type(attention))  # type: ignore[arg-type] # classes are hashable
        attention.context_mesh = mesh  # type: ignore[assignment]
    return model


def _why_not_parallel(module: WindowAttention) -> str | None:
    if isinstance(module, _ContextAttention):
        return "expected WindowAttention, got one that is context parallel already"
    if getattr(module.attend, "__func__", None) is not WindowAttention.attend:
        return f"attend: expected WindowAttention's own, got one of {type(module).__name__}, which sees one slice only"
    return None


class _ContextAttention(WindowAttention):
    context_mesh: DeviceMesh | ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> _ContextAttention:
        # Copies, as of averages of parameters, share the mesh: a process group cannot be copied.
        memo[id(self.context_mesh)] = self.context_mesh
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin

    def forward(
        self,
        x: Tensor,
        cache: WindowCache | None = None,
        *,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if cache is not None:
            raise wrong_value("cache", "None under context parallelism", type(cache).__name__)
        return super().forward(x, positions=positions, bias=bias)

    def new_cache(self, *args: Any, **options: Any) -> WindowCache:
        raise ValueError("cache: expected none under context parallelism; generate with a model of one process")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        return window_attention_context(
            q,
            k,
            v,
            mesh=self.context_mesh,
            window=self.window,
            rope=None if self.rope is None else self.rope(),
            positions=positions,
            bias=bias,
            softcap=self.softcap,
            scale=self.scale,
        )


@functools.cache
def _parallel_class(cls: type[WindowAttention]) -> type[WindowAttention]:
    # A class, as `fully_shard` does it, so that what subclasses and wrappers override elsewhere stays.
    return type(f"Context{cls.__name__}", (_ContextAttention, cls), {})


def _reach(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong_type("window", "a pair (left, right)", window)
    for name, bound in zip(("window left", "window right"), window, strict=True):
        if bound is not None and not is_integer(bound):
            raise wrong_type(name, "an int or None", bound)
    left, right = (None if bound is None else max(bound, 0) for bound in window)
    return left, right


def _check_slices(q: Tensor, k: Tensor, v: Tensor) -> None:
    # Before anything is sent: a rank that raises later would leave others waiting.
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, "a tensor", tensor)
        if tensor.dim() != 4 or tensor.shape[2] != q.shape[2]:
            expected = "[B, H, N, D], as many tokens as in q"
            raise wrong_value(name, expected, f"shape {shape_of(tensor)}")


def _check_positions(positions: Tensor | None, k: Tensor) -> None:
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise wrong_type("positions", "a tensor or None", positions)
    if positions.shape not in (k.shape[2:3], (k.shape[0], k.shape[2])):
        expected = f"shape [N] or [B, N] = [{k.shape[0]}, {k.shape[2]}]"
        raise wrong_value("positions", expected, f"shape {shape_of(positions)}")
