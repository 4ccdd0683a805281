"""The learning rate range test: what it finds, and that it leaves no trace however it ends."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dsaccel.amp import LossScaler
from dsaccel.optim import LRRangeResult, lr_range_test

pytestmark = pytest.mark.usefixtures("one_thread")


class Awkward(nn.Module):
    """Dropout, running statistics, a buffer that is replaced, a tied and a frozen parameter, a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm, self.dropout, self.still = nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.still.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = self.norm(self.second(self.dropout(self.first(x))))
        return self.still(x + self.frozen + random.random() + np.random.rand())  # noqa: NPY002


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adam, rates in tensors": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-3)),
}


class Session:
    """A training that has begun."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        self.model = Awkward()
        biases = [p for name, p in self.model.named_parameters() if name.endswith("bias")]
        rest = [p for p in self.model.parameters() if p.requires_grad and not any(p is bias for bias in biases)]
        self.optimizer = make([{"params": rest}, {"params": biases, "weight_decay": 0.1}])
        self.scaler = LossScaler("cpu")
        data = TensorDataset(torch.randn(40, 6), torch.randn(40, 6))
        generator = torch.Generator().manual_seed(2)
        self.loader = DataLoader(data, 8, shuffle=True, generator=generator)
        self.train(4)

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        while len(losses) < steps:
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = loss_of(self.model, batch)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer, max_norm=1.0)
                self.scaler.update()
                losses.append(loss.item())
        return losses

    def test(self, loss_fn: Callable[..., Tensor] = loss_of, **options: Any) -> LRRangeResult:
        options = {"steps": 12, "scaler": self.scaler, "max_norm": 1.0, **options}
        return lr_range_test(self.model, self.optimizer, loss_fn, self.loader, **options)

    def everything(self) -> dict[str, Any]:
        """All that may change: every value, and the identity of every tensor."""
        tensors: dict[str, Any] = {}
        for name, x in [*self.model.named_parameters(), *self.model.named_buffers()]:
            tensors[name], tensors[f"{name}.grad"] = x, x.grad
        for index, group in enumerate(self.optimizer.param_groups):
            tensors.update({f"group {index} {key}": value for key, value in group.items() if key != "params"})
            for place, parameter in enumerate(group["params"]):
                state = self.optimizer.state.get(parameter, {})
                tensors.update({f"state {index} {place} {key}": value for key, value in state.items()})
        tensors.update({f"scaler {key}": value for key, value in self.scaler.state_dict().items()})
        tensors["modes"] = [module.training for module in self.model.modules()]
        tensors["random"] = [random.getstate(), torch.get_rng_state(), self.loader.generator.get_state()]
        tensors["NumPy"] = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]  # noqa: NPY002
        return {name: (id(x), copy.deepcopy(x.detach())) if isinstance(x, Tensor) else x for name, x in tensors.items()}


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_same(found[key], expected[key])
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(found, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def failing_at(step: int, error: BaseException) -> Callable[..., Tensor]:
    count = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        loss = loss_of(model, batch)
        if count == step:
            raise error
        return loss

    return loss_fn


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_nothing_changes_and_training_goes_on_as_without_it(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    undisturbed = Session(make).train(10)
    session = Session(make)
    before = session.everything()
    result = session.test()
    assert len(result.losses) == 12
    assert_same(session.everything(), before)
    assert session.train(10) == undisturbed


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_exceptions_leave_no_trace(step: int, error: BaseException) -> None:
    session = Session(OPTIMIZERS["AdamW"])
    before = session.everything()
    with pytest.raises(type(error)):
        session.test(failing_at(step, error))
    assert_same(session.everything(), before)


def test_before_the_first_step_there_is_no_state_afterwards() -> None:
    model = nn.Linear(3, 1)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), LossScaler("cpu")
    batches = [(torch.randn(4, 3), torch.randn(4, 1))]
    lr_range_test(model, optimizer, loss_of, batches, steps=5, scaler=scaler)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert vars(scaler)["_scale"] is None
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_modes_that_a_loss_changes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model.train(not model.training)(batch).square().mean()

    model.eval()
    lr_range_test(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, [torch.randn(2, 3)], steps=3)
    assert not any(module.training for module in model.modules())


class Counting:
    """Batches with a position, as of a sampler that can be resumed; it gives its own list away as its state."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.drawn.append(len(self.drawn))
            yield torch.full((2, 3), float(len(self.drawn)))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = list(state["drawn"])


