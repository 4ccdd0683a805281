"""Activations are bounded with the gradient asked for, and what was clipped is counted."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from dsaccel.amp import ActivationClip, clip_activations
from dsaccel.amp.activations import _StraightThroughClamp

VALUES = [-math.inf, -1e30, -3.5, -3.0, -1.0, 0.0, 2.999, 3.0, 3.001, 1e30, math.inf, math.nan]


@pytest.mark.parametrize("gradient", ["true", "straight_through"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_and_gradients(gradient: str, dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES, dtype=dtype, requires_grad=True)
    y = ActivationClip(gradient=gradient)(x)
    exact = [value if math.isnan(value) else max(-3.0, min(3.0, value)) for value in x.tolist()]
    torch.testing.assert_close(y, torch.tensor(exact, dtype=dtype), rtol=0, atol=0, equal_nan=True)
    upstream = torch.arange(1.0, len(VALUES) + 1, dtype=dtype)
    y.backward(upstream)
    passes = torch.tensor([gradient != "true" or abs(value) < 3 for value in x.tolist()])
    # At a bound itself the gradient of torch.clamp depends on torch's version.
    compared = ~x.isnan() if gradient != "true" else ~x.isnan() & (x.abs() != 3)
    assert torch.equal(x.grad[compared], (upstream * passes)[compared])


def test_counts_what_it_clips() -> None:
    clip = ActivationClip(2.0)
    assert math.isnan(clip.clipped_fraction)
    clip(torch.tensor([-5.0, 2.0, 1.0, 2.5]))
    clip(torch.zeros(4, 3))
    assert clip.counts.tolist() == [16, 2]
    assert clip.clipped_fraction == 2 / 16
    assert clip.eval()(torch.tensor([9.0])).item() == 2
    clip.reset()
    assert clip.counts.tolist() == [0, 0]
    clip(torch.zeros(0))
    assert math.isnan(clip.clipped_fraction)
    assert list(clip.state_dict()) == []
    assert repr(clip) == "ActivationClip(2.0, gradient='true')"
    assert clip.half().counts.dtype == torch.int64


def test_counts_follow_the_input() -> None:
    clip = ActivationClip()
    assert clip(torch.zeros(2, device="meta")).is_meta
    assert clip.counts.is_meta


@pytest.mark.parametrize("gradient", ["true", "straight_through"])
def test_compiles_whole(gradient: str) -> None:
    clip = ActivationClip(gradient=gradient)
    compiled = torch.compile(clip, fullgraph=True, backend="aot_eager")
    x = (torch.randn(40) * 4).requires_grad_()
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(40) if gradient == "straight_through" else (x.abs() <= 3).float())
    assert clip.counts.tolist() == [40, int((x.abs() > 3).sum())]


def test_straight_through_under_vmap() -> None:
    # Without the counts, which torch.func cannot change from within.
    x = torch.randn(4, 5) * 4
    per_row = torch.func.grad(lambda row: _StraightThroughClamp.apply(row, 3.0).square().sum())
    torch.testing.assert_close(torch.func.vmap(per_row)(x), 2 * x.clamp(-3, 3))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Sigmoid(), nn.SiLU())


def test_model_is_bounded_behind_its_activations() -> None:
    plain = model()
    bounded = copy.deepcopy(plain)
    report = clip_activations(bounded, 0.2, filter=lambda name, module: name != "5")
    assert list(report.clips) == ["1", "3"]
    x = torch.randn(6, 4)
    a = plain[1](plain[0](x))
    b = plain[3](plain[2](a.clamp(-0.2, 0.2)))
    assert torch.equal(bounded(x), plain[5](plain[4](b.clamp(-0.2, 0.2))))
    fractions = {"1": (a.abs() > 0.2).float().mean().item(), "3": (b.abs() > 0.2).float().mean().item()}
    assert report.fractions() == pytest.approx(fractions)
    assert all(fractions.values())
    assert str(report).splitlines()[:2] == ["2 activations bounded", f"  1: {fractions['1']:.2%} clipped"]
    assert list(bounded.state_dict()) == list(plain.state_dict())
    report.reset()
    assert all(math.isnan(part) for part in report.fractions().values())
    report.remove()
    assert torch.equal(bounded(x), plain(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_bounded_and_count_for_themselves(copied) -> None:
    bounded = model()
    report = clip_activations(bounded, 0.1, gradient="straight_through")
    other = copied(bounded)
    x = torch.randn(6, 4)
    out = other(x)
    assert all(math.isnan(part) for part in report.fractions().values())
    assert torch.equal(bounded(x), out)


def test_bounded_model_compiles_whole() -> None:
    bounded = model()
    report = clip_activations(bounded, 0.2)
    x = torch.randn(6, 4)
    expected = bounded(x)
    counts = [clip.counts.tolist() for clip in report.clips.values()]
    report.reset()
    torch.testing.assert_close(torch.compile(bounded, fullgraph=True, backend="aot_eager")(x), expected)
    assert [clip.counts.tolist() for clip in report.clips.values()] == counts


def test_other_modules_can_be_named() -> None:
    bounded = model()
    clip_activations(bounded, 0.1, modules=(nn.Linear,))
    assert bounded[0](torch.randn(3, 4)).abs().max() <= 0.1


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan, "3", True], ids=str)
def test_limit_must_be_positive(limit) -> None:
    for make in (ActivationClip, lambda limit: clip_activations(model(), limit)):
        with pytest.raises(ValueError, match="limit: expected a positive finite number, got"):
            make(limit)


def test_other_errors() -> None:
    with pytest.raises(ValueError, match="gradient: expected one of 'true', 'straight_through', got 'none'"):
        ActivationClip(gradient="none")
    with pytest.raises(ValueError, match=r"modules: expected classes that occur in the model .*, got Tanh"):
        clip_activations(model(), modules=(nn.Tanh,))
    with pytest.raises(ValueError, match=r"modules: expected classes .*, got none"):
        clip_activations(model(), modules=())
    with pytest.raises(ValueError, match="modules: expected classes that occur in the model and pass the filter"):
        clip_activations(model(), filter=lambda name, module: False)
