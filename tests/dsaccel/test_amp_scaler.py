"""LossScaler: its scale, its answer, and what becomes of a step that is skipped, against torch's GradScaler."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

from dsaccel.amp import LossScaler, StepResult

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((3, 5), (1,), (67,), (0,))


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def like(weights: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(weight.detach().clone()) for weight in weights]


def backward(scaler: GradScaler, weights: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Adds ``gradients``, times the scale, to ``.grad``."""
    loss = sum((weight * gradient).sum() for weight, gradient in zip(weights, gradients, strict=True))
    scaler.scale(loss).backward()


def window(
    scaler: LossScaler,
    optimizer: torch.optim.Optimizer,
    weights: list[torch.nn.Parameter],
    value: float = 1.0,
    **options: Any,
) -> StepResult:
    """One forward, backward, step and update, in which the first gradient has ``value``."""
    gradients = [torch.randn_like(weight) for weight in weights]
    gradients[0][0] = value
    backward(scaler, weights, gradients)
    result = scaler.step(optimizer, **options)
    scaler.update()
    optimizer.zero_grad()
    return result


def sgd(weights: Iterable[Tensor], fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, fused=fused)


fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
NONFINITE = pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)


def test_defaults() -> None:
    scaler = LossScaler("cpu")
    assert isinstance(scaler, GradScaler)
    assert (scaler.get_scale(), scaler.min_scale, scaler.max_scale) == (8192, 4096, 65536)
    torchs = GradScaler("cpu")
    for name in ("get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        assert getattr(scaler, name)() == getattr(torchs, name)()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=repr)
def test_devices(device: Any) -> None:
    weights = parameters()
    assert window(LossScaler(device), sgd(weights, True), weights)


def test_without_a_gpu_the_default_device_disables_as_in_torch() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not LossScaler().is_enabled()


@fused_or_not
@NONFINITE
def test_a_gradient_that_is_not_finite_skips_the_step(fused: bool, value: float) -> None:
    weights = parameters()
    before = copy.deepcopy(weights)
    optimizer, scaler = sgd(weights, fused), LossScaler("cpu")
    result = window(scaler, optimizer, weights, value)
    assert not result
    assert not result.total_norm.isfinite()
    assert scaler.get_scale() == 4096
    torch.testing.assert_close(weights, before, rtol=0, atol=0)
    assert window(scaler, optimizer, weights)
    assert not torch.equal(weights[2], before[2])


@fused_or_not
def test_the_scale_stays_within_its_bounds(fused: bool) -> None:
    weights = parameters()
    optimizer, scaler = sgd(weights, fused), LossScaler("cpu", growth_interval=2)
    for _ in range(200):
        assert not window(scaler, optimizer, weights, math.inf)
    assert scaler.get_scale() == 4096
    scales = []
    for _ in range(14):
        assert window(scaler, optimizer, weights)
        scales.append(scaler.get_scale())
    assert scales == [4096, *(scale for scale in (8192, 16384, 32768, 65536) for _ in range(2)), *[65536] * 5]


def test_within_its_bounds_the_scale_is_that_of_grad_scaler() -> None:
    options = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}
    scalers = [GradScaler("cpu", **options), LossScaler("cpu", min_scale=1e-30, max_scale=1e30, **options)]
    weights = [parameters() for _ in scalers]
    optimizers = [sgd(each, fused) for each, fused in zip(weights, (False, True), strict=True)]
    for value in torch.tensor([1.0, 1.0, 1.0, math.inf])[torch.randint(4, (40,))].tolist():
        for scaler, optimizer, own in zip(scalers, optimizers, weights, strict=True):
            window(scaler, optimizer, own, value)
        assert scalers[1].state_dict().items() >= scalers[0].state_dict().items()


@fused_or_not
def test_a_nan_in_one_microbatch_costs_the_window_and_one_backoff(fused: bool) -> None:
    weights = parameters()
    before = copy.deepcopy(weights)
    optimizer, scaler = sgd(weights, fused), LossScaler("cpu", init_scale=65536.0)
    for microbatch in range(4):
        gradients = [torch.randn_like(weight) for weight in weights]
        if microbatch == 1:
            gradients[2][66] = math.nan
        backward(scaler, weights, gradients)
    assert not scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert scaler.get_scale() == 32768
    torch.testing.assert_close(weights, before, rtol=0, atol=0)


