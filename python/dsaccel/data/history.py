"""A running loss for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dskernels.checks import shape_of, wrong_type, wrong_value


class LossHistory:
    """The exponential moving average of each sample's losses: ``a = momentum * a + (1 - momentum) * loss``.

    The first loss is taken as it is. New losses wait until `fold`, so that during an epoch nothing changes. Tensors are
    replaced, never written to: a state holds them without a copy.

    Args:
        size: the number of samples, ``n``.
        momentum: from 0, the last loss alone, to below 1.

    Attributes:
        losses: float32 ``[n]``; NaN of those without any.
        last_seen: the last epoch with a loss, finite or not, int32 ``[n]``; -1 of those without any.
        ignored: how many losses were not finite.
    """

    def __init__(self, size: int, momentum: float) -> None:
        self.momentum = momentum
        self.losses = torch.full((size,), torch.nan)
        self.last_seen = torch.full((size,), -1, dtype=torch.int32)
        self.ignored = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, ids: Tensor, losses: Tensor) -> None:
        """Keeps losses for `fold`.

        Args:
            ids: of the samples, int64 ``[k]``; the same one more than once is fine.
            losses: float ``[k]``. Those that are not finite in float32 are counted and otherwise ignored.

        Raises:
            ValueError: an id is out of range, or a finite loss negative.
        """
        size = len(self.losses)
        is_wrong = (ids < 0) | (ids >= size)
        if is_wrong.any():
            raise wrong_value("ids", f"from 0 to {size - 1}", int(ids[is_wrong][0]))
        losses = losses.float()
        is_wrong = losses.isfinite() & (losses < 0)
        if is_wrong.any():
            raise wrong_value(
                "losses",
                "none below 0, which is no weight",
                f"{losses[is_wrong][0].item()} of sample {int(ids[is_wrong][0])}",
            )
        self.ignored += int((~losses.isfinite()).sum())
        self._waiting.append((ids, losses))

    def fold(self, epoch: int) -> None:
        """Takes in what waits, in the order in which it came, as losses of ``epoch``."""
        ids, losses = self._all_waiting()
        self._waiting = []
        if not len(ids):
            return
        self.last_seen = self.last_seen.index_fill(0, ids, epoch)
        is_usable = losses.isfinite()
        ids, losses = ids[is_usable], losses[is_usable]
        # First losses of all samples, then second ones, and so on: the same bits as one after the other, so that it
        # does not matter how many are folded at a time.
        turns = _turns(ids)
        by_turn, counts = turns.argsort(stable=True), turns.bincount().tolist()
        running = self.losses.clone()
        for now, new in zip(ids[by_turn].split(counts), losses[by_turn].split(counts), strict=True):
            before = running[now]
            average = before * self.momentum + new * (1 - self.momentum)
            running[now] = torch.where(before.isnan(), new, average)
        self.losses = running

    def state_dict(self) -> dict[str, Any]:
        """Four tensors and a number."""
        ids, losses = self._all_waiting()
        return {
            "losses": self.losses,
            "last_seen": self.last_seen,
            "waiting_ids": ids,
            "waiting_losses": losses,
            "ignored": self.ignored,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, whose tensors are used as they are.

        Raises:
            ValueError: it is of another number of samples.
        """
        if state_dict["losses"].shape != self.losses.shape:
            expected, got = shape_of(self.losses), shape_of(state_dict["losses"])
            raise wrong_value("state_dict", f"losses of shape {expected}", got)
        # Checkpoints may be loaded onto a GPU as a whole.
        self.losses, self.last_seen = state_dict["losses"].cpu(), state_dict["last_seen"].cpu()
        self._waiting = [(state_dict["waiting_ids"].cpu(), state_dict["waiting_losses"].cpu())]
        self.ignored = state_dict["ignored"]

    def _all_waiting(self) -> tuple[Tensor, Tensor]:
        ids = [ids for ids, _ in self._waiting]
        losses = [losses for _, losses in self._waiting]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ids]), torch.cat([torch.empty(0), *losses])


def _turns(ids: Tensor) -> Tensor:
    """How often each entry of ``ids``, int64 ``[k]``, occurred before: of ``[5, 3, 5, 5]`` that is ``[0, 0, 1, 2]``."""
    ordered, by_id = ids.sort(stable=True)
    counts = ordered.unique_consecutive(return_counts=True)[1]
    starts = counts.cumsum(0) - counts
    turns = torch.empty_like(ids)
    turns[by_id] = torch.arange(len(ids)) - starts.repeat_interleave(counts)
    return turns


def checked_update(ids: Any, losses: Any) -> tuple[Tensor, Tensor]:
    """``ids`` and ``losses``, tensors or lists, as int64 ``[k]`` and float64 ``[k]`` on the CPU.

    Raises:
        TypeError: ``ids`` are no integers.
        ValueError: they are not of one size.
    """
    # Copies, because a loop may write to its own ones; of an empty list torch makes floats.
    ids = torch.as_tensor(ids).detach()
    losses = torch.as_tensor(losses).detach().to("cpu", torch.float64, copy=True)
    if losses.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise wrong_type("ids", "integers", ids)
    if ids.dim() != 1 or losses.shape != ids.shape:
        raise wrong_value("ids and losses", "one loss for each id, [k] both", f"{shape_of(ids)} and {shape_of(losses)}")
    return ids.to("cpu", torch.int64, copy=True), losses
