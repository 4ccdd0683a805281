"""LossScaler on a GPU: the values of the CPU, and no waiting."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch

from dsaccel.amp import LossScaler

pytestmark = pytest.mark.gpu


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_folded_steps_do_not_wait(
    kind: type[torch.optim.Optimizer], max_norm: float | None, waiting_is_an_error: None
) -> None:
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((50, 7), (3,))]
    on_gpu = [torch.nn.Parameter(weight.detach().cuda()) for weight in weights]
    gradients = [[torch.randn_like(weight) for weight in weights] for _ in range(4)]
    gradients[2][0][3] = math.nan
    there = [[gradient.cuda() for gradient in each] for each in gradients]
    scaler, right = LossScaler("cuda"), LossScaler("cpu")
    optimizer, wanted = kind(on_gpu, lr=0.1, fused=True), kind(weights, lr=0.1)
    for step in range(4):
        for each, parameters, own in ((scaler, on_gpu, there[step]), (right, weights, gradients[step])):
            each.scale(sum((a * b).sum() for a, b in zip(parameters, own, strict=True))).backward()
        right.step(wanted, max_norm=max_norm)
        right.update()
        wanted.zero_grad()
        # In the first step torch's fused optimizer is tried out.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        result = scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
        assert bool(result) == (step != 2)
    assert scaler.state_dict() == right.state_dict()
    torch.testing.assert_close([weight.cpu() for weight in on_gpu], weights, rtol=1e-5, atol=1e-5)


def test_float16_parameters_and_gradients() -> None:
    weights = [torch.nn.Parameter(torch.randn(50, 7, device="cuda", dtype=torch.float16))]
    right = copy.deepcopy([weight.detach().double() for weight in weights])
    gradient = torch.randn_like(weights[0])
    optimizer, scaler = torch.optim.SGD(weights, lr=0.5, fused=True), LossScaler("cuda")
    scaler.scale((weights[0] * gradient).sum()).backward()
    assert scaler.step(optimizer, max_norm=2.0)
    right[0] -= 0.5 * gradient.double() * 2.0 / gradient.double().norm()
    torch.testing.assert_close(weights[0].double(), right[0], rtol=2e-3, atol=2e-3)
