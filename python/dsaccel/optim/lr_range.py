"""The learning rate range test."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from dsaccel.amp import LossScaler
from dsaccel.optim._restore import restoring
from dskernels.checks import is_integer, is_number, wrong_type, wrong_value

# Losses that are not finite, one after the other, of which no step is to be expected to lead back.
_HOPELESS = 3


@dataclass(frozen=True)
class LRRangeResult:
    """What `lr_range_test` found, by step, up to where it stopped.

    Attributes:
        rates: of the group with the highest rate; the others keep their ratio to it.
        losses: before the step with that rate; nan or inf where it was.
        smoothed: the losses, averaged over the steps before and after; nan where the loss was not finite.
        suggestion: the rate at which ``smoothed`` falls most steeply over the logarithm of the rate, no higher than
            where it is lowest; None if it never falls.
        diverged_at: the rate at which the loss went out of bounds, or from which on none was finite; None if it held.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    diverged_at: float | None

    def __str__(self) -> str:
        found = "none, as the loss never falls" if self.suggestion is None else f"{self.suggestion:.3g}"
        end = "did not diverge" if self.diverged_at is None else f"diverged at {self.diverged_at:.3g}"
        return f"suggestion {found}; {len(self.rates)} steps up to {self.rates[-1]:.3g}, {end}"

    def plot(self, path: str | Path) -> None:
        """Draws the losses over the rates, and the suggestion, as a picture of the kind that ``path`` ends with.

        Raises:
            ModuleNotFoundError: matplotlib, of the extra ``accel``, is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "LRRangeResult.plot draws with matplotlib, which is not installed: pip install 'dskernels[accel]'"
            ) from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="#9db8d2", lw=0.9, label="loss")
        axes.plot(self.rates, self.smoothed, color="#222222", lw=1.6, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="#1f6f3f", ls="--", label=f"suggestion {self.suggestion:.2g}")
        shown = [loss for loss in self.smoothed if math.isfinite(loss)]
        if shown:
            # What diverges would hide the rest.
            margin = 0.1 * (max(shown) - min(shown)) or 1.0
            axes.set_ylim(min(shown) - margin, max(shown) + margin)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)


def lr_range_test(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    scaler: torch.amp.GradScaler | None = None,
    sampler: Any = None,
    max_norm: float | None = None,
    smoothing: float = 0.9,
    diverges_at: float = 4.0,
    backward: bool = True,
    process_group: distributed.ProcessGroup | None = None,
) -> LRRangeResult:
    """Trains for some steps with a learning rate that grows from one to the next, and then takes everything back.

    ``rate[i] = lowest * (highest / lowest) ** (i / (steps - 1))``. Groups of the optimizer keep the ratios of their
    rates; the highest has ``rate``. A loss that is not finite is noted and not stepped on. The test ends early at the
    third such in a row, or when the moving average of the losses exceeds ``diverges_at`` times its lowest value.

    Afterwards, and also if an exception ends it, everything is as before, to the last bit and in the same tensors:
    parameters, gradients, buffers (also those that are not saved) and modes of the model, state and groups of the
    optimizer, the scaler, the random states of Python, NumPy, torch and CUDA, and the positions of ``batches`` and
    ``sampler``. That takes memory for a copy of them. After an exception inside forward or backward of a model in
    ``fully_shard`` the values are as before, but only torch 2.13 and later can run that model again.

    With several processes each has its batches; all have the same rates, note the mean loss, and stop together.

    Args:
        model: also one in `DistributedDataParallel` or ``fully_shard``. It stays in the mode that it is in.
        optimizer: of its parameters, also a `ZeroRedundancyOptimizer`.
        loss_fn: ``loss_fn(model, batch)`` gives the loss to be differentiated, a scalar tensor.
        batches: as a `DataLoader`. It is started over if it ends; an iterator, which cannot be, must have ``steps``
            batches, and is where it was afterwards only if it has ``state_dict`` and ``load_state_dict``.
        lowest: the first rate, positive. Default: 1e-7.
        highest: the last rate, above ``lowest``. Default: 10.
        steps: how many steps, 2 or more. Default: 100.
        scaler: of the losses, if training has one. Default: none.
        sampler: whatever else gives the batches their order, with ``state_dict`` and ``load_state_dict``, or a
            ``generator``. The samplers of a `DataLoader` are found by themselves. Default: none.
        max_norm: clips the gradients as `LossScaler.step` does; needs such a scaler, or none. Default: no clipping.
        smoothing: weight of a loss relative to that of its neighbour, from 0 to below 1. Default: 0.9.
        diverges_at: above 1. Default: 4.
        backward: whether gradients are taken here; if False, ``loss_fn`` has added them to ``.grad`` already, scaled if
            there is a ``scaler``, and its loss is not differentiated. Default: True.
        process_group: the processes to agree with. Default: all, if torch.distributed is initialised.

    Returns:
        A `LRRangeResult`, the same on every process.

    Raises:
        TypeError: an argument, or what ``loss_fn`` gives, has the wrong type.
        ValueError: a value does not fit, or there are too few batches.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3, where the rates grow
    linearly. Where to take a rate from the curve is a rule of thumb: that of the steepest descent is a careful one.
    """
    _check(optimizer, lowest, highest, steps, smoothing, diverges_at)
    if scaler is None:
        # It does nothing but clip.
        device = next((x.device for group in optimizer.param_groups for x in group["params"]), "cpu")
        scaler = LossScaler(device, enabled=False)
    if max_norm is not None and not isinstance(scaler, LossScaler):
        raise wrong_type("scaler", "a LossScaler with max_norm", scaler)
    clipping = {} if max_norm is None else {"max_norm": max_norm}
    rates = [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]
    losses: list[float] = []
    bounds = _Bounds(smoothing, diverges_at)
    with (
        restoring(model, optimizer, scaler, batches, sampler),
        contextlib.closing(_endless(batches, steps)) as source,
    ):
        set_rate = _rate_setter(optimizer)
        optimizer.zero_grad()
        for rate, batch in zip(rates, source, strict=False):
            set_rate(rate)
            loss = loss_fn(model, batch)
            _check_loss(loss)
            if backward:
                # Also of a loss that is not finite: other processes may wait for its gradients.
                scaler.scale(loss).backward()
            losses.append(_mean(loss, process_group))
            if bounds.exceeded_by(losses[-1]):
                break
            if math.isfinite(losses[-1]):
                scaler.step(optimizer, **clipping)
                scaler.update()
            optimizer.zero_grad()
    smoothed = _smooth(losses, smoothing)
    rates = rates[: len(losses)]
    diverged_at = None if bounds.since is None else rates[bounds.since]
    return LRRangeResult(tuple(rates), tuple(losses), tuple(smoothed), _steepest(rates, smoothed), diverged_at)


class _Bounds:
    """Follows the losses. ``since`` is the step from which on they are out of bounds, or None."""

    def __init__(self, smoothing: float, diverges_at: float) -> None:
        self.smoothing, self.diverges_at = smoothing, diverges_at
        self.step, self.sum, self.weight, self.lowest = -1, 0.0, 0.0, math.inf
        self.since: int | None = None

    def exceeded_by(self, loss: float) -> bool:
        self.step += 1
        if not math.isfinite(loss):
            self.since = self.step if self.since is None else self.since
            return self.step - self.since + 1 == _HOPELESS
        self.sum = self.smoothing * self.sum + loss
        self.weight = self.smoothing * self.weight + 1
        average = self.sum / self.weight
        self.lowest = min(self.lowest, average)
        exceeded = average > self.lowest + (self.diverges_at - 1) * abs(self.lowest)
        self.since = self.step if exceeded else None
        return exceeded


def _smooth(losses: Sequence[float], smoothing: float) -> list[float]:
    """``sum_j smoothing^|i - j| * loss_j / sum_j smoothing^|i - j|`` over the finite losses, at each of them."""
    found = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
    if not found:
        return [math.nan] * len(losses)
    # Losses that explode would reach back over all others; how high they go says nothing about the descent.
    best = min(found, key=lambda index: losses[index])
    highest = max(losses[index] for index in found if index <= best)
    smoothed = [math.nan] * len(losses)
    for i in found:
        weights = [smoothing ** abs(i - j) for j in found]
        total = sum(weight * min(losses[j], highest) for weight, j in zip(weights, found, strict=True))
        smoothed[i] = total / sum(weights)
    return smoothed


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    found = [index for index, loss in enumerate(smoothed) if math.isfinite(loss)]
    if len(found) < 2:
        return None
    lowest = min(found, key=lambda index: smoothed[index])
    slopes = {}
    for place, index in enumerate(found):
        before, after = found[max(0, place - 1)], found[min(len(found) - 1, place + 1)]
        slopes[index] = (smoothed[after] - smoothed[before]) / math.log(rates[after] / rates[before])
    steepest = min((index for index in found if index <= lowest), key=lambda index: slopes[index])
    return rates[steepest] if slopes[steepest] < 0 else None


def _rate_setter(optimizer: Optimizer) -> Callable[[float], None]:
    before = [float(group["lr"]) for group in optimizer.param_groups]
    highest = max(before)
    # Groups that all stand at 0, as in a warmup from there, are alike.
    ratios = [rate / highest if highest > 0 else 1.0 for rate in before]

    def set_rate(rate: float) -> None:
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    return set_rate


def _endless(batches: Iterable[Any], steps: int) -> Generator[Any, None, None]:
    count = 0
    while True:
        before = count
        for batch in batches:
            count += 1
            yield batch
        if count == before:
            raise ValueError(
                f"batches: expected {steps}, or what can be started over with at least one, got {count} from"
                f" {type(batches).__name__}"
            )


def _mean(loss: Tensor, group: distributed.ProcessGroup | None) -> float:
    value = loss.detach().double().reshape(1)
    if distributed.is_available() and distributed.is_initialized():
        # Gathered and not reduced, so that the sum has the same order everywhere and all stop at the same step.
        parts = value.new_empty(distributed.get_world_size(group))
        distributed.all_gather_into_tensor(parts, value, group)
        value = parts.mean()
    return value.item()


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise wrong_type("loss_fn", "a function that gives a scalar tensor", loss)


def _check(optimizer: object, lowest: float, highest: float, steps: int, smoothing: float, diverges_at: float) -> None:
    if not isinstance(optimizer, Optimizer):
        raise wrong_type("optimizer", "a torch.optim.Optimizer", optimizer)
    numbers = {"lowest": lowest, "highest": highest, "smoothing": smoothing, "diverges_at": diverges_at}
    for name, value in numbers.items():
        if not is_number(value):
            raise wrong_type(name, "a number", value)
    if not is_integer(steps):
        raise wrong_type("steps", "an integer", steps)
    if not 0 < lowest < highest < math.inf:
        raise wrong_value("lowest and highest", "0 < lowest < highest < inf", (lowest, highest))
    if steps < 2:
        raise wrong_value("steps", "at least 2", steps)
    if not 0 <= smoothing < 1:
        raise wrong_value("smoothing", "a number from 0 to below 1", smoothing)
    if not diverges_at > 1:
        raise wrong_value("diverges_at", "a number above 1", diverges_at)