def test_positions_of_samplers_are_restored() -> None:
    model, batches, sampler = nn.Linear(3, 1), Counting(), Counting()
    next(iter(batches))
    next(iter(sampler))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch + next(iter(sampler))).square().mean()

    lr_range_test(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batches, sampler=sampler, steps=4)
    assert batches.drawn == sampler.drawn == [0]


def quadratic() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]:
    """``w^2 / 2``, for which gradient descent diverges from a rate of 2 on."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), lambda model, batch: model.weight.square().sum() / 2


def test_rates_and_losses_are_those_of_training_with_them() -> None:
    model, optimizer, loss_fn = quadratic()
    result = lr_range_test(model, optimizer, loss_fn, [None], lowest=0.01, highest=1.0, steps=21, smoothing=0)
    assert result.rates == pytest.approx([0.01 * 100 ** (step / 20) for step in range(21)])
    weight, losses = 1.0, []
    for rate in result.rates:
        losses.append(weight**2 / 2)
        weight *= 1 - rate
    assert result.losses == result.smoothed == pytest.approx(losses, rel=1e-5)
    assert result.diverged_at is None
    slopes = [(losses[i + 1] - losses[i - 1]) for i in range(1, 20)]
    assert result.suggestion == result.rates[1 + slopes.index(min(slopes))]


def test_divergence_is_found_beyond_where_it_begins() -> None:
    model, optimizer, loss_fn = quadratic()
    result = lr_range_test(model, optimizer, loss_fn, [None], lowest=1e-3, highest=1e3, steps=200, smoothing=0.5)
    assert result.diverged_at is not None
    # On the way the loss fell to next to nothing, from which it takes some steps to return.
    assert 2 < result.diverged_at < 10
    assert result.rates[-1] == result.diverged_at
    assert result.suggestion is not None
    assert 0.01 < result.suggestion < 1
    assert "diverged at" in str(result)


def test_smoothing_weighs_both_sides_and_caps_what_explodes() -> None:
    losses = iter([4.0, math.nan, 2.0, 1.0, 1e30])
    model, optimizer, _ = quadratic()
    weight = model.weight
    result = lr_range_test(
        model, optimizer, lambda model, batch: 0 * weight.sum() + next(losses), [None], steps=5, smoothing=0.5
    )
    assert math.isnan(result.losses[1])
    assert math.isnan(result.smoothed[1])
    # 1e30 counts as 4, the highest of the losses on the way down.
    values = {0: 4.0, 2: 2.0, 3: 1.0, 4: 4.0}
    for i in values:
        weights = {j: 0.5 ** abs(i - j) for j in values}
        expected = sum(weights[j] * values[j] for j in values) / sum(weights.values())
        assert result.smoothed[i] == pytest.approx(expected, rel=1e-6)
    assert result.diverged_at == result.rates[4]


@pytest.mark.parametrize(
    ("losses", "steps", "diverged"),
    [
        ([1, math.nan, math.inf, 1, 1], 5, None),
        ([1, math.nan, math.inf, -math.inf, 1], 4, 1),
        ([1, 1, 1, 1, math.nan], 5, 4),
        ([math.nan] * 5, 3, 0),
        ([-1, -2, -3, -4, -3.9], 5, None),
        ([-4, -4, 20, 20, 20], 3, 2),
    ],
)
def test_losses_that_are_not_finite(losses: list[float], steps: int, diverged: int | None) -> None:
    model, optimizer, _ = quadratic()
    following = iter(losses)

    def loss_fn(model: nn.Module, batch: None) -> Tensor:
        value = next(following)
        # The weight would take over what is not finite, were it stepped on.
        return value + model.weight.sum() * (1.0 if math.isfinite(value) else value) * 0.001

    result = lr_range_test(model, optimizer, loss_fn, [None], highest=1e-3, steps=5, smoothing=0.1)
    assert len(result.losses) == steps
    assert [math.isfinite(x) for x in result.losses] == [math.isfinite(x) for x in losses[:steps]]
    assert result.diverged_at == (None if diverged is None else result.rates[diverged])


def test_a_loss_that_only_rises_has_no_suggestion() -> None:
    model, optimizer, loss_fn = quadratic()
    for group in optimizer.param_groups:
        group["maximize"] = True
    result = lr_range_test(model, optimizer, loss_fn, [None], lowest=1e-3, highest=1, steps=20)
    assert result.suggestion is None
    assert "never falls" in str(result)


def test_groups_keep_their_ratio() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    model = nn.ParameterList(weights)
    optimizer = torch.optim.SGD([{"params": [w], "lr": lr} for w, lr in zip(weights, (0.3, 0.1), strict=True)])
    seen = []

    def loss_fn(model: nn.Module, batch: None) -> Tensor:
        seen.append([group["lr"] for group in optimizer.param_groups])
        return sum(w.sum() for w in weights)  # type: ignore[return-value]

    result = lr_range_test(model, optimizer, loss_fn, [None], lowest=0.01, highest=1.0, steps=3)
    assert seen == [[rate, rate * (0.1 / 0.3)] for rate in result.rates]
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1]


def test_gradients_taken_by_the_caller() -> None:
    model, optimizer, loss_fn = quadratic()
    expected = lr_range_test(model, optimizer, loss_fn, [None], lowest=0.01, highest=1.0, steps=9)

    def with_backward(model: nn.Module, batch: None) -> Tensor:
        loss = loss_fn(model, batch)
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
        return loss.detach()

    found = lr_range_test(model, optimizer, with_backward, [None], lowest=0.01, highest=1.0, steps=9, backward=False)
    assert found == expected


def test_clipping_is_part_of_it() -> None:
    model, optimizer, loss_fn = quadratic()
    result = lr_range_test(model, optimizer, loss_fn, [None], lowest=0.1, highest=0.2, steps=2, max_norm=0.5)
    # The gradient is 1, and clipped to 0.5.
    assert result.losses[1] == pytest.approx((1 - 0.1 * 0.5) ** 2 / 2, rel=1e-5)


def test_plot(tmp_path: Path) -> None:
    model, optimizer, loss_fn = quadratic()
    result = lr_range_test(model, optimizer, loss_fn, [None], lowest=1e-3, highest=1e3, steps=100)
    result.plot(tmp_path / "range.png")
    assert (tmp_path / "range.png").read_bytes().startswith(b"\x89PNG")
    nothing = LRRangeResult((1.0,), (math.nan,), (math.nan,), None, 1.0)
    nothing.plot(tmp_path / "nothing.svg")


def test_plot_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dskernels\[accel\]'"):
        LRRangeResult((1.0,), (1.0,), (1.0,), None, None).plot(tmp_path / "range.png")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lowest": 0}, ValueError, r"lowest and highest: expected 0 < lowest < highest < inf, got \(0, 10.0\)"),
        ({"lowest": 1, "highest": 1}, ValueError, "lowest and highest: expected"),
        ({"highest": "1"}, TypeError, r"highest: expected a number, got '1' \(str\)"),
        ({"steps": 1}, ValueError, "steps: expected at least 2, got 1"),
        ({"steps": 2.5}, TypeError, "steps: expected an integer, got 2.5"),
        ({"smoothing": 1}, ValueError, "smoothing: expected a number from 0 to below 1, got 1"),
        ({"diverges_at": 1}, ValueError, "diverges_at: expected a number above 1, got 1"),
        ({"optimizer": "SGD"}, TypeError, "optimizer: expected a torch.optim.Optimizer, got 'SGD'"),
        ({"batches": []}, ValueError, "batches: expected 100, or what can be started over .*, got 0 from list"),
        ({"batches": iter([None] * 7)}, ValueError, "batches: expected 100, .* got 7 from list_iterator"),
        ({"loss_fn": lambda model, batch: 1.0}, TypeError, "loss_fn: expected a function that gives a scalar tensor"),
        ({"loss_fn": lambda model, batch: torch.ones(2)}, TypeError, "loss_fn: expected .* got a tensor of shape"),
        (
            {"scaler": torch.amp.GradScaler("cpu"), "max_norm": 1.0},
            TypeError,
            "scaler: expected a LossScaler with max_norm",
        ),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], message: str) -> None:
    model, optimizer, loss_fn = quadratic()
    arguments: dict[str, Any] = {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batches": [None]}
    with pytest.raises(error, match=message):
        lr_range_test(**{**arguments, **change})
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.gpu
def test_nothing_changes_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), LossScaler("cuda")
    batches = [tuple(torch.randn(16, n, device="cuda") for n in (8, 1)) for _ in range(3)]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return loss_of(model, batch)

    before, drawn = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    result = lr_range_test(model, optimizer, loss_fn, batches, steps=20, scaler=scaler, max_norm=1.0)
    assert math.isfinite(result.losses[0])
    assert_same(dict(model.state_dict()), dict(before))
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    assert not optimizer.state
