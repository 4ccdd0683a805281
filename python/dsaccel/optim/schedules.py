"""Learning rates as closed forms: the rate at any point is a function of that point alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dskernels.checks import is_number, wrong_type, wrong_value

# Relative: how far rounding may put a point before the restart that it stands for, as 1 + 1/3 is before 4/3.
_ROUNDING = 1e-12


class ClosedFormLR(LRScheduler):
    """Base of schedules in which the rate depends on the epoch and a group's base rate, and on nothing before.

    So a run that resumes at any point (`load_state_dict`, ``step(epoch)`` or ``last_epoch``) has the rates of one that
    was never interrupted, to the last bit. A subclass gives `rate`. What counts as an epoch is up to the caller: a step
    of the optimizer is fine.

    For epochs below ``warmup`` the rate is ``base * min(1, (epoch + 1) / warmup)``; the schedule itself starts at
    ``warmup``. The first step thus has a rate above 0, and stepping by ones the last of the rise has the base rate.

    Args:
        optimizer: whose groups' ``lr`` are the base rates; as in torch, ``initial_lr`` counts where there is one.
        warmup: length of the linear rise, not below 0. Default: 0.
        last_epoch: the epoch before the first one, as in torch: -1 starts at 0. Default: -1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``warmup`` or an epoch is negative or not finite.

    Source of the linear rise: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2 (gradual warmup).
    """

    def __init__(self, optimizer: Optimizer, *, warmup: float = 0, last_epoch: float = -1) -> None:
        _check_number("warmup", warmup, at_least=0)
        _check_number("last_epoch", last_epoch, at_least=-1)
        self.warmup = warmup
        super().__init__(optimizer, last_epoch)  # type: ignore[arg-type]

    def rate(self, epoch: float, base: float | Tensor, group: int) -> float | Tensor:
        """The rate ``epoch`` after the warmup.

        Args:
            epoch: not negative.
            base: base rate of the group; a tensor where the optimizer has tensors.
            group: its index.
        """
        raise NotImplementedError

    def lrs_at(self, epoch: float) -> list[float | Tensor]:
        """The rate of each group at ``epoch``, wherever the schedule stands; not negative, fractions are fine."""
        _check_number("epoch", epoch, at_least=0)
        if epoch < self.warmup:
            done = epoch + 1
            return [base * done / self.warmup if done < self.warmup else 1.0 * base for base in self.base_lrs]
        return [self.rate(epoch - self.warmup, base, group) for group, base in enumerate(self.base_lrs)]

    def get_lr(self) -> list[float | Tensor]:
        """`lrs_at` of where the schedule stands."""
        return self.lrs_at(self.last_epoch)

    def step(self, epoch: float | None = None) -> None:
        """Goes on by 1, or to ``epoch``, which may be any number not below 0, a fraction or an earlier one included."""
        if epoch is None:
            super().step()
            return
        rates = self.lrs_at(epoch)
        # Torch's step() counts itself, too, and takes epochs with a warning that they are deprecated.
        self._step_count += 1
        self.last_epoch = epoch  # type: ignore[assignment]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(torch.as_tensor(rate))
            else:
                group["lr"] = rate
        self._last_lr = [x.clone() if isinstance(x, Tensor) else x for x in rates]


class CosineWarmRestarts(ClosedFormLR):
    """Cosine annealing with warm restarts: ``eta_min + (base - eta_min) * (1 + cos(pi * T_cur / T_i)) / 2``.

    ``T_cur`` is the time since the last restart and ``T_i = T_0 * T_mult**i`` the length of the cycle: restarts are at
    ``T_0 * (T_mult**i - 1) / (T_mult - 1)``, or at multiples of ``T_0`` for ``T_mult = 1``, and have exactly the base
    rate. A restart counts as reached where rounding puts the epoch just before it (1 part in 1e12).

    It takes the place of torch's ``CosineAnnealingWarmRestarts``, which agrees where it is right. That takes integers
    only, counts the restarts before ``step(epoch)`` by a rounded logarithm, which fails at some (``T_mult=3``, epoch
    121), and when resumed by ``last_epoch`` goes on in a cycle of the first length.

    Args:
        optimizer: as in `ClosedFormLR`.
        T_0: length of the first cycle, positive, fractions included.
        T_mult: ratio of the lengths of one cycle and the one before, 1 or more. Default: 1.
        eta_min: the lowest rate, which is approached at the end of each cycle; one for all groups or one a group.
            Default: 0.
        warmup: as in `ClosedFormLR`. Default: 0.
        last_epoch: as in `ClosedFormLR`. Default: -1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, equation 5.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_0: float,
        T_mult: float = 1,
        eta_min: float | Sequence[float] = 0.0,
        *,
        warmup: float = 0,
        last_epoch: float = -1,
    ) -> None:
        _check_number("T_0", T_0, above=0)
        _check_number("T_mult", T_mult, at_least=1)
        groups = len(optimizer.param_groups)
        lowest = list(eta_min) if isinstance(eta_min, Sequence) else [eta_min] * groups
        if len(lowest) != groups:
            raise wrong_value("eta_min", f"one number, or one for each of {groups} groups", eta_min)
        for value in lowest:
            _check_number("eta_min", value, at_least=0)
        self.T_0, self.T_mult = T_0, T_mult
        self.eta_min: list[float] = lowest
        super().__init__(optimizer, warmup=warmup, last_epoch=last_epoch)

    def rate(self, epoch: float, base: float | Tensor, group: int) -> float | Tensor:
        """As in `ClosedFormLR`."""
        done, length = self.cycle(epoch)
        high = 0.5 * (1 + math.cos(math.pi * done / length))
        # Both ends of this sum are exact; eta_min + (base - eta_min) need not be base.
        return high * base + (1 - high) * self.eta_min[group]

    def cycle(self, epoch: float) -> tuple[float, float]:
        """``T_cur`` and ``T_i`` at ``epoch`` after the warmup."""
        reached = epoch * (1 + _ROUNDING)
        if self.T_mult == 1:
            restarts = math.floor(reached / self.T_0)
        else:
            # _ROUNDING is a thousand times what rounding does to the logarithms.
            growth = self.T_mult - 1
            restarts = math.floor(math.log1p(reached / self.T_0 * growth) / math.log1p(growth))
        return max(0.0, epoch - self._start(restarts)), self.T_0 * self.T_mult**restarts

    def _start(self, restarts: int) -> float:
        if self.T_mult == 1:
            return self.T_0 * restarts
        # A ratio just above 1 loses nothing here, as it would in T_mult**restarts - 1.
        growth = self.T_mult - 1
        return self.T_0 * math.expm1(restarts * math.log1p(growth)) / growth


