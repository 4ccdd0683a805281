"""Saved activations that wait for backward in the memory of the CPU."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsaccel.checkpoint._saved import Kept, check_version, counters, is_parameter
from dskernels.checks import is_integer, wrong_type, wrong_value


class offload_activations(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 - reads as a function
    """A context under which tensors on a GPU that autograd saves for backward are moved to pinned CPU memory::

        with offload_activations():
            loss = model(x).sum()
        loss.backward()

    or, for blocks only, ``checkpoint_blocks(model, policy, offload=offload_activations())``. Copies run on a stream of
    their own. When backward asks for a tensor, those that were saved just before it, which it will want next, are
    fetched as well. The same context may be entered again and again, and nested with other contexts; of nested hooks
    on saved tensors, torch calls the innermost only.

    Parameters, views of parameters and other leaves that want a gradient stay where they are, as no memory would be
    freed: in ``w @ w.t()`` both factors do. So do tensors on the CPU, all of them on a machine without GPU: there the
    context costs no copy. Tensors that share memory, as views do, are moved once. What something else holds as well,
    such as a buffer, is copied in vain.

    A tensor that is edited in place between forward and backward is an error in backward, as it is without hooks,
    wherever it waited. Gradients are the same to the last bit, and can be differentiated again.

    Of a recomputed block its input is moved, and from torch 2.14 on what ``"selective"`` keeps; before, that stays.

    Args:
        min_bytes: smaller tensors stay. Default: 1 MiB, which takes about as long to copy as to ask for it.
        prefetch: how many tensors ahead are fetched in backward. Default: 2.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is negative.

    Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
    2016, section 3 (offload behind the forward, prefetch ahead of the backward).
    """

    def __init__(self, *, min_bytes: int = 1 << 20, prefetch: int = 2) -> None:
        for name, value in (("min_bytes", min_bytes), ("prefetch", prefetch)):
            if not is_integer(value):
                raise wrong_type(name, "an integer", value)
            if value < 0:
                raise wrong_value(name, "a number not below 0", value)
        super().__init__(self._pack, self._unpack)
        self.min_bytes = min_bytes
        self.prefetch = prefetch
        self._transfers: dict[torch.device, Transfers] = {}
        # What waits now, by its place in memory and by its turn.
        self._places: weakref.WeakValueDictionary[tuple[int, int, int], _Moved] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Moved] | None = None

    def __reduce__(self) -> Any:
        # A copy, of a model say, starts with nothing moved.
        return functools.partial(type(self), min_bytes=self.min_bytes, prefetch=self.prefetch), ()

    def _pack(self, x: Tensor) -> Kept | _Offloaded:
        if not _is_movable(x):
            return Kept(x)
        storage, (first, size) = x.untyped_storage(), _span(x)
        if size < max(self.min_bytes, 1):
            return Kept(x)
        place = (storage._cdata, first, size)
        moved = self._places.get(place)
        # A storage that was freed may have left its place to another.
        if moved is None or moved.origin.expired() or moved.version != x._version:
            if x.device not in self._transfers:
                self._transfers[x.device] = Transfers(x.device)
            moved = _Moved(x, first, size, self._transfers[x.device], self._last)
            self._places[place] = moved
            self._last = weakref.ref(moved)
        return _Offloaded(x, first, moved)

    def _unpack(self, packed: Kept | _Offloaded) -> Tensor:
        if isinstance(packed, Kept):
            return packed.unpack()
        x = packed.unpack()
        ahead: _Moved | None = packed.moved
        for _ in range(self.prefetch):
            ahead = ahead.before() if ahead is not None and ahead.before is not None else None
            if ahead is not None and ahead.waiting:
                ahead.fetch()
        return x


class Transfers:
    """Copies between a GPU and pinned memory, on a stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def to_host(self, data: Tensor) -> Tensor:
        """A copy of ``data`` in pinned memory, complete once the stream has come so far."""
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self._stream):
            host.copy_(data, non_blocking=True)
        # Its memory is given to no one else before the copy is done.
        data.record_stream(self._stream)
        return host

    def to_device(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The tensor on its way back, and what to call before its first use."""
        with torch.cuda.stream(self._stream):
            data = torch.empty(host.shape, dtype=host.dtype, device=self._stream.device)
            data.copy_(host, non_blocking=True)
            arrived = self._stream.record_event()

        def wait() -> None:
            user = torch.cuda.current_stream(data.device)
            user.wait_event(arrived)
            data.record_stream(user)

        return data, wait


class _Moved:
    # The bytes of one piece of memory, and how many saved tensors in it are still to be asked for.

    def __init__(
        self, x: Tensor, first: int, size: int, transfers: Transfers, before: weakref.ref[_Moved] | None
    ) -> None:
        self.origin = StorageWeakRef(x.untyped_storage())
        self.version = x._version
        self.before = before
        self.waiting = 0
        self._transfers = transfers
        data = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage(), first, (size,), (1,))
        self._host = transfers.to_host(data)
        self._back: tuple[Tensor, Callable[[], None]] | None = None
        self._tallies = [counter.offloaded for counter in counters]
        for tally in self._tallies:
            tally.add(id(self), size)

    def fetch(self) -> tuple[Tensor, Callable[[], None]]:
        if self._back is None:
            self._back = self._transfers.to_device(self._host)
        return self._back

    def asked(self) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            self._back = None

    def __del__(self) -> None:
        for tally in self.__dict__.get("_tallies", ()):
            tally.remove(id(self), self._host.numel())


class _Offloaded:
    # One saved tensor in moved memory.

    def __init__(self, x: Tensor, first: int, moved: _Moved) -> None:
        self.moved = moved
        self._dtype = x.dtype
        self._layout = (x.storage_offset() - first // x.element_size(), x.shape, x.stride())
        self._version = x._version
        # Shares the version with x, and no memory.
        self._marker = x.detach()
        self._marker.data = x.new_empty(0)
        self._asked = False
        moved.waiting += 1

    def unpack(self) -> Tensor:
        check_version(self._marker, self._version, self._layout[1])
        data, wait = self.moved.fetch()
        wait()
        x = torch.empty(0, dtype=self._dtype, device=data.device).set_(data.untyped_storage(), *self._layout)
        self._done()
        return x

    def _done(self) -> None:
        # A retained graph asks again; the memory is then fetched for that alone.
        if not self._asked:
            self._asked = True
            self.moved.asked()
        elif self.moved.waiting == 0:
            self.moved._back = None

    def __del__(self) -> None:
        if "_asked" in self.__dict__:
            self._done()


def _is_movable(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided
    return plain and _is_offloaded_from(x.device) and not (x.is_conj() or x.is_neg() or is_parameter(x))


def _is_offloaded_from(device: torch.device) -> bool:
    return device.type == "cuda"


def _span(x: Tensor) -> tuple[int, int]:
    """First byte and number of bytes of the memory to move for ``x``.

    The whole storage if ``x`` spans half of it, so that views side by side, as q, k and v, are moved together once;
    else only what ``x`` spans: it may be a batch cut from a large data set.
    """
    if x.numel() == 0:
        return 0, 0
    width, whole = x.element_size(), x.untyped_storage().nbytes()
    span = (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) * width
    return (0, whole) if 2 * span >= whole else (int(x.storage_offset()) * width, span)
