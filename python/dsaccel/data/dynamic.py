"""Sampling in proportion to each sample's running loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsaccel.data._arguments import check_integer, checked_vector, fingerprint
from dsaccel.data._ranks import gather
from dsaccel.data.draws import draw
from dsaccel.data.history import LossHistory, checked_update
from dsaccel.data.sampler import IndexSampler, SharedOptions, generator
from dskernels.checks import is_number, shape_of, wrong_type, wrong_value

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DynamicSampler(IndexSampler):
    """Draws samples with ``P(i) = w_i / sum_j w_j``, ``w_i = base_weights_i * (loss_i + eps)``::

        sampler = DynamicSampler(len(dataset), num_samples=1000)
        for ids, x, y in ResumableLoader(dataset, batch_size=32, sampler=sampler, num_workers=2):
            losses = F.cross_entropy(model(x), y, reduction="none")
            ...
            sampler.update(ids, losses)

    ``loss_i`` is the running loss that `update` keeps; for a sample without one, the largest of all, so that it is
    tried soon (1 before there is any). An epoch's samples are drawn when it begins, in the same way on all ranks, and
    its losses count from the next one on: so the order does not depend on how far workers have fetched ahead. For
    weights that follow losses more closely, make epochs shorter: ``num_samples``.

    **No sample starves.** A sample of which `update` had a loss in none of the last ``max_staleness`` epochs is due.
    Those that are due have places in the epoch, one each, taken at random; the other places are drawn by weight. If
    more are due than ``num_samples``, those unseen for longest are chosen, ties at random, and the others stay due. So
    none is missing for more than ``max_staleness + ceil(n / num_samples) - 1`` epochs in a row, whatever its loss, but
    those whose ``base_weights`` are 0.

    Args:
        size: the number of samples, ``n``; at least 1, more than 2^24 are fine.
        num_samples: samples of an epoch, all ranks together. Default: as many as have a weight above 0.
        replacement: whether a sample can be drawn more than once an epoch. If not, an epoch of all samples holds each
            once, those of high loss rather early. Default: True.
        momentum: ``a`` of ``loss_i = a * loss_i + (1 - a) * loss``, from 0 (the last loss alone) to below 1. The first
            loss is taken as it is. Default: 0.9.
        max_staleness: epochs after which an unseen sample is due, at least ``n / num_samples``; None: never.
            Default: 10.
        eps: added to each loss; not negative. With 0, a sample of loss 0 is drawn only when due. Default: 1e-6.
        base_weights: constant factors, finite and not negative, ``[n]``; a sample of weight 0 is never drawn.
            Default: 1.
        shared: ``seed``, ``num_replicas``, ``rank``, ``drop_last``, ``pad`` and ``group``, as in `ResumableSampler`.

    Attributes:
        history: a `LossHistory`: ``losses``, ``last_seen`` and ``ignored``, the count of losses that were not finite.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit; or, when an epoch begins, with ``eps=0``, too few weights are above 0.

    Source: Schaul et al., "Prioritized Experience Replay", 2016, section 3.3 (proportional priorities with ``eps``;
    algorithm 1: new samples at the largest one) and 3.4 (importance weights). To sharpen or flatten, as ``alpha`` does
    there, update with ``losses ** alpha``.
    """

    def __init__(
        self,
        size: int,
        *,
        num_samples: int | None = None,
        replacement: bool = True,
        momentum: float = 0.9,
        max_staleness: int | None = 10,
        eps: float = 1e-6,
        base_weights: Tensor | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        check_integer("size", size, least=1)
        for name, value in (("momentum", momentum), ("eps", eps)):
            if not is_number(value):
                raise wrong_type(name, "a number", value)
        if not 0 <= momentum < 1:
            raise wrong_value("momentum", "from 0 to below 1", momentum)
        if not 0 <= eps < float("inf"):
            raise wrong_value("eps", "a finite number that is not negative", eps)
        self.base_weights = None
        eligible = size
        if base_weights is not None:
            self.base_weights = checked_vector("base_weights", base_weights, least=0.0, size=size).clone()
            eligible = int(self.base_weights.count_nonzero())
            if not eligible:
                raise wrong_value("base_weights", "at least one above 0", f"{size} times 0")
        num_samples = eligible if num_samples is None else num_samples
        check_integer("num_samples", num_samples, least=1)
        if not replacement and num_samples > eligible:
            raise wrong_value("num_samples", f"at most {eligible} without replacement", num_samples)
        if max_staleness is not None:
            check_integer("max_staleness", max_staleness, least=1)
            least = -(-eligible // num_samples)
            if max_staleness < least:
                expected = f"at least {least}, in which {eligible} samples can be seen with num_samples = {num_samples}"
                raise wrong_value("max_staleness", f"{expected}, or None", max_staleness)
        super().__init__(num_samples, **shared)
        self.size, self.num_samples, self.replacement = size, num_samples, replacement
        self.momentum, self.max_staleness, self.eps = float(momentum), max_staleness, float(eps)
        self.history = LossHistory(size, self.momentum)
        self._fingerprint = None if self.base_weights is None else fingerprint(self.base_weights)
        # Of an epoch's order: how often each sample is expected in it.
        self._expected: tuple[Tensor, Tensor] | None = None

    def update(self, ids: Tensor | list[int], losses: Tensor | list[float]) -> None:
        """Takes losses of samples, those of all ranks together: each calls it at the same steps and then has them all.

        They count from the next epoch on, also if given after the loop over the last one. Waits for a GPU that
        ``losses`` are on. With several ranks it exchanges 16 bytes a sample over ``group``.

        Args:
            ids: what the sampler gave, integers ``[k]``; ``k`` may differ between ranks, and be 0.
            losses: one for each, not below 0, floating point ``[k]``, on any device. One that is not finite is ignored
                and counted; its sample counts as seen.

        Raises:
            TypeError: ``ids`` are no integers.
            ValueError: sizes differ, an id is out of range, a finite loss is negative, or ``group`` has not
                ``num_replicas`` processes.
        """
        all_ids, all_losses = checked_update(ids, losses)
        if self.num_replicas > 1:
            all_ids, all_losses = gather(all_ids, all_losses, self.num_replicas, self.group)
        self.history.add(all_ids, all_losses)
        if self._position == 0 and self._made is None:
            # Nothing is drawn yet for this epoch.
            self.history.fold(self.epoch - 1)

    def weights(self) -> Tensor:
        """``w``, of which the current epoch is drawn: float64 ``[n]``."""
        weights = self.history.losses.double()
        is_new = weights.isnan()
        highest = float(weights.nan_to_num(nan=-1.0).max())
        weights[is_new] = highest if highest >= 0 else 1.0
        weights += self.eps
        return weights if self.base_weights is None else weights.mul_(self.base_weights)

    def importance_weights(self, ids: Tensor | list[int]) -> Tensor:
        """By what to multiply losses of the current epoch's samples, for gradients of the mean over all samples.

        ``num_samples / (n * c_i)``, where ``n`` counts samples whose ``base_weights`` are above 0, and ``c_i`` is how
        often sample ``i`` is expected in the epoch. Where none is due that is ``num_samples * P(i)``, and the weight
        ``1 / (n * P(i))``. The mean of ``weight * loss`` over an epoch is then in expectation the mean loss of those
        samples. One that cannot be drawn has infinity.

        Args:
            ids: integers ``[k]``.

        Returns:
            float32 ``[k]``, on the CPU.

        Raises:
            ValueError: without replacement: there is no such formula; or an id is out of range.
        """
        if not self.replacement:
            raise wrong_value("replacement", "True for importance weights", False)
        ids = torch.as_tensor(ids).cpu()
        if ids.dim() != 1 or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.size):
            raise wrong_value("ids", f"[k] of numbers from 0 to {self.size - 1}", f"{shape_of(ids)}: {ids.tolist()}")
        order = self.order()
        if self._expected is None or self._expected[0] is not order:
            expected = self.weights()
            eligible = self.size if self.base_weights is None else int(self.base_weights.count_nonzero())
            due = self._due(self.epoch, generator(self.seed, self.epoch))
            expected *= (self.num_samples - len(due)) / expected.sum()
            expected[due] += 1.0
            self._expected = order, expected.mul_(eligible / self.num_samples)
        return self._expected[1][ids.long()].reciprocal().float()

    def _order(self, epoch: int, generator: torch.Generator) -> Tensor:
        due = self._due(epoch, generator)
        if len(due) == self.num_samples:
            return due
        weights = self.weights()
        if not self.replacement:
            weights[due] = 0.0
        drawn = draw(weights, self.num_samples - len(due), generator, replacement=self.replacement)
        is_due = torch.zeros(self.num_samples, dtype=torch.bool)
        is_due[torch.randperm(self.num_samples, generator=generator)[: len(due)]] = True
        order = torch.empty(self.num_samples, dtype=torch.int64)
        order[is_due], order[~is_due] = due, drawn
        return order

    def _due(self, epoch: int, generator: torch.Generator) -> Tensor:
        """Samples that are part of the epoch in any case, int64 ``[up to num_samples]``, in random order."""
        if self.max_staleness is None or epoch < self.max_staleness:
            return torch.empty(0, dtype=torch.int64)
        is_due = self.history.last_seen < epoch - self.max_staleness
        if self.base_weights is not None:
            is_due &= self.base_weights > 0
        due = is_due.nonzero().flatten()
        due = due[torch.randperm(len(due), generator=generator)]
        if len(due) > self.num_samples:
            due = due[self.history.last_seen[due].argsort(stable=True)[: self.num_samples]]
        return due

    def _total(self) -> int:
        return self.num_samples

    def _end_epoch(self) -> None:
        self.history.fold(self.epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "num_samples": self.num_samples,
            "replacement": self.replacement,
            "momentum": self.momentum,
            "max_staleness": self.max_staleness,
            "eps": self.eps,
            "base_weights": self._fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """As `ResumableSampler.state_dict`, with the history: 8 bytes a sample, and 12 a loss of this epoch."""
        return {**super().state_dict(), "history": self.history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `ResumableSampler.load_state_dict`."""
        super().load_state_dict(state_dict)
        self.history.load_state_dict(state_dict["history"])