def warm_restarts_for(
    optimizer: Optimizer,
    epochs: float,
    *,
    cycles: int = 3,
    floor: float = 0.01,
    warmup: float = 0,
    last_epoch: float = -1,
) -> CosineWarmRestarts:
    """`CosineWarmRestarts` whose equal cycles end with the training: ``T_0 = epochs / 3``, ``eta_min = base / 100``.

    Args:
        optimizer: as in `ClosedFormLR`; each group has its own ``eta_min``.
        epochs: length of the training, warmup included. Whoever goes on beyond it meets a further restart.
        cycles: how many cycles fill it. Default: 3.
        floor: ``eta_min`` as a part of the base rate, from 0 to 1. Default: 0.01.
        warmup: as in `ClosedFormLR`; the cycles share what it leaves. Default: 0.
        last_epoch: as in `ClosedFormLR`. Default: -1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit: ``epochs > warmup >= 0``, ``cycles >= 1``, ``0 <= floor <= 1``.

    The ratios are practitioners' advice.
    """
    _check_number("warmup", warmup, at_least=0)
    _check_number("epochs", epochs, above=warmup)
    _check_number("cycles", cycles, at_least=1)
    _check_number("floor", floor, at_least=0)
    if floor > 1:
        raise wrong_value("floor", "a number from 0 to 1", floor)
    lowest = [floor * float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return CosineWarmRestarts(optimizer, (epochs - warmup) / cycles, 1, lowest, warmup=warmup, last_epoch=last_epoch)


class WarmupCosine(ClosedFormLR):
    """A linear rise, then half a cosine: ``base * (final + (1 - final) * (1 + cos(pi * t)) / 2)``.

    ``t`` goes from 0 at ``warmup`` to 1 at ``steps``, and stays there.

    Args:
        optimizer: as in `ClosedFormLR`.
        steps: length of the training, warmup included, positive.
        warmup: as in `ClosedFormLR`. Default: a twentieth of ``steps``, rounded, at least 1.
        final: rate at the end as a part of the base rate, from 0 to 1. Default: 0.1.
        last_epoch: as in `ClosedFormLR`. Default: -1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit; ``warmup`` must not exceed ``steps``.

    Source: Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, section 3.1 (a cosine down to a
    tenth, as long as the training).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps: float,
        *,
        warmup: float | None = None,
        final: float = 0.1,
        last_epoch: float = -1,
    ) -> None:
        _check_number("steps", steps, above=0)
        _check_number("final", final, at_least=0)
        if final > 1:
            raise wrong_value("final", "a number from 0 to 1", final)
        if warmup is None:
            warmup = max(1, round(0.05 * steps))
        elif is_number(warmup) and warmup > steps:
            raise wrong_value("warmup", f"a number up to steps = {steps}", warmup)
        self.steps, self.final = steps, final
        super().__init__(optimizer, warmup=warmup, last_epoch=last_epoch)

    def rate(self, epoch: float, base: float | Tensor, group: int) -> float | Tensor:
        """As in `ClosedFormLR`."""
        left = self.steps - self.warmup
        done = min(1.0, epoch / left) if left > 0 else 1.0
        return base * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))


def _check_number(name: str, value: float, *, at_least: float | None = None, above: float | None = None) -> None:
    if not is_number(value):
        raise wrong_type(name, "a number", value)
    if at_least is not None and not at_least <= value < math.inf:
        raise wrong_value(name, f"a finite number not below {at_least}", value)
    if above is not None and not above < value < math.inf:
        raise wrong_value(name, f"a finite number above {above}", value)
