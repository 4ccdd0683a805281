"""The mean loss, and on the side that of each item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from dsaccel.parallel import ParallelModel
from dskernels.checks import shape_of, wrong_value


class MeanLoss:
    """Makes a loss function that returns one value an item return their mean, and remembers the values.

    Args:
        loss_fn: ``loss_fn(outputs, targets)`` gives a scalar, or a tensor of shape ``[B]``.
        remember: whether to keep the values until `take`.
    """

    def __init__(self, loss_fn: Callable[[Any, Tensor], Tensor], *, remember: bool) -> None:
        self._loss_fn = loss_fn
        self._remember = remember
        self._values: list[Tensor] = []

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The mean loss, a scalar."""
        losses = self._loss_fn(outputs, targets)
        if losses.dim() > 1 or (self._remember and losses.shape != targets.shape[:1]):
            expected = f"[{targets.shape[0]}]" if self._remember else "[] or [B]"
            raise wrong_value("loss_fn", f"losses of shape {expected}", shape_of(losses))
        # Of validation nothing is kept.
        if self._remember and torch.is_grad_enabled():
            self._values.append(losses.detach())
        return losses.mean() if losses.dim() else losses

    def take(self, parts: ParallelModel, rows: int) -> Tensor:
        """The loss of each of ``rows`` items since the last call, of all ranks, float64, shape ``[rows]``, on the CPU.

        Where ranks hold slices of a sequence, an item's loss is the mean of those of its slices.
        """
        device = next(parameter.device for _, parameter in parts.named_parameters())
        total = torch.zeros(2, rows, dtype=torch.float64)
        # In a pipeline, only the last stage has losses: those of its microbatches, in order.
        if self._values:
            # Which rows are here: the batch's numbers, cut as the batch is.
            numbers = torch.arange(rows)[:, None].expand(rows, parts.plan.cp)
            here = parts.local_batch(numbers)[:, 0]
            total[0, here] = torch.cat(self._values).to("cpu", torch.float64)
            total[1, here] = 1
            self._values.clear()
        if parts.plan.world_size > 1:
            total = total.to(device)
            distributed.all_reduce(total)
            total = total.cpu()
        return total[0] / total[1]