@fused_or_not
def test_accumulated_gradients_are_unscaled_once(fused: bool) -> None:
    weights = parameters()
    wanted, scaler = like(weights), LossScaler("cpu")
    optimizer, torchs = sgd(weights, fused), sgd(wanted, False)
    for _ in range(3):
        gradients = [torch.randn_like(weight) for weight in weights]
        backward(scaler, weights, gradients)
        for weight, gradient in zip(wanted, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    norm = torch.nn.utils.clip_grad_norm_(wanted, 0.5)
    torchs.step()
    result = scaler.step(optimizer, max_norm=0.5)
    torch.testing.assert_close(result.total_norm, norm)
    torch.testing.assert_close(weights, wanted)


@fused_or_not
def test_no_gradients_at_all_do_nothing(fused: bool) -> None:
    weights = parameters()
    before = copy.deepcopy(weights)
    optimizer, scaler = sgd(weights, fused), LossScaler("cpu", growth_interval=1)
    scaler.scale(torch.zeros(()))
    state = scaler.state_dict()
    for options in ({}, {"max_norm": 1.0}):
        result = scaler.step(optimizer, **options)
        assert result == StepResult(False)
        scaler.update()
    scaler.unscale_(optimizer)
    assert not scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() == state
    torch.testing.assert_close(weights, before, rtol=0, atol=0)


@fused_or_not
def test_some_gradients_none(fused: bool) -> None:
    weights = parameters()
    optimizer, scaler = sgd([*weights, torch.nn.Parameter(torch.ones(3))], fused), LossScaler("cpu")
    assert window(scaler, optimizer, weights, max_norm=1.0)


@pytest.mark.parametrize("broken", [0, 1])
def test_several_optimizers(broken: int) -> None:
    weights = [parameters(), parameters()]
    before = copy.deepcopy(weights)
    optimizers = [sgd(weights[0], True), sgd(weights[1], False)]
    scaler = LossScaler("cpu")
    for which in range(2):
        gradients = [torch.randn_like(weight) for weight in weights[which]]
        if which == broken:
            gradients[0][1] = math.inf
        backward(scaler, weights[which], gradients)
    results = [scaler.step(optimizer, max_norm=1.0) for optimizer in optimizers]
    assert [bool(result) for result in results] == [which != broken for which in range(2)]
    torch.testing.assert_close(weights[broken], before[broken], rtol=0, atol=0)
    assert not torch.equal(weights[1 - broken][2], before[1 - broken][2])
    scaler.update()
    assert scaler.get_scale() == 4096


def test_the_last_step_of_the_scheduled_optimizer_decides_over_its_scheduler() -> None:
    weights = [parameters(), parameters()]
    optimizers = [sgd(weights[0], True), sgd(weights[1], False)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    scaler = LossScaler("cpu")
    for values, advanced in (((1, math.inf), (True, False)), ((math.inf, 1), (False, True)), ((1, 1), (True, True))):
        for which in range(2):
            window(scaler, optimizers[which], weights[which], values[which])
        assert tuple(scaler.step_scheduler(scheduler) for scheduler in schedulers) == advanced
    assert [scheduler.last_epoch for scheduler in schedulers] == [2, 2]
    assert [scheduler.get_last_lr() for scheduler in schedulers] == [[0.025], [0.025]]


def test_a_scheduler_gets_its_arguments() -> None:
    weights = parameters()
    optimizer, scaler = sgd(weights, True), LossScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for metric in (1.0, 2.0, 3.0):
        window(scaler, optimizer, weights)
        assert scaler.step_scheduler(scheduler, metric)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("through", ["state_dict", "pickle", "deepcopy", "torch.save"])
def test_training_resumes_exactly(through: str, tmp_path: Any) -> None:
    weights = parameters()
    optimizer = sgd(weights, True)
    options = {"growth_interval": 3, "min_scale": 1.0, "max_scale": 2.0**20}
    scaler = LossScaler("cpu", init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, **options)
    values = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0]
    for value in values:
        window(scaler, optimizer, weights, value)
    if through == "pickle":
        resumed = pickle.loads(pickle.dumps(scaler))
    elif through == "deepcopy":
        resumed = copy.deepcopy(scaler)
    else:
        state = scaler.state_dict()
        if through == "torch.save":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        resumed = LossScaler("cpu")
        resumed.load_state_dict(state)
    assert resumed.state_dict() == scaler.state_dict()
    for value in [1.0, *values, math.nan]:
        for each in (scaler, resumed):
            window(each, optimizer, weights, value)
        assert resumed.state_dict() == scaler.state_dict()


def test_state_is_exchanged_with_grad_scaler() -> None:
    torchs, scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=7), LossScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.load_state_dict(torchs.state_dict())
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.max_scale) == (65536, 7, 65536)
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.get_scale() == 65536


def test_a_new_scale() -> None:
    scaler = LossScaler("cpu")
    scaler.scale(torch.ones(()))
    for new, scale in ((5000, 5000), (torch.tensor(6000.0), 6000), (torch.tensor(1.0), 4096), (65536.0, 65536)):
        scaler.update(new)
        assert scaler.get_scale() == scale
    for new in (4095.0, 65537.0, math.nan):
        with pytest.raises(ValueError, match=r"new_scale: expected a number from 4096.0 to 65536.0, got"):
            scaler.update(new)


