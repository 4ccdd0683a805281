"""What hooks on saved tensors share: the check for edits in between, what is a parameter, and who counts bytes.

Torch looks for edits of a saved tensor only where no hook has taken it, so hooks have to do it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_parameter(x: Tensor) -> bool:
    """Whether ``x`` is a parameter or a view of one: memory that is there anyway.

    As such counts every leaf that wants a gradient, and not only `nn.Parameter`: whoever reads that gradient holds it.
    """
    base = x if x._base is None else x._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def check_version(x: Tensor, expected: int, shape: torch.Size) -> None:
    """Refuses a tensor whose version, that of ``x``, is another than when it was saved."""
    if x._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {list(shape)}] is at version {x._version}; expected version {expected} instead"
        )


def storages(x: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor: of a wrapper that of its parts; of sparse tensors, which have none, nothing."""
    if is_traceable_wrapper_subclass(x):
        # What is no tensor among them is the mesh of a DTensor, or the like.
        for part in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):
                yield from storages(part)
    elif x.layout == torch.strided:
        yield x.untyped_storage()


class Tally:
    """Bytes of storages, each counted once however often it comes: now, and the most there were at a time."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._times: dict[int, int] = {}

    def add(self, key: int, size: int) -> None:
        """Counts a storage that nobody frees before `remove`."""
        times = self._times.get(key, 0)
        self._times[key] = times + 1
        if times == 0:
            self.now += size
            self.peak = max(self.peak, self.now)

    def remove(self, key: int, size: int) -> None:
        """Takes back one `add`."""
        self._times[key] -= 1
        if self._times[key] == 0:
            del self._times[key]
            self.now -= size


class Counter:
    """Counts saved bytes while it is among `counters`.

    Args:
        held: tensors that are there anyway.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        self.saved, self.held, self.offloaded = Tally(), Tally(), Tally()
        # Held themselves, so that nothing else can come to lie where they do.
        self._held_tensors = list(held)
        self._held = {storage._cdata for x in self._held_tensors for storage in storages(x)}

    def tally(self, x: Tensor, storage: torch.UntypedStorage) -> Tally:
        """Where a storage of the saved tensor ``x`` counts."""
        return self.held if storage._cdata in self._held or is_parameter(x) else self.saved


counters: list[Counter] = []  # those at work, of all threads: backward has one of its own


class Kept:
    """A tensor that is kept for backward where it is.

    Args:
        x: the tensor as a hook gets it.
    """

    def __init__(self, x: Tensor) -> None:
        # Not x itself: where it is an output of the node that saves it, the two would keep each other alive.
        self._tensor = x.detach()
        self._version = x._version
        self._counts: list[tuple[Tally, int, int]] = []
        for counter in counters:
            for storage in storages(x):
                tally, size = counter.tally(x, storage), storage.nbytes()
                tally.add(storage._cdata, size)
                self._counts.append((tally, storage._cdata, size))

    def unpack(self) -> Tensor:
        """The tensor, or a RuntimeError if it has been edited."""
        check_version(self._tensor, self._version, self._tensor.shape)
        return self._tensor

    def __del__(self) -> None:
        for tally, key, size in self.__dict__.get("_counts", ()):
            tally.remove(key, size)
