"""Gradients over several microbatches that equal those over the whole batch."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dskernels.checks import is_integer, is_number, wrong_type, wrong_value

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Microbatch(Generic[Batch]):
    """One of the microbatches that `accumulate` hands out.

    Attributes:
        batch: what the iterable gave.
        index: 0 for the first of its window.
        count: how many the window has: ``k``, in the last window maybe fewer.
        mean_factor: times the loss of the microbatch if that is a mean: ``weight / total``, which is ``1 / count``
            without weights.
        sum_factor: times the loss if that is a sum over what the weights count: ``1 / total``. Of a window that weighs
            nothing, both are 0.
        last: whether to step the optimizer after this one.
    """

    batch: Batch
    index: int
    count: int
    mean_factor: float
    sum_factor: float
    last: bool
    _model: nn.Module | None = field(default=None, repr=False, compare=False)

    def sync(self) -> contextlib.AbstractContextManager[Any]:
        """For forward and backward: gradients are exchanged between processes only in the last of the window.

        Does nothing if `accumulate` got no ``model``, or one that exchanges nothing.
        """
        if self.last:
            return contextlib.nullcontext()
        if hasattr(self._model, "no_sync"):  # DistributedDataParallel
            return self._model.no_sync()  # type: ignore[union-attr, operator, no-any-return]
        if hasattr(self._model, "set_requires_gradient_sync"):  # fully_shard
            return _without_gradient_sync(self._model)
        return contextlib.nullcontext()


def accumulate(
    batches: Iterable[Batch],
    k: int,
    *,
    weight: Callable[[Batch], float] | None = None,
    model: nn.Module | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> Iterator[Microbatch[Batch]]:
    """Gives out ``batches`` in windows of ``k``, each with its factor of the loss::

        for micro in accumulate(loader, 4, model=model):
            with micro.sync():
                loss = F.cross_entropy(model(micro.batch.x), micro.batch.y)  # a mean
                scaler.scale(loss * micro.mean_factor).backward()
            if micro.last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    The sum of ``mean_factor * mean loss`` over a window is the mean of its means, in a last window of fewer than ``k``
    too: its gradients are not divided by ``k``. Where microbatches weigh differently, as those of different numbers of
    tokens do, ``weight=lambda batch: (batch.y != -100).sum()`` makes the sum of ``sum_factor * summed loss`` (or of
    ``mean_factor * mean loss``) the mean over all tokens of the window: the loss of the full batch, up to rounding.
    Prefer the sum: the mean over no token is NaN. With ``model`` the processes' weights are added and their number is
    multiplied in, because gradients become means over processes: the mean is then over the tokens of all.

    A window is read before its first microbatch is given out, as its factors depend on all of it: ``k`` microbatches
    are held at a time. Between windows none is, so that a data loader's state is exact after each step.

    Args:
        batches: any iterable, a data loader for one.
        k: microbatches in a window, at least 1; 4 to 8 are usual.
        weight: what a microbatch weighs, finite and not negative; a number or a tensor of one. Default: all weigh the
            same.
        model: `nn.parallel.DistributedDataParallel`, or a module to which ``fully_shard`` was applied. All processes
            must then have the same number of windows. Any other module, and none, is one process. Default: none.
        group: processes that share the batch. Default: the model's, else all.

    Yields:
        `Microbatch`.

    Raises:
        TypeError: ``k`` is no integer.
        ValueError: ``k`` is below 1, or a weight is negative or not finite.

    Source: Ott et al., "Scaling Neural Machine Translation", 2018 (gradients accumulated before each update).
    """
    if not is_integer(k):
        raise wrong_type("k", "an integer", k)
    if k < 1:
        raise wrong_value("k", "at least 1", k)
    return _windows(batches, k, weight, model, group)


def _windows(
    batches: Iterable[Batch],
    k: int,
    weight: Callable[[Batch], float] | None,
    model: nn.Module | None,
    group: torch.distributed.ProcessGroup | None,
) -> Iterator[Microbatch[Batch]]:
    remaining = iter(batches)
    while window := collections.deque(itertools.islice(remaining, k)):
        count = len(window)
        if weight is None:
            weights, total = [1.0] * count, float(count)
        else:
            weights = [_checked(weight(batch)) for batch in window]
            total = _share(math.fsum(weights), model, group)
        for index in range(count):
            # Taken off, so that it is not held while the next ones are at work.
            yield Microbatch(
                window.popleft(),
                index,
                count,
                weights[index] / total if total else 0.0,
                1 / total if total else 0.0,
                index == count - 1,
                model,
            )


def _checked(weight: Any) -> float:
    value = weight.item() if isinstance(weight, torch.Tensor) else weight
    if not is_number(value) or not 0 <= value < math.inf:
        raise wrong_value("weight", "a finite number that is not negative for each microbatch", value)
    return float(value)


def _share(total: float, model: nn.Module | None, group: torch.distributed.ProcessGroup | None) -> float:
    # The mean weight of a process: DDP and fully_shard divide the gradients' sum by the number of processes.
    if not (hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")):
        return total
    distributed = torch.distributed
    group = getattr(model, "process_group", None) if group is None else group
    device = next((p.device for p in model.parameters()), None)  # type: ignore[union-attr]
    shared = torch.tensor(total, dtype=torch.float64, device=device)
    distributed.all_reduce(shared, group=group)
    return shared.item() / distributed.get_world_size(group)


@contextlib.contextmanager
def _without_gradient_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
