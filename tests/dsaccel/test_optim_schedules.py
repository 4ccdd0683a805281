"""Schedules: right values, resumption anywhere, restarts to the last bit, and what torch's own agree with."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR

from dsaccel.amp import LossScaler
from dsaccel.optim import ClosedFormLR, CosineWarmRestarts, WarmupCosine, warm_restarts_for

BASE = 0.3


def optimizer_of(*rates: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (BASE,)]
    return torch.optim.SGD(groups, lr=1.0)


def rates_of(scheduler: Any, steps: int) -> list[float]:
    """The rate now, and after each of further steps."""
    rates = [scheduler.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


def cosine(done: float, high: float = BASE, low: float = 0.0) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize(("T_0", "T_mult"), [(1, 1), (7, 1), (1, 2), (3, 2), (4, 3)])
def test_uninterrupted_runs_agree_with_torch(T_0: int, T_mult: int) -> None:
    ours = CosineWarmRestarts(optimizer_of(), T_0, T_mult, eta_min=0.01)
    torchs = CosineAnnealingWarmRestarts(optimizer_of(), T_0, T_mult, eta_min=0.01)
    assert rates_of(ours, 200) == pytest.approx(rates_of(torchs, 200), rel=1e-12)


@pytest.mark.parametrize("epoch", [0.0, 0.25, 3.999, 4.0, 11.5, 12.0, 20.7])
def test_fractions_agree_with_torch(epoch: float) -> None:
    ours, torchs = CosineWarmRestarts(optimizer_of(), 4, 2), CosineAnnealingWarmRestarts(optimizer_of(), 4, 2)
    for scheduler in (ours, torchs):
        scheduler.step(epoch)
    assert ours.get_last_lr() == pytest.approx(torchs.get_last_lr(), rel=1e-12)


def test_values_by_hand() -> None:
    scheduler = CosineWarmRestarts(optimizer_of(), 2.5, 1.5, eta_min=0.1)
    # Cycles of 2.5, 3.75 and 5.625.
    expected = {0: 0, 1: 1 / 2.5, 2.5: 0, 3: 0.5 / 3.75, 6.25: 0, 10: 3.75 / 5.625}
    for epoch, done in expected.items():
        assert scheduler.lrs_at(epoch) == [pytest.approx(cosine(done, BASE, 0.1), rel=1e-14)]


def test_restarts_have_exactly_the_base_rate() -> None:
    for mult, restarts in ((2, (1, 3, 7, 15, 31, 63, 2**40 - 1)), (3, (1, 4, 13, 40, 121, 364, (3**20 - 1) // 2))):
        scheduler = CosineWarmRestarts(optimizer_of(), 1, mult, eta_min=0.007)
        for index, epoch in enumerate(restarts):
            assert scheduler.lrs_at(epoch) == [BASE]
            if index < 6:
                # Just before it the cycle is all but over.
                assert scheduler.lrs_at(epoch - 1e-4)[0] < 0.0071


@pytest.mark.parametrize("T_mult", [1.00001, 1.001, 1.1, 1.7, 2, 7])
def test_restarts_of_any_ratio_are_found(T_mult: float) -> None:
    scheduler, start, length = CosineWarmRestarts(optimizer_of(), 1.3, T_mult, eta_min=0.01), 0.0, 1.3
    while start < 1500:
        assert scheduler.lrs_at(start) == [pytest.approx(BASE, rel=1e-12)]
        assert scheduler.lrs_at(start + 0.5 * length) == [pytest.approx((BASE + 0.01) / 2, rel=1e-9)]
        assert scheduler.lrs_at(start + 0.9999 * length)[0] < 0.010001
        start += length
        length *= T_mult


@pytest.mark.parametrize("epochs", [1, 4, 7, 10, 11, 50, 90, 100, 0.7])
@pytest.mark.parametrize("cycles", [1, 3, 7])
def test_fractional_periods_restart_where_they_should(epochs: float, cycles: int) -> None:
    scheduler = CosineWarmRestarts(optimizer_of(), epochs / cycles, eta_min=0.003)
    for cycle in range(3 * cycles):
        for epoch in (cycle * epochs / cycles, cycle * (epochs / cycles), epochs * (cycle / cycles)):
            assert scheduler.lrs_at(epoch) == [BASE]


def test_ratio_just_above_one_is_like_one() -> None:
    near, one = CosineWarmRestarts(optimizer_of(), 10, 1 + 1e-12), CosineWarmRestarts(optimizer_of(), 10, 1)
    for epoch in (3, 25, 999, 12345.5):
        assert near.lrs_at(epoch) == pytest.approx(one.lrs_at(epoch), rel=1e-5)


MAKERS: dict[str, Callable[..., ClosedFormLR]] = {
    "doubling": lambda optimizer, **options: CosineWarmRestarts(optimizer, 1, 2, eta_min=0.01, **options),
    "fractional": lambda optimizer, **options: CosineWarmRestarts(optimizer, 10 / 3, 1.7, warmup=4, **options),
    "thirds": lambda optimizer, **options: warm_restarts_for(optimizer, 100, **options),
    "half a cosine": lambda optimizer, **options: WarmupCosine(optimizer, 130, **options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("epoch", [1, 50, 99])
def test_resumed_equals_uninterrupted(make: Callable[..., ClosedFormLR], epoch: int) -> None:
    expected = rates_of(make(optimizer_of()), 130)
    jumped = make(optimizer_of())
    jumped.step(epoch)
    assert rates_of(jumped, 130 - epoch) == expected[epoch:]
    group = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 123.0, "initial_lr": BASE}
    by_last_epoch = make(torch.optim.SGD([group], lr=1.0), last_epoch=epoch - 1)
    assert rates_of(by_last_epoch, 130 - epoch) == expected[epoch:]


def test_chained_resumption_from_files() -> None:
    expected = rates_of(MAKERS["fractional"](optimizer_of()), 120)
    scheduler, found = MAKERS["fractional"](optimizer_of()), []
    for _ in range(3):
        found += rates_of(scheduler, 39)
        file = io.BytesIO()
        torch.save({"optimizer": scheduler.optimizer.state_dict(), "schedule": scheduler.state_dict()}, file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        scheduler = MAKERS["fractional"](optimizer_of())
        scheduler.optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["schedule"])
        assert scheduler.get_last_lr() == found[-1:]
        scheduler.step()
    assert found == expected[:120]


def test_steps_back_and_fractions_leave_no_trace() -> None:
    scheduler = CosineWarmRestarts(optimizer_of(), 3, 2, eta_min=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in (17.25, 2, 40, 0.5):
            scheduler.step(epoch)
            assert scheduler.get_last_lr() == scheduler.lrs_at(epoch) == [scheduler.optimizer.param_groups[0]["lr"]]
        scheduler.optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 1.5


def test_each_group_has_its_own_rates() -> None:
    scheduler = warm_restarts_for(optimizer_of(1.0, 0.1), 30, warmup=3)
    assert scheduler.T_0 == 9
    assert scheduler.lrs_at(0) == pytest.approx([1 / 3, 0.1 / 3])
    assert scheduler.lrs_at(2) == scheduler.lrs_at(3) == scheduler.lrs_at(12) == [1.0, 0.1]
    assert scheduler.lrs_at(3 + 4.5) == pytest.approx([0.505, 0.0505])
    assert scheduler.lrs_at(12 - 1e-9) == pytest.approx([0.01, 0.001])
    scheduler.step(5)
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == scheduler.lrs_at(5)


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    optimizer = optimizer_of(torch.tensor(BASE))
    scheduler = CosineWarmRestarts(optimizer, 4, eta_min=0.1, warmup=2)
    held = optimizer.param_groups[0]["lr"]
    for epoch, expected in ((0, BASE / 2), (1, BASE), (2, BASE), (4, cosine(0.5, BASE, 0.1))):
        scheduler.step(epoch)
        assert held.item() == pytest.approx(expected, rel=1e-6)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(cosine(0.75, BASE, 0.1), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 19, 200, 1234])
def test_warmup_cosine_by_hand(steps: int) -> None:
    warmup = max(1, round(0.05 * steps))
    expected = [BASE * (step + 1) / warmup for step in range(warmup)]
    expected += [cosine((step - warmup) / (steps - warmup), BASE, 0.1 * BASE) for step in range(warmup, steps)]
    assert rates_of(WarmupCosine(optimizer_of(), steps), steps - 1) == pytest.approx(expected, rel=1e-14)


def test_looked_up_rates_are_copies() -> None:
    optimizer = optimizer_of(torch.tensor(BASE))
    schedule = CosineWarmRestarts(optimizer, 4, warmup=2)
    for epoch in range(4):
        schedule.lrs_at(epoch)[0].zero_()
    assert schedule.base_lrs[0] == torch.tensor(BASE)


def test_warmup_cosine_ends_and_stays() -> None:
    scheduler = WarmupCosine(optimizer_of(), 10, warmup=0, final=0.2)
    assert scheduler.lrs_at(0) == [BASE]
    assert scheduler.lrs_at(10) == scheduler.lrs_at(1000) == [pytest.approx(0.2 * BASE)]
    assert WarmupCosine(optimizer_of(), 5, warmup=5).lrs_at(4.5) == [BASE]


def test_after_a_warmup_of_torch() -> None:
    optimizer = optimizer_of()
    warmup = LinearLR(optimizer, 0.25, total_iters=3)
    scheduler = SequentialLR(optimizer, [warmup, CosineWarmRestarts(optimizer, 2, 2)], [4])
    expected = [BASE * k / 4 for k in (1, 2, 3, 4)] + CosineWarmRestarts(optimizer_of(), 2, 2).lrs_at(0)
    expected += [CosineWarmRestarts(optimizer_of(), 2, 2).lrs_at(epoch)[0] for epoch in range(1, 9)]
    assert rates_of(scheduler, 12) == pytest.approx(expected, rel=1e-12)


def test_skipped_steps_do_not_count() -> None:
    optimizer, scaler = optimizer_of(), LossScaler("cpu")
    scheduler = WarmupCosine(optimizer, 10, warmup=5)
    for loss, epoch in ((1.0, 1), (math.inf, 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale(optimizer.param_groups[0]["params"][0].sum() * loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.step_scheduler(scheduler)
        assert scheduler.last_epoch == epoch


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda o: CosineWarmRestarts(o, 0), ValueError, "T_0: expected a finite number above 0, got 0"),
        (lambda o: CosineWarmRestarts(o, math.inf), ValueError, "T_0: expected a finite number above 0, got inf"),
        (lambda o: CosineWarmRestarts(o, "3"), TypeError, r"T_0: expected a number, got '3' \(str\)"),
        (lambda o: CosineWarmRestarts(o, 1, 0.5), ValueError, "T_mult: expected a finite number not below 1, got 0.5"),
        (lambda o: CosineWarmRestarts(o, 1, eta_min=-1), ValueError, "eta_min: expected a finite number not below 0"),
        (lambda o: CosineWarmRestarts(o, 1, eta_min=[0.1, 0.2]), ValueError, "eta_min: expected one number, or one"),
        (lambda o: CosineWarmRestarts(o, 1, eta_min=None), TypeError, "eta_min: expected a number, got None"),
        (lambda o: CosineWarmRestarts(o, 1, warmup=-1), ValueError, "warmup: expected a finite number not below 0"),
        (lambda o: CosineWarmRestarts(o, 1, last_epoch=-2), ValueError, "last_epoch: expected a finite number not bel"),
        (lambda o: CosineWarmRestarts(o, 1).step(-0.5), ValueError, "epoch: expected a finite number not below 0"),
        (lambda o: CosineWarmRestarts(o, 1).lrs_at(math.nan), ValueError, "epoch: expected a finite number not below"),
        (lambda o: WarmupCosine(o, 0), ValueError, "steps: expected a finite number above 0, got 0"),
        (lambda o: WarmupCosine(o, 10, warmup=11), ValueError, "warmup: expected a number up to steps = 10, got 11"),
        (lambda o: WarmupCosine(o, 10, final=1.5), ValueError, "final: expected a number from 0 to 1, got 1.5"),
        (lambda o: warm_restarts_for(o, 3, warmup=3), ValueError, "epochs: expected a finite number above 3, got 3"),
        (lambda o: warm_restarts_for(o, 3, cycles=0), ValueError, "cycles: expected a finite number not below 1"),
        (lambda o: warm_restarts_for(o, 3, floor=2), ValueError, "floor: expected a number from 0 to 1, got 2"),
    ],
)
def test_errors_name_the_argument(make: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    optimizer = optimizer_of()
    with pytest.raises(error, match=message):
        make(optimizer)
    assert optimizer.param_groups[0]["lr"] == BASE
