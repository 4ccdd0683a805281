"""Observers that keep a histogram of magnitudes, and clip what is rare."""

from __future__ import annotations

import torch
from torch import Tensor

from dsaccel.quant.observers import LARGEST_CODE, Observer
from dskernels.checks import is_integer, is_number, wrong_type, wrong_value


class _MagnitudeHistogram(Observer):
    # Bins of equal width from 0 to `limit`. A batch beyond it doubles the limit until it fits, and adds up neighbouring
    # bins: no count is ever spread over several.
    counts: Tensor
    limit: Tensor
    zeros: Tensor

    def __init__(self, bins: int) -> None:
        super().__init__()
        if not is_integer(bins):
            raise wrong_type("bins", "an int", bins)
        if bins < 256 or bins % 2 != 0:
            raise wrong_value("bins", "an even number of at least 256", bins)
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("limit", torch.zeros((), dtype=torch.float64))
        self.register_buffer("zeros", torch.zeros((), dtype=torch.int64))

    def update(self, x: Tensor) -> None:
        magnitudes = x.double().abs().flatten()
        magnitudes = magnitudes[magnitudes > 0]
        self.zeros += x.numel() - magnitudes.numel()
        self.batches += 1
        if magnitudes.numel() == 0:
            return
        self._grow(magnitudes.amax())
        bins = self.counts.shape[0]
        indices = (magnitudes * (bins / self.limit)).long().clamp_(max=bins - 1)
        self.counts += torch.bincount(indices, minlength=bins)

    def _grow(self, largest: Tensor) -> None:
        if self.limit == 0:
            self.limit.copy_(largest)
        while largest > self.limit:
            merged = self.counts.view(-1, 2).sum(1)
            self.counts.zero_()[: merged.shape[0]] = merged
            self.limit *= 2

    def _edges(self) -> Tensor:
        # The upper edges of the bins.
        bins = self.counts.shape[0]
        return self.limit * torch.arange(1, bins + 1, device=self.counts.device) / bins


class PercentileObserver(_MagnitudeHistogram):
    """The magnitude that a percentage of all values does not exceed; what exceeds it is clipped.

    Taken from a histogram, and so up to one of its bins too large, never too small.

    Args:
        percentile: above 0, up to 100. Default: 99.9.
        bins: of the histogram, even, at least 256. Default: 4096.

    Raises:
        TypeError, ValueError: an argument is no such number.
    """

    def __init__(self, percentile: float = 99.9, bins: int = 4096) -> None:
        super().__init__(bins)
        if not is_number(percentile):
            raise wrong_type("percentile", "a number", percentile)
        if not 0 < percentile <= 100:
            raise wrong_value("percentile", "a number above 0, up to 100", percentile)
        self.percentile = float(percentile)

    def clip(self) -> Tensor:
        below = self.zeros + self.counts.cumsum(0)
        wanted = self.percentile / 100 * below[-1].double()
        reached = torch.searchsorted(below.double(), wanted).clamp(max=below.shape[0] - 1)
        return self._edges()[reached].float()


class HistogramObserver(_MagnitudeHistogram):
    """The clip with the smallest squared error of the codes.

    Among the edges of the bins of a histogram it is the ``c`` for which, with ``step = c / 127``, the sum over all
    values ``v`` of the expected error is smallest::

        v ** 2          v below step / 2, which become 0
        step ** 2 / 12  other v up to c, whose rounding error is uniform
        (v - c) ** 2    v above c, which are clipped

    Args:
        bins: of the histogram, even, at least 256. Default: 4096.

    Raises:
        TypeError, ValueError: ``bins`` is no such number.

    Source: Banner et al., "Post training 4-bit quantization of convolutional networks for rapid-deployment", 2019,
    section 3, with the measured distribution in the place of a fitted one.
    """

    def __init__(self, bins: int = 4096) -> None:
        super().__init__(bins)

    def clip(self) -> Tensor:
        return self._edges()[self._errors().argmin()].float()

    def _errors(self) -> Tensor:
        # In units of the bins' width, of each upper edge as the clip.
        bins = self.counts.shape[0]
        counts = self.counts.double()
        centres = torch.arange(bins, device=counts.device, dtype=torch.float64) + 0.5
        # Sums over the values below each edge, 0 included.
        number, first, second = (
            torch.nn.functional.pad((counts * power).cumsum(0), (1, 0))
            for power in (torch.ones_like(centres), centres, centres**2)
        )
        clips = torch.arange(1, bins + 1, device=counts.device)
        step = clips / LARGEST_CODE
        # The first centre that does not become 0 is at step / 2 or above.
        small = (step / 2 - 0.5).ceil().clamp(min=0).long()
        rounded = (number[clips] - number[small]) * step**2 / 12 + second[small]
        clipped = (second[-1] - second[clips]) - 2 * clips * (first[-1] - first[clips])
        return rounded + clipped + clips**2 * (number[-1] - number[clips])
