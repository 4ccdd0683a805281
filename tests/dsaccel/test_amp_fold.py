"""Clipping inside fused optimizers and beside others: parameters after several steps, against torch's own passes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from dsaccel.amp import LossScaler, StepResult, _fold

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((7, 9), (1,), (67,), (0,), (2, 3, 5))
# With such an eps the steps depend on the size of the gradients.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.1, "eps": 0.5}),
    "AdamW-amsgrad-maximize": (AdamW, {"lr": 0.1, "eps": 0.5, "amsgrad": True, "maximize": True}),
    "Adam": (Adam, {"lr": 0.1, "eps": 0.5, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD-momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD-nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (Adagrad, {"lr": 0.1, "eps": 0.5}),
}
EVERY_OPTIMIZER = pytest.mark.parametrize("name", OPTIMIZERS)
fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
CLIPPING = pytest.mark.parametrize(
    "clipping",
    [{}, {"max_norm": 3.0}, {"max_norm": 1e9}, {"max_norm": 0.0}, {"max_norm": 0.5, "norm_type": math.inf}],
    ids=["unclipped", "clipped", "short", "to_nothing", "maximum"],
)
# float64 is limited by the norm and the divisor, which are float32; half precision by a rounding of each parameter, and
# of the state behind it, in each step.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-7, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def optimizer_of(name: str, weights: list[Tensor], fused: bool) -> Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(weights, fused=fused, **options)


def skip_unless_folded(optimizer: Optimizer) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        if not _fold.folds(optimizer):
            pytest.skip(f"torch {torch.__version__}: {type(optimizer).__name__} cannot be folded")


class Right:
    """The same parameters in float64, stepped by torch's unfused optimizer and clipped by torch."""

    def __init__(self, name: str, weights: list[Tensor]) -> None:
        self.weights = [torch.nn.Parameter(weight.detach().double()) for weight in weights]
        self.optimizer = optimizer_of(name, self.weights, fused=False)

    def step(self, gradients: list[Tensor], max_norm: float | None = None, norm_type: float = 2.0) -> Tensor:
        """Returns the norm before clipping."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient.double()
        norm = torch.linalg.vector_norm(torch.cat([weight.grad.flatten() for weight in self.weights]), norm_type)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.weights, max_norm, norm)
        self.optimizer.step()
        return norm


def random_gradients(weights: list[Tensor], size: float = 1.0) -> list[Tensor]:
    return [torch.randn_like(weight) * size for weight in weights]


def backward(scaler: LossScaler, weights: list[Tensor], gradients: list[Tensor]) -> None:
    scaler.scale(sum((weight * gradient).sum() for weight, gradient in zip(weights, gradients, strict=True))).backward()


def weights_of(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def is_folded(result: StepResult) -> bool:
    return isinstance(result.stepped, Tensor)


def assert_close_to(right: Right, weights: list[Tensor]) -> None:
    tolerance = TOLERANCES[weights[0].dtype]
    for weight, wanted in zip(weights, right.weights, strict=True):
        torch.testing.assert_close(weight.double(), wanted, rtol=tolerance, atol=tolerance)


@EVERY_OPTIMIZER
@CLIPPING
@fused_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_equal_those_of_torch(name: str, clipping: dict[str, float], fused: bool, dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    right, optimizer = Right(name, weights), optimizer_of(name, weights, fused)
    folded, scaler = _fold.folds(optimizer), LossScaler("cpu", growth_interval=2)
    for step in range(5):
        gradients = random_gradients(weights, 3.0**step / 9)
        if step == 2:
            broken = random_gradients(weights)
            broken[0][0, 3] = math.inf
            backward(scaler, weights, broken)
            assert not scaler.step(optimizer, **clipping)
            scaler.update()
            optimizer.zero_grad()
        backward(scaler, weights, gradients)
        result = scaler.step(optimizer, **clipping)
        scaler.update()
        optimizer.zero_grad()
        norm = right.step(gradients, **clipping)
        assert result
        assert is_folded(result) == folded
        torch.testing.assert_close(result.total_norm.double(), norm, rtol=1e-6, atol=0)
    assert scaler.get_scale() == 16384
    assert_close_to(right, weights)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parameters(name: str, dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    right, optimizer, scaler = Right(name, weights), optimizer_of(name, weights, True), LossScaler("cpu")
    for _ in range(3):
        gradients = random_gradients(weights, 0.5)
        backward(scaler, weights, gradients)
        skip_unless_folded(optimizer)
        result = scaler.step(optimizer, max_norm=2.0)
        scaler.update()
        optimizer.zero_grad()
        torch.testing.assert_close(result.total_norm.double(), right.step(gradients, max_norm=2.0), rtol=1e-6, atol=0)
        assert is_folded(result)
    assert_close_to(right, weights)


def test_parameters_of_several_types() -> None:
    weights = weights_of() + weights_of(torch.float64)
    right, optimizer, scaler = Right("AdamW", weights), optimizer_of("AdamW", weights, True), LossScaler("cpu")
    gradients = random_gradients(weights)
    backward(scaler, weights, gradients)
    assert is_folded(scaler.step(optimizer, max_norm=1.0))
    right.step(gradients, max_norm=1.0)
    assert_close_to(right, weights)


@fused_or_not
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_unscaled_before(fused: bool, max_norm: float | None) -> None:
    weights = weights_of()
    right, optimizer, scaler = Right("AdamW", weights), optimizer_of("AdamW", weights, fused), LossScaler("cpu")
    gradients = random_gradients(weights)
    backward(scaler, weights, gradients)
    scaler.unscale_(optimizer)
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient)
        weight.grad.mul_(2)
    norm = right.step([2 * gradient for gradient in gradients], max_norm=max_norm)
    result = scaler.step(optimizer, max_norm=max_norm)
    torch.testing.assert_close(result.total_norm.double(), norm / 2 if max_norm is None else norm, rtol=1e-6, atol=0)
    assert_close_to(right, weights)


@fused_or_not
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_not_finite_before_or_after_unscaling(fused: bool, max_norm: float | None, when: str) -> None:
    weights = weights_of()
    before = [weight.detach().clone() for weight in weights]
    optimizer, scaler = optimizer_of("AdamW", weights, fused), LossScaler("cpu")
    gradients = random_gradients(weights)
    if when == "before":
        gradients[2][5] = math.nan
    backward(scaler, weights, gradients)
    scaler.unscale_(optimizer)
    if when == "before":
        weights[2].grad[5] = 0.0  # what unscale_ found counts, as in torch
    elif max_norm is not None:
        weights[2].grad[5] = math.nan
    result = scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    is_found = when == "before" or max_norm is not None
    assert bool(result) != is_found
    assert scaler.get_scale() == (4096 if is_found else 8192)
    assert torch.equal(weights[0], before[0]) == is_found


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("value", [0.25, math.inf], ids=["finite", "inf"])
def test_only_the_optimizer_writes_gradients(name: str, value: float) -> None:
    weights = weights_of()
    optimizer, scaler = optimizer_of(name, weights, True), LossScaler("cpu")
    gradients = random_gradients(weights)
    gradients[0][0, 0] = value
    backward(scaler, weights, gradients)
    scaled = [weight.grad.clone() for weight in weights]
    seen: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([weight.grad.clone() for weight in weights]))
    result = scaler.step(optimizer, max_norm=0.5)
    torch.testing.assert_close(seen, [scaled], rtol=0, atol=0)
    factor = 0.5 / (result.total_norm + 1e-6) if value == 0.25 else 8192
    torch.testing.assert_close([weight.grad for weight in weights], [factor * gradient for gradient in gradients])


@fused_or_not
def test_a_skipped_first_step_leaves_momentum_alone(fused: bool) -> None:
    weights = weights_of()
    right = Right("SGD-nesterov", weights)
    optimizer, scaler = optimizer_of("SGD-nesterov", weights, fused), LossScaler("cpu")
    for size in (math.inf, math.nan, 1.0, 1.0, math.inf, 1.0):
        gradients = random_gradients(weights, size)
        backward(scaler, weights, gradients)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if size == 1:
            right.step(gradients)
    assert_close_to(right, weights)


def test_attributes_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of()
    optimizer, scaler = optimizer_of("AdamW", weights, True), LossScaler("cpu")
    backward(scaler, weights, random_gradients(weights))
    scaler.step(optimizer)
    scaler.update()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    monkeypatch.setattr(optimizer, "step", lambda: [][0])
    with pytest.raises(IndexError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_a_scale_that_is_there_already_is_multiplied_in(unscaled: bool, max_norm: float | None) -> None:
    weights = weights_of()
    right, optimizer, scaler = Right("AdamW", weights), optimizer_of("AdamW", weights, True), LossScaler("cpu")
    gradients = random_gradients(weights)
    backward(scaler, weights, gradients)
    if unscaled:
        scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(optimizer, max_norm=max_norm)
    right.step([gradient / 4 for gradient in gradients], max_norm=max_norm)
    assert_close_to(right, weights)
