"""Accumulated gradients are those of the full batch, on one process and on two."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.amp import accumulate
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

WORKER = Path(__file__).with_name("accumulation_worker.py")
spec = importlib.util.spec_from_file_location("accumulation_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def full_batch_gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of the mean over all tokens, from one batch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    return gradients(model)


def assert_equal_gradients(got: list[Tensor], model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    exact = full_batch_gradients(model.double(), batches)
    plain = full_batch_gradients(model.float(), batches)
    for index, (result, expected, theirs) in enumerate(zip(got, exact, plain, strict=True)):
        # A bias before a softmax has gradients that cancel: their rounding is that of the terms.
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-7, msg=f"gradient {index}")
        if index < 3:
            assert_close_to_reference(result, expected, theirs, f"gradient {index}")


@pytest.mark.parametrize(("total", "k"), [(4, 4), (5, 3), (7, 4), (2, 3), (3, 1), (0, 2)])
def test_windows(total: int, k: int) -> None:
    seen = list(accumulate(range(total), k))
    assert [micro.batch for micro in seen] == list(range(total))
    assert [micro.index for micro in seen] == [i % k for i in range(total)]
    counts = [min(k, total - i // k * k) for i in range(total)]
    assert [micro.count for micro in seen] == counts
    assert [micro.mean_factor for micro in seen] == [1 / count for count in counts]
    assert [micro.sum_factor for micro in seen] == [1 / count for count in counts]
    assert [micro.last for micro in seen] == [i % k == k - 1 or i == total - 1 for i in range(total)]


@pytest.mark.parametrize("windows", [(0, 4), (4, 6)], ids=["whole", "short"])
def test_mean_of_means_in_a_short_window_too(windows: tuple[int, int]) -> None:
    model = nn.Linear(5, 1)
    x, y = torch.randn(6, 8, 5), torch.randn(6, 8, 1)
    for micro in accumulate(zip(x, y, strict=True), 4):
        loss = F.mse_loss(model(micro.batch[0]), micro.batch[1])
        (loss * micro.mean_factor).backward()
        if micro.last:
            if micro.count == windows[1] - windows[0]:
                result = gradients(model)
            model.zero_grad()
    x, y = x[slice(*windows)].flatten(0, 1), y[slice(*windows)].flatten(0, 1)
    F.mse_loss(model(x), y).backward()
    torch.testing.assert_close(result, gradients(model))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_weighted_mean_is_that_of_all_tokens(reduction: str) -> None:
    model = worker.make_model()
    batches = worker.make_batches(0, 5)
    if reduction == "mean":
        del batches[1]  # the mean over no token is NaN
    checked = 0
    for micro in accumulate(batches, 3, weight=worker.tokens):
        x, y = micro.batch
        factor = micro.sum_factor if reduction == "sum" else micro.mean_factor
        (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction) * factor).backward()
        if micro.last:
            window = batches[checked : checked + micro.count]
            assert_equal_gradients(gradients(model), model, window)
            checked += micro.count
            model.zero_grad()
    assert checked == len(batches)


def test_window_that_weighs_nothing_has_zero_gradients() -> None:
    model = worker.make_model()
    batches = [(torch.zeros(1, 2).long(), torch.full((1, 2), -100))] * 2
    for micro in accumulate(batches, 2, weight=worker.tokens):
        assert micro.sum_factor == micro.mean_factor == 0
        (worker.summed_loss(model, micro.batch) * micro.sum_factor).backward()
    assert all(grad.eq(0).all() for grad in gradients(model))


def test_batches_are_neither_read_ahead_nor_kept() -> None:
    read: list[int] = []

    def source() -> Iterator[Tensor]:
        for index in range(5):
            read.append(index)
            yield torch.full((2,), index)

    micros = accumulate(source(), 2)
    assert read == []
    first = next(micros)
    assert read == [0, 1]
    batch = weakref.ref(first.batch)
    del first
    assert batch() is None
    assert next(micros).last
    assert read == [0, 1]
    assert not next(micros).last
    assert read == [0, 1, 2, 3]


def test_with_a_grad_scaler_one_bad_microbatch_skips_the_window() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(8, 4, 3)
    x[1, 0, 0] = torch.nan
    plain = copy.deepcopy(model)
    scales = []
    for micro in accumulate(x, 3):
        scaler.scale(model(micro.batch).square().mean() * micro.mean_factor).backward()
        if micro.last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales == [512.0, 512.0, 512.0]
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    for window in (x[3:6], x[6:]):
        plain(window).square().mean().backward()
        steps.step()
        steps.zero_grad()
    torch.testing.assert_close(model.weight, plain.weight)


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []


class WithNoSync(Recorder):
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.log.append("off")
        yield
        self.log.append("on")


class WithSwitch(Recorder):
    def set_requires_gradient_sync(self, value: bool) -> None:
        self.log.append("on" if value else "off")


@pytest.mark.parametrize("kind", [WithNoSync, WithSwitch])
def test_sync_is_off_but_for_the_last(kind: type[Recorder]) -> None:
    model = kind()
    for micro in accumulate("abcde", 3, model=model):
        with micro.sync():
            model.log.append(micro.batch)
    assert " ".join(model.log) == "off a on off b on c off d on e"


def test_switch_is_on_again_after_an_error() -> None:
    model = WithSwitch()
    micro = next(accumulate("ab", 2, model=model))
    with pytest.raises(RuntimeError, match="failed"), micro.sync():
        raise RuntimeError("failed")
    assert model.log == ["off", "on"]


@pytest.mark.parametrize("model", [None, nn.Linear(2, 2)], ids=["none", "plain"])
def test_one_process_has_nothing_to_sync(model: nn.Module | None) -> None:
    for micro in accumulate("abc", 2, model=model, weight=lambda batch: 2):
        with micro.sync():
            assert micro.sum_factor == 1 / (2 * micro.count)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("gloo")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", ["ddp", "ddp-group", "ddp-always", "fsdp"])
def test_two_processes_have_the_gradients_of_the_full_batch(two_processes: list[dict], kind: str) -> None:
    batches = [worker.make_batches(rank, 5) for rank in range(2)]
    for window, part in enumerate((slice(0, 3), slice(3, 5))):
        full = [batch for own in batches for batch in own[part]]
        for results in two_processes:
            assert_equal_gradients(results[kind][window]["grads"], worker.make_model(), full)


@pytest.mark.parametrize(
    ("kind", "exchanges"), [("ddp", [1, 2]), ("ddp-group", [1, 2]), ("ddp-always", [3, 5]), ("fsdp", [0, 0])]
)
def test_gradients_are_exchanged_once_a_window(two_processes: list[dict], kind: str, exchanges: list[int]) -> None:
    """All-reduces so far after each window; for fsdp, microbatches but the last that had exchanged gradients."""
    for results in two_processes:
        assert [window["exchanges"] for window in results[kind]] == exchanges


@pytest.mark.parametrize(
    ("kind", "k", "message"),
    [
        (TypeError, 2.0, "k: expected an integer, got 2.0"),
        (TypeError, True, "k: expected an integer, got True"),
        (ValueError, 0, "k: expected at least 1, got 0"),
    ],
)
def test_k_is_checked_at_once(kind: type, k: object, message: str) -> None:
    with pytest.raises(kind, match=message):
        accumulate([1, 2], k)


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), "3", torch.tensor(-2.0)], ids=str)
def test_weights_must_be_finite_and_not_negative(weight: object) -> None:
    with pytest.raises(ValueError, match="weight: expected a finite number that is not negative for each microbatch"):
        next(accumulate([1, 2], 2, weight=lambda batch: weight))
