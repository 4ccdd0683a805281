"""When LossScaler folds and when not: optimizers of others, options, and a torch that does not do what it did."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from dsaccel.amp import LossScaler, _fold

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Adagrad], ids=lambda kind: kind.__name__)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def fresh_check() -> Iterator[None]:
    """The trial of torch's optimizers has not taken place yet, and does not last."""
    _fold._follows.cache_clear()
    yield
    _fold._follows.cache_clear()


def weights_with_gradients(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    weights = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((5, 7), (3,))]
    gradients = [torch.randn_like(weight) for weight in weights]
    return weights, gradients


def scaled_backward(scaler: LossScaler, weights: list[Tensor], gradients: list[Tensor]) -> None:
    scaler.scale(sum((weight * gradient).sum() for weight, gradient in zip(weights, gradients, strict=True))).backward()


def after_sgd(weights: list[Tensor], gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    """One step with learning rate 1, by hand."""
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    return [weight.detach() - factor * gradient for weight, gradient in zip(weights, gradients, strict=True)]


@CLASSES
def test_torchs_fused_optimizers_fold(kind: type[Optimizer], fresh_check: None) -> None:
    weights, gradients = weights_with_gradients()
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    assert not _fold.folds(kind(weights))
    optimizer = kind(weights, fused=True)
    # torch 2.11's Adagrad does not say that it does, so GradScaler does not rely on it either.
    assert _fold.folds(optimizer) == (kind is not Adagrad or hasattr(optimizer, "_step_supports_amp_scaling"))


@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_trial_tells_right_from_wrong(kind: type[Optimizer], dtype: torch.dtype, fresh_check: None) -> None:
    # torch's fused SGD left all but the last few elements of half-precision tensors on the CPU alone until 2.13.
    is_right = kind is not SGD or dtype.itemsize > 2 or TORCH >= (2, 14)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [_fold._follows(kind, "cpu", dtype) for _ in range(2)] == [is_right] * 2
    messages = [str(warning.message) for warning in caught if "gives wrong values" in str(warning.message)]
    assert len(messages) == (0 if is_right else 1)


@CLASSES
def test_the_trial_would_notice_an_ignored_divisor(kind: type[Optimizer]) -> None:
    small, large = (_fold._parameter_after_a_step(kind, "cpu", torch.float32, gradient=size) for size in (0.5, 8.0))
    assert ((large - small).abs() > 0.05 * small.abs()).all()


def _ignores_the_divisor(*_: Any, gradient: float, divisor: float | None = None, found_inf: float = 0.0) -> Tensor:
    return torch.ones(4) - (0 if found_inf else gradient)


def _ignores_the_flag(*_: Any, gradient: float, divisor: float | None = None, found_inf: float = 0.0) -> Tensor:
    return torch.ones(4) - gradient / (divisor or 1)


def _raises(*_: Any, gradient: float, divisor: float | None = None, found_inf: float = 0.0) -> Tensor:
    raise AssertionError("Expected grad_scale and found_inf to be None")


@pytest.mark.parametrize("trial", [_ignores_the_divisor, _ignores_the_flag, _raises])
@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "short"])
def test_where_torch_does_otherwise_there_are_two_passes(
    trial: Callable[..., Tensor], max_norm: float, fresh_check: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fold, "_parameter_after_a_step", trial)
    weights, gradients = weights_with_gradients()
    wanted = after_sgd(weights, gradients, max_norm)
    optimizer, scaler = SGD(weights, lr=1.0, fused=True), LossScaler("cpu")
    scaled_backward(scaler, weights, gradients)
    with pytest.warns(UserWarning, match=r"SGD\(fused=True\) of torch .* gives wrong values for torch.float32"):
        result = scaler.step(optimizer, max_norm=max_norm)
    assert result.stepped is True
    torch.testing.assert_close([weight.detach() for weight in weights], wanted)
    scaler.update()
    weights[0].grad[0, 0] = torch.inf
    result = scaler.step(optimizer, max_norm=max_norm)
    assert result.stepped is False
    torch.testing.assert_close([weight.detach() for weight in weights], wanted)


