"""What all samplers share: one order for all processes, equal slices of it, and a state that resumes anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler

from dsaccel.data._arguments import check_integer
from dsaccel.data._ranks import data_coordinates
from dskernels.checks import wrong_value

if TYPE_CHECKING:
    from typing_extensions import Unpack

Item = TypeVar("Item")
Handed = TypeVar("Handed")

# Items that are turned into Python objects at a time.
BLOCK = 4096


class SharedOptions(TypedDict, total=False):
    """The keyword arguments that all samplers take; see `ResumableSampler`."""

    seed: int
    num_replicas: int | None
    rank: int | None
    drop_last: bool
    pad: bool
    group: distributed.ProcessGroup | None


class ResumableSampler(Sampler[Item]):
    """The base of the samplers: a subclass states the order of an epoch, `_order`, and no more.

    All ranks make the same order of ``T`` items and take turns at it: rank ``r`` of ``R`` has items ``r``, ``r + R``,
    ``r + 2R``, ... Slices are disjoint. Where ``R`` does not divide ``T``, they are made equal by items from the
    order's beginning (the default), or by leaving out its end (``drop_last=True``), or they are not (``pad=False``:
    each item once, which is what evaluation wants; the first ``T % R`` ranks have one more).

    The order depends on the seed, the epoch and the state alone: not on the global random numbers, the number of ranks
    or of workers. Iterating goes on from where the sampler is, and at the end of an epoch it moves to the next one::

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...

    The position, ``state_dict()["position"]``, counts items of the shared order that all ranks together have consumed.
    It is of use to any number of ranks: what is left is dealt out anew. `ResumableLoader` counts what it hands out; a
    plain DataLoader with workers, which fetch ahead, makes a sampler count batches that were never seen.

    Args:
        size: the fewest items that an epoch has.
        seed: of the order; not negative. Default: 0.
        num_replicas: processes that share an epoch. Default: those of ``group``, or 1 without torch.distributed.
        rank: which of them this is. Default: its rank in ``group``, or 0.
        drop_last: leave out up to ``num_replicas - 1`` items at the end. Default: False.
        pad: else repeat up to ``num_replicas - 1`` items. Default: True.
        group: the processes that share an epoch. Default: all.

    Attributes:
        epoch: the current one, from 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit, or ``drop_last`` leaves nothing because there are fewer items than ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        pad: bool = True,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        check_integer("size", size, least=1)
        check_integer("seed", seed, least=0)
        self.num_replicas, self.rank = data_coordinates(num_replicas, rank, group)
        if drop_last and size < self.num_replicas:
            raise wrong_value(
                "drop_last", f"False for {size} items over {self.num_replicas} ranks, of which none would get any", True
            )
        self.seed, self.drop_last, self.pad, self.group = seed, drop_last, pad, group
        self.epoch = 0
        self._position = 0
        self._made: Tensor | None = None

    def _order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """Numbers of the items of an epoch, int64 ``[T]``, the same on every rank."""
        raise NotImplementedError

    def _items(self, numbers: list[int]) -> Iterable[Item]:
        """The items with these numbers."""
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """Arguments that decide the order: a state fits a sampler that has the same ones."""
        return {}

    def _total(self) -> int:
        """The length of `order`, which a subclass may know without it."""
        return len(self.order())

    def _end_epoch(self) -> None:
        """What a subclass does when its epoch ends or is left."""

    def order(self) -> Tensor:
        """The current epoch's order for all ranks together, int64 ``[T]``; not to be written to."""
        if self._made is None:
            self._made = self._order(self.epoch, generator(self.seed, self.epoch))
        return self._made

    def __len__(self) -> int:
        """Items of the current epoch for this rank, those consumed included."""
        return len(self._places(0))

    def __iter__(self) -> Iterator[Item]:
        return self.consume(self.remaining())

    def remaining(self) -> Iterator[Item]:
        """What is left of the epoch for this rank; to look at it consumes nothing."""
        order = self.order()
        places = self._places(self._position)
        for first in range(0, len(places), BLOCK):
            block = places[first : first + BLOCK]
            indices = torch.arange(block.start, block.stop, self.num_replicas).remainder_(len(order))
            yield from self._items(order[indices].tolist())

    def consume(self, handed: Iterable[Handed], count: int = 1) -> Iterator[Handed]:
        """Gives out ``handed``, of which each holds ``count`` of `remaining`, and counts them as consumed.

        After the last one the sampler moves to the next epoch.

        Raises:
            RuntimeError: the sampler was moved meanwhile: by another loop over it, `set_epoch` or `load_state_dict`.
        """
        at = self.epoch, self._position
        for each in handed:
            self._check_at(at)
            self._position = min(self._position + count * self.num_replicas, self._total())
            at = self.epoch, self._position
            yield each
        self._check_at(at)
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of ``epoch``, unless that is the current one: then nothing changes.

        So a loop that calls it for each epoch can be resumed in the middle of one.

        Raises:
            TypeError: ``epoch`` is no int.
            ValueError: ``epoch`` is negative.
        """
        check_integer("epoch", epoch, least=0)
        if epoch != self.epoch:
            self._end_epoch()
            self.epoch, self._position, self._made = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and tensors from which `load_state_dict` goes on at the next item not consumed.

        It is the same on all ranks at the end of a step that all of them took; save that of rank 0.
        """
        return {
            "kind": type(self).__name__,
            **self._identity(),
            "num_replicas": self.num_replicas,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over seed, epoch and position; with another number of ranks, too, among which the rest is dealt out.

        Raises:
            ValueError: the state is that of another kind of sampler, or of one whose arguments give other orders.
        """
        for name, ours in {"kind": type(self).__name__, **self._identity()}.items():
            if state_dict.get(name) != ours:
                raise wrong_value("state_dict", f"{name} = {ours!r}, as this sampler has", repr(state_dict.get(name)))
        self.seed, self.epoch = int(state_dict["seed"]), int(state_dict["epoch"])
        self._position, self._made = int(state_dict["position"]), None

    def _check_at(self, expected: tuple[int, int]) -> None:
        if expected != (self.epoch, self._position):
            raise RuntimeError(
                f"sampler: expected epoch and position {expected}, where this loop left it, got"
                f" {(self.epoch, self._position)}; finish one loop before another, set_epoch or load_state_dict"
            )

    def _places(self, position: int) -> range:
        """Where in the order this rank's items from ``position`` on are; those past the order's end are repeats."""
        left = self._total() - position
        if self.drop_last:
            left -= left % self.num_replicas
        elif self.pad:
            left += -left % self.num_replicas
        return range(position + self.rank, position + left, self.num_replicas)


class IndexSampler(ResumableSampler[int]):
    """A sampler whose items are sample ids."""

    def _items(self, numbers: list[int]) -> Iterable[int]:
        return numbers


class ShuffledSampler(IndexSampler):
    """Every sample once an epoch, in an order drawn anew for each: a `DistributedSampler` that can be resumed.

    ``ShuffledSampler(n, shuffle=False, pad=False)`` is for evaluation: with one process as with several, each sample is
    seen exactly once.

    Args:
        size: the number of samples, ``n``; at least 1.
        shuffle: if False, in the order of the ids. Default: True.
        shared: ``seed``, ``num_replicas``, ``rank``, ``drop_last``, ``pad`` and ``group``, as in `ResumableSampler`.

    Raises:
        TypeError, ValueError: as in `ResumableSampler`.
    """

    def __init__(self, size: int, *, shuffle: bool = True, **shared: Unpack[SharedOptions]) -> None:
        super().__init__(size, **shared)
        self.size, self.shuffle = size, shuffle

    def _order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.size, generator=generator) if self.shuffle else torch.arange(self.size)

    def _identity(self) -> dict[str, Any]:
        return {"size": self.size, "shuffle": self.shuffle}


def generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of an epoch: of a hash, as seed + epoch makes epoch 1 of seed 0 and epoch 0 of seed 1 the same."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
