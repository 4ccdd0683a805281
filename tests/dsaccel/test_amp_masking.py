"""random_mask hides what it says, as often as it says, and only in training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from dsaccel.amp import RandomMask, random_mask

GROUPS = {"element": (20, 50, 40), "token": (20, 50, 1), "feature": (20, 1, 40)}


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("p", [0.15, 0.5, 0.9])
@pytest.mark.parametrize(("per", "drawn"), GROUPS.items(), ids=GROUPS)
def test_masks_whole_groups_with_the_probability(per: str, drawn: tuple[int, ...], p: float) -> None:
    x = torch.rand(20, 50, 40) + 1
    y = random_mask(x, p, per=per, generator=generator())
    masked = y == 0
    assert torch.equal(y, x.masked_fill(masked, 0))
    groups = masked[tuple(slice(size) for size in drawn)]
    assert torch.equal(groups.expand_as(masked), masked)
    # Five standard deviations of a mean of that many draws.
    count = groups.numel()
    assert groups.float().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5)


def test_default_is_15_percent_of_the_elements_unscaled() -> None:
    x = torch.rand(100, 300) + 1
    y = random_mask(x)
    masked = y == 0
    assert masked.float().mean().item() == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / 30000) ** 0.5)
    assert torch.equal(y[~masked], x[~masked])


@pytest.mark.parametrize("per", GROUPS)
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_never_and_always(per: str, scale: bool) -> None:
    x = torch.randn(3, 4, 5)
    assert torch.equal(random_mask(x, 0, per=per, scale=scale), x)
    assert random_mask(x, 1, per=per, scale=scale, value=2.5).eq(2.5).all()


def test_scale_keeps_the_expectation() -> None:
    x = torch.rand(200, 300, dtype=torch.float64) + 1
    y = random_mask(x, 0.25, scale=True, generator=generator())
    masked = y == 0
    torch.testing.assert_close(y[~masked], x[~masked] / 0.75)
    assert y.mean().item() == pytest.approx(x.mean().item(), rel=0.02)


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_gradient_is_that_of_what_passes(scale: bool) -> None:
    x = torch.rand(30, 40).add(1).requires_grad_()
    y = random_mask(x, 0.3, scale=scale)
    y.sum().backward()
    factor = 1 / 0.7 if scale else 1.0
    torch.testing.assert_close(x.grad, (y != 0) * factor)


def test_token_ids_and_protected_ones() -> None:
    ids = torch.randint(5, 100, (64, 50))
    padding = torch.arange(50) >= torch.randint(1, 50, (64, 1))
    y = random_mask(ids, 0.4, value=3, protect=padding)
    assert y.dtype == torch.int64
    assert torch.equal(y[padding], ids[padding])
    masked = y == 3
    assert torch.equal(y[~masked], ids[~masked])
    free = int((~padding).sum())
    assert (masked.sum() / free).item() == pytest.approx(0.4, abs=5 * (0.24 / free) ** 0.5)


def test_protected_values_are_not_scaled() -> None:
    x = torch.rand(4, 6) + 1
    protect = torch.tensor([True, False, False, True, False, False])
    y = random_mask(x, 0.5, scale=True, protect=protect)
    assert torch.equal(y[:, protect], x[:, protect])
    assert torch.equal(random_mask(x, 1, scale=True, protect=protect), x * protect)


def test_same_generator_same_mask() -> None:
    x = torch.rand(9, 9) + 1
    first = random_mask(x, 0.5, generator=generator())
    torch.rand(7)
    assert torch.equal(first, random_mask(x, 0.5, generator=generator()))
    assert not torch.equal(first, random_mask(x, 0.5, generator=generator(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
def test_dtype_stays(dtype: torch.dtype) -> None:
    assert random_mask(torch.ones(4, 4, dtype=dtype), 0.5).dtype == dtype


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    assert random_mask(torch.zeros(shape)).shape == shape


def test_module_masks_in_training_only() -> None:
    module = RandomMask(0.5, per="token", value=-1.0, scale=True, generator=generator())
    x = torch.rand(6, 7, 3) + 1
    protect = torch.zeros(6, 7, 1, dtype=torch.bool)
    options = {"per": "token", "value": -1.0, "scale": True, "protect": protect}
    assert torch.equal(module(x, protect), random_mask(x, 0.5, **options, generator=generator()))
    assert module.eval()(x) is x
    assert list(module.state_dict()) == []
    assert repr(module) == "RandomMask(p=0.5, per='token', value=-1.0, scale=True)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_draw_the_same(copied) -> None:
    module = RandomMask(0.5, generator=generator())
    x = torch.ones(30)
    other = copied(module)
    assert torch.equal(module(x), other(x))


def test_compiles_whole() -> None:
    compiled = torch.compile(RandomMask(0.5, per="token"), fullgraph=True, backend="aot_eager")
    y = compiled(torch.ones(4, 50, 3))
    assert torch.equal(y, y[..., :1].expand_as(y))
    assert 0 < y.mean() < 1


x, ids = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
ERRORS = {
    "p": (ValueError, x, {"p": 1.1}, "p: expected a number from 0 to 1, got 1.1"),
    "p-nan": (ValueError, x, {"p": float("nan")}, "p: expected a number from 0 to 1, got nan"),
    "p-type": (ValueError, x, {"p": "half"}, "p: expected a number from 0 to 1, got half"),
    "per": (ValueError, x, {"per": "row"}, "per: expected one of 'element', 'token', 'feature', got 'row'"),
    "feature": (ValueError, x[0], {"per": "feature"}, r"x: expected at least 2 dimensions .*, got shape \[3\]"),
    "token": (ValueError, x[0, 0], {"per": "token"}, r"x: expected at least 1 dimensions .*, got shape \[\]"),
    "scale": (TypeError, ids, {"scale": True}, "x: expected a floating point tensor with scale=True, got a tensor"),
    "protect": (TypeError, x, {"protect": x}, "protect: expected a bool tensor, got a tensor"),
    "protect-shape": (
        ValueError,
        x,
        {"protect": torch.zeros(2, dtype=torch.bool)},
        r"protect: expected a shape that broadcasts to that of x, \[2, 3\], got \[2\]",
    ),
}


@pytest.mark.parametrize(("kind", "tensor", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(kind: type, tensor: Tensor, options: dict, message: str) -> None:
    with pytest.raises(kind, match=message):
        random_mask(tensor, **options)


@pytest.mark.parametrize("options", [{"p": -0.1}, {"per": "row"}], ids=str)
def test_module_checks_at_once(options: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        RandomMask(**options)
