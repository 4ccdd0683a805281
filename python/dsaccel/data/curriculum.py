"""Easy samples first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsaccel.data._arguments import check_integer, check_share, checked_vector, fingerprint
from dsaccel.data.sampler import IndexSampler, SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CurriculumSampler(IndexSampler):
    """The easiest samples in the first epochs, every sample once in each of the others; shuffled in both.

    Of ``E = round(easy_share * epochs)`` easy epochs, number ``e`` has the ``ceil(q * n)`` easiest samples once each::

        q(e) = start + (1 - start) * e / E

    Epochs from ``E`` on have all. Of equally difficult samples, those of lower id are the easier ones. Epochs therefore
    have different lengths: ``len(sampler)`` is that of the current one.

    Args:
        difficulty: of each sample, finite, any dtype, ``[n]``: a loss, a rank, or a length.
        epochs: of the whole training, at least 1.
        easy_share: which part of them is easy, from 0 to 1. Default: 0.3.
        start: the share ``q`` of samples in the first epoch, from 0 to 1; one sample at least. Default: 0.3.
        shared: ``seed``, ``num_replicas``, ``rank``, ``drop_last``, ``pad`` and ``group``, as in `ResumableSampler`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit.

    Source: Bengio et al., "Curriculum Learning", 2009; Platanios et al., "Competence-based Curriculum Learning for
    Neural Machine Translation", 2019, section 2.2 (samples by quantile of difficulty, linear competence).
    """

    def __init__(
        self,
        difficulty: Tensor,
        *,
        epochs: int,
        easy_share: float = 0.3,
        start: float = 0.3,
        **shared: Unpack[SharedOptions],
    ) -> None:
        difficulty = checked_vector("difficulty", difficulty)
        check_integer("epochs", epochs, least=1)
        check_share("easy_share", easy_share)
        check_share("start", start)
        self.epochs, self.easy_share, self.start = epochs, float(easy_share), float(start)
        self._by_difficulty = difficulty.argsort(stable=True)
        self._fingerprint = fingerprint(difficulty)
        super().__init__(self.count(0), **shared)

    def count(self, epoch: int) -> int:
        """How many samples an epoch has."""
        size = len(self._by_difficulty)
        easy = round(self.easy_share * self.epochs)
        if epoch >= easy:
            return size
        share = self.start + (1 - self.start) * epoch / easy
        # Products as 0.07 * 100 may round up, which is one sample more than was asked for.
        return max(1, math.ceil(share * size - 1e-9))

    def _order(self, epoch: int, generator: torch.Generator) -> Tensor:
        count = self.count(epoch)
        return self._by_difficulty[torch.randperm(count, generator=generator)]

    def _identity(self) -> dict[str, Any]:
        return {
            "size": len(self._by_difficulty),
            "difficulty": self._fingerprint,
            "epochs": self.epochs,
            "easy_share": self.easy_share,
            "start": self.start,
        }