def test_options_of_a_checkpoint_that_was_not_fused() -> None:
    weights, gradients = weights_with_gradients()
    wanted = after_sgd(weights, gradients, 0.5)
    optimizer, scaler = SGD(weights, lr=1.0, fused=True), LossScaler("cpu")
    optimizer.load_state_dict(SGD(weights, lr=1.0).state_dict())
    scaled_backward(scaler, weights, gradients)
    assert scaler.step(optimizer, max_norm=0.5).stepped is True
    torch.testing.assert_close([weight.detach() for weight in weights], wanted)


class OwnSGD(Optimizer):
    """Somebody's optimizer that divides by itself, by torch's convention."""

    _step_supports_amp_scaling = True

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> str:
        for group in self.param_groups:
            for weight in group["params"]:
                if not self.found_inf:
                    weight -= weight.grad / self.grad_scale
        return "stepped"


class OldSGD(OwnSGD):
    """The same by an older convention of torch, in which it asks the scaler."""

    @torch.no_grad()
    def step(self, closure: None = None, *, grad_scaler: Any = None) -> str:
        if grad_scaler is not None:
            raise AssertionError("grad_scaler: expected none for gradients that are unscaled")
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= weight.grad
        return "stepped"


class SparedSGD(SGD):
    """A subclass of one of torch's."""


@pytest.mark.parametrize(
    ("make", "is_folded"),
    [
        pytest.param(OwnSGD, True, id="own"),
        pytest.param(OldSGD, False, id="old"),
        pytest.param(lambda weights: SparedSGD(weights, lr=1.0, fused=True), True, id="subclass"),
    ],
)
def test_optimizers_of_others(make: Callable[[list[Tensor]], Optimizer], is_folded: bool) -> None:
    weights, gradients = weights_with_gradients()
    wanted = after_sgd(weights, gradients, 0.5)
    optimizer, scaler = make(weights), LossScaler("cpu")
    scaled_backward(scaler, weights, gradients)
    result = scaler.step(optimizer, max_norm=0.5)
    assert isinstance(result.stepped, Tensor) == is_folded
    assert result
    assert result.returned == ("stepped" if isinstance(optimizer, OwnSGD) else None)
    torch.testing.assert_close([weight.detach() for weight in weights], wanted)
    scaler.update()
    weights[1].grad[0] = torch.nan
    assert not scaler.step(optimizer, max_norm=0.5)
    torch.testing.assert_close([weight.detach() for weight in weights], wanted)


def test_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    tokens, factors = torch.tensor([1, 4, 1, 1, 7]), torch.randn(5, 3)
    dense = torch.zeros(10, 3).index_add(0, tokens, factors)
    wanted = after_sgd([embedding.weight], [dense], 0.5)
    scaler = LossScaler("cpu")
    optimizer = SGD(embedding.parameters(), lr=1.0)
    scaler.scale((embedding(tokens) * factors).sum()).backward()
    assert embedding.weight.grad.is_sparse
    result = scaler.step(optimizer, max_norm=0.5)
    torch.testing.assert_close(result.total_norm, dense.norm())
    torch.testing.assert_close([embedding.weight.detach()], wanted)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_model_under_float16_autocast_learns(fused: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer, scaler = AdamW(model.parameters(), lr=1e-2, fused=fused), LossScaler("cpu")
    x = torch.randn(64, 8)
    y = x[:, :1] * x[:, 1:2]
    losses, norms = [], []
    for _ in range(60):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        result = scaler.step(optimizer, max_norm=0.1)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(float(result.total_norm))
    assert max(norms) > 0.1, "nothing was clipped"
    assert losses[-1] < 0.5 * losses[0]