@fused_or_not
def test_disabled(fused: bool) -> None:
    weights = parameters()
    wanted, gradients = like(weights), [torch.randn_like(weight) for weight in weights]
    optimizer, torchs, scaler = sgd(weights, fused), sgd(wanted, False), LossScaler("cpu", enabled=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for options in ({}, {"max_norm": 0.5}, {"max_norm": 0.5, "norm_type": math.inf}):
        optimizer.zero_grad()
        for weight, gradient in zip(wanted, gradients, strict=True):
            weight.grad = gradient.clone()
        backward(scaler, weights, gradients)
        if options:
            torch.nn.utils.clip_grad_norm_(wanted[:3], **options)  # torch has no maximum over nothing
        scaler.unscale_(optimizer)
        result = scaler.step(optimizer, **options)
        torchs.step()
        scaler.update()
        assert result.stepped is True
        assert (result.total_norm is None) == (not options)
        torch.testing.assert_close(weights, wanted)
    assert scaler.step_scheduler(scheduler)
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    scaler.load_state_dict({})


@fused_or_not
def test_disabled_skips_nothing(fused: bool) -> None:
    weights = parameters()
    scaler = LossScaler("cpu", enabled=False)
    assert window(scaler, sgd(weights, fused), weights, math.nan, max_norm=1.0).stepped is True
    assert weights[0].isnan().any()


def test_disabled_takes_closures_and_says_what_came_back() -> None:
    weights = parameters()
    assert LossScaler("cpu", enabled=False).step(sgd(weights, False), closure=lambda: 7.0) == StepResult(
        True, None, 7.0
    )


ARGUMENTS = {
    "a scale that is no number": ({"init_scale": "1"}, TypeError, "init_scale: expected a number, got '1'"),
    "a scale below the bounds": ({"init_scale": 1.0}, ValueError, "init_scale: expected a number from 4096.0 to 65536"),
    "a scale above the bounds": ({"init_scale": 1e6}, ValueError, "init_scale: expected a number from 4096.0 to 65536"),
    "bounds that cross": ({"min_scale": 1e5}, ValueError, "min_scale and max_scale: expected 0 < min_scale"),
    "a bound of 0": ({"min_scale": 0.0}, ValueError, "min_scale and max_scale: expected 0 < min_scale"),
    "an infinite bound": ({"max_scale": math.inf}, ValueError, "min_scale and max_scale: expected 0 < min_scale"),
    "no growth": ({"growth_factor": 1.0}, ValueError, "growth_factor: expected a finite number above 1, got 1.0"),
    "no backoff": ({"backoff_factor": 1.0}, ValueError, "backoff_factor: expected a number between 0 and 1, got 1.0"),
    "an interval of 0": ({"growth_interval": 0}, ValueError, "growth_interval: expected at least 1, got 0"),
    "half an interval": ({"growth_interval": 0.5}, TypeError, "growth_interval: expected an integer, got 0.5"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_checked(case: str) -> None:
    options, error, message = ARGUMENTS[case]
    with pytest.raises(error, match=message):
        LossScaler("cpu", **options)


@fused_or_not
def test_the_order_of_calls_is_checked(fused: bool) -> None:
    weights = parameters()
    optimizer, scaler = sgd(weights, fused), LossScaler("cpu")
    for call in (scaler.update, lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer)):
        weights[0].grad = torch.ones_like(weights[0])
        with pytest.raises(RuntimeError, match=r"expected scale\(loss\) before, got none"):
            call()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"step_scheduler: expected step\(scheduler.optimizer\) before, got none"):
        scaler.step_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    backward(scaler, weights, [torch.randn_like(weight) for weight in weights])
    with pytest.raises(RuntimeError, match=r"update: expected step\(\) or unscale_\(\) since the last update\(\)"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_: expected the first call .* got one after unscale_\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"expected to be copied or pickled after update\(\)"):
        copy.deepcopy(scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_: expected the first call .* got one after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="step: expected the first call since update"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="step: expected no closure"):
        scaler.step(optimizer, lambda: 0.0)
    with pytest.raises(RuntimeError, match="step: expected no closure"):
        scaler.step(optimizer, closure=lambda: 0.0)
    with pytest.raises(TypeError, match="max_norm: expected a number or None, got '1'"):
        scaler.step(optimizer, max_norm="1")
    with pytest.raises(ValueError, match="max_norm: expected a number not below 0, or None, got -1"):
        scaler.step(optimizer, max_norm=-1)
    with pytest.raises(ValueError, match="norm_type: expected a positive number or inf, got 0"):
        scaler.step(optimizer, norm_type=0)
    assert scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})


def test_float16_gradients_need_an_optimizer_that_folds() -> None:
    weights = parameters(torch.float16)
    optimizer, scaler = sgd(weights, False), LossScaler("cpu")
    backward(scaler, weights, [torch.ones_like(weight) for weight in weights])
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ValueError, match="gradients: expected float32 or bfloat16, got float16, of which"):
            call(optimizer)
