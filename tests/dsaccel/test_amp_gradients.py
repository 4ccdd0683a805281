"""Gradients normalised by the square root of the number of workers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dsaccel.amp import normalise_gradients_


@pytest.mark.parametrize(("reduced", "factor"), [("mean", math.sqrt(5)), ("sum", 1 / math.sqrt(5))])
def test_factor(reduced: str, factor: float) -> None:
    parameters = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(9))]
    parameters[0].grad = torch.randn(3, 4)
    parameters[2].grad = torch.randn(18)[::2]
    before = [None if p.grad is None else p.grad.double() for p in parameters]
    # The same parameter twice counts once.
    assert normalise_gradients_([*parameters, parameters[0]], 5, reduced=reduced) == factor
    torch.testing.assert_close(parameters[0].grad, (before[0] * factor).float())
    torch.testing.assert_close(parameters[2].grad, (before[2] * factor).float())
    assert parameters[1].grad is None


def test_mean_and_sum_agree_and_keep_the_noise_of_one_worker() -> None:
    grads = torch.randn(16, 10000)
    results = {}
    for reduced in ("mean", "sum"):
        parameter = nn.Parameter(torch.zeros(10000))
        parameter.grad = getattr(grads, reduced)(0)
        normalise_gradients_(parameter, 16, reduced=reduced)
        results[reduced] = parameter.grad
    torch.testing.assert_close(results["mean"], results["sum"])
    assert results["sum"].std().item() == pytest.approx(1, rel=0.05)


def test_sparse_and_generators() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3, 1])).sum().backward()
    expected = embedding.weight.grad.to_dense() * 2
    normalise_gradients_(embedding.parameters(), 4)
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)


def test_one_worker_changes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, math.nan, 3.0])
    version = parameter.grad._version
    assert normalise_gradients_(parameter) == 1
    assert parameter.grad._version == version


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ValueError, {"workers": 0}, "workers: expected at least 1, got 0"),
        (TypeError, {"workers": 2.0}, "workers: expected an integer, got 2.0"),
        (ValueError, {"workers": 2, "reduced": "max"}, "reduced: expected one of 'mean', 'sum', got 'max'"),
    ],
    ids=["below-1", "float", "reduced"],
)
def test_errors_name_the_argument(kind: type, options: dict, message: str) -> None:
    with pytest.raises(kind, match=message):
        normalise_gradients_([], **options)
