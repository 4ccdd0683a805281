"""Gradients normalised by the number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dskernels.checks import is_integer, wrong_type, wrong_value


def normalise_gradients_(
    parameters: Tensor | Iterable[Tensor], workers: int | None = None, *, reduced: str = "mean"
) -> float:
    """Makes gradients ``1 / sqrt(N)`` times their sum over ``N`` workers, in place.

    The sum of ``N`` independent gradients has ``sqrt(N)`` times the noise of one; so normalised, the noise is that of
    one, and the part that all agree on is ``sqrt(N)`` times as large: the square root rule of learning rates, for
    optimizers that follow the size of gradients. Adam and the like do not: they undo any constant factor. Clip
    afterwards, and with a loss scaler call this after ``unscale_``.

    Args:
        parameters: tensors whose ``.grad`` is multiplied; those without are skipped, the same one twice counts once.
        workers: ``N``, at least 1. Default: the processes of `torch.distributed`, 1 without it.
        reduced: what the gradients are now. ``"mean"`` over the workers, as DistributedDataParallel and ``fully_shard``
            leave them: the factor is ``sqrt(N)``. ``"sum"``: it is ``1 / sqrt(N)``. Default: ``"mean"``.

    Returns:
        The factor.

    Raises:
        TypeError: ``workers`` is no integer.
        ValueError: ``workers`` is below 1, or ``reduced`` neither of the two.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (the root of the batch
    size keeps the variance of the gradient's expectation).
    """
    if workers is None:
        distributed = torch.distributed
        there = distributed.is_available() and distributed.is_initialized()
        workers = distributed.get_world_size() if there else 1
    if not is_integer(workers):
        raise wrong_type("workers", "an integer", workers)
    if workers < 1:
        raise wrong_value("workers", "at least 1", workers)
    if reduced not in ("mean", "sum"):
        raise wrong_value("reduced", "one of 'mean', 'sum'", repr(reduced))
    factor = math.sqrt(workers) if reduced == "mean" else 1 / math.sqrt(workers)
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = {id(p.grad): p.grad for p in parameters if p.grad is not None}
    if factor != 1:
        with torch.no_grad():
            for grad in grads.values():
                grad.mul_(factor)
    return factor
