"""label_smoothing_loss is F.cross_entropy where that is finite, and finite where it should be and is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dsaccel.amp import label_smoothing_loss
from dskernels.testing import assert_close_to_reference

SHAPES = {"one": (7,), "rows": (5, 7), "one-class": (4, 1), "sequence": (3, 7, 9), "image": (2, 7, 3, 5)}


def targets_for(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(shape[min(1, len(shape) - 1)], shape[:1] * (len(shape) > 1) + shape[2:])


def value_and_gradient(loss, logits: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    logits = logits.detach().clone().requires_grad_()
    value = loss(logits, *args, **options)
    # Unequal upstream gradients, for reduction="none".
    (value * torch.arange(1, value.numel() + 1).view(value.shape)).sum().backward()
    return value.detach(), logits.grad


def compare_with_torch(logits: Tensor, target: Tensor, smoothing: float, **options) -> None:
    options = {"label_smoothing": smoothing, **options}
    plain = value_and_gradient(F.cross_entropy, logits, target, **options)
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    target = target.double() if target.is_floating_point() else target
    exact = value_and_gradient(F.cross_entropy, logits.double(), target, **options)
    options["smoothing"] = options.pop("label_smoothing")
    result = value_and_gradient(label_smoothing_loss, logits, target, **options)
    for name, got, expected, theirs in zip(("loss", "gradient"), result, exact, plain, strict=True):
        assert_close_to_reference(got, expected, theirs, name)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_equals_cross_entropy(shape: tuple[int, ...], smoothing: float, reduction: str, weighted: bool) -> None:
    logits, target = torch.randn(shape) * 3, targets_for(shape)
    weight = torch.rand(shape[min(1, len(shape) - 1)]) if weighted else None
    compare_with_torch(logits, target, smoothing, reduction=reduction, weight=weight)


@pytest.mark.parametrize("ignore_index", [-100, 0, 3, 99])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_ignored_targets(ignore_index: int, weighted: bool) -> None:
    logits, target = torch.randn(6, 7, 5), torch.randint(7, (6, 5))
    target[torch.rand(6, 5) < 0.4] = ignore_index
    weight = torch.rand(7) if weighted else None
    for reduction in ("mean", "sum", "none"):
        compare_with_torch(logits, target, 0.2, reduction=reduction, weight=weight, ignore_index=ignore_index)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_probabilities_as_targets(shape: tuple[int, ...], weighted: bool) -> None:
    dim = min(1, len(shape) - 1)
    logits, target = torch.randn(shape), torch.randn(shape).softmax(dim)
    weight = torch.rand(shape[dim]) if weighted else None
    for reduction in ("mean", "sum", "none"):
        compare_with_torch(logits, target, 0.1, reduction=reduction, weight=weight)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -4])
def test_classes_in_any_dimension(dim: int) -> None:
    logits = torch.randn(2, 7, 3, 5)
    target, weight = torch.randint(7, (2, 3, 5)), torch.rand(7)
    expected = label_smoothing_loss(logits, target, weight=weight, reduction="none")
    moved = logits.movedim(1, dim)
    assert torch.equal(label_smoothing_loss(moved, target, weight=weight, reduction="none", dim=dim), expected)
    q = torch.randn(2, 7, 3, 5).softmax(1)
    expected = label_smoothing_loss(logits, q, reduction="none")
    assert torch.equal(label_smoothing_loss(moved, q.movedim(1, dim), reduction="none", dim=dim), expected)


@pytest.mark.parametrize("kind", ["classes", "weighted", "probabilities"])
def test_masked_classes_are_as_if_they_did_not_exist(kind: str) -> None:
    logits = torch.randn(6, 9)
    allowed = torch.tensor([0, 2, 3, 7])
    masked = torch.full_like(logits, -math.inf)
    masked[:, allowed] = logits[:, allowed]
    weight = torch.rand(9) if kind == "weighted" else None
    if kind == "probabilities":
        q = torch.randn(6, 4).softmax(1)
        target = torch.zeros(6, 9).index_copy(1, allowed, q)
        few = q
    else:
        few = torch.randint(4, (6,))
        target = allowed[few]
    value, gradient = value_and_gradient(label_smoothing_loss, masked, target, weight=weight)
    weight = None if weight is None else weight[allowed]
    expected, expected_gradient = value_and_gradient(
        F.cross_entropy, logits[:, allowed], few, weight=weight, label_smoothing=0.1
    )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[:, allowed], expected_gradient)
    assert gradient.index_fill(1, allowed, 0).eq(0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_target_is_infinite_with_the_gradient_of_torch(smoothing: float) -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5]])
    target = torch.tensor([1])
    value, gradient = value_and_gradient(label_smoothing_loss, logits, target, smoothing=smoothing)
    assert value == math.inf
    assert gradient.isfinite().all()
    assert label_smoothing_loss(logits, torch.tensor([[0.5, 0.5, 0]]), smoothing=smoothing) == math.inf
    # Unless its class has no weight.
    weight = torch.tensor([1.0, 0.0, 1.0])
    value, gradient = value_and_gradient(label_smoothing_loss, logits, target, weight=weight, reduction="sum")
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("fill", [0.0, -math.inf, math.inf, math.nan])
def test_all_ignored_is_zero_with_zero_gradient(fill: float, smoothing: float, weighted: bool) -> None:
    logits = torch.full((3, 5, 2), fill)
    target = torch.full((3, 2), -100)
    weight = torch.rand(5) if weighted else None
    for reduction in ("mean", "sum", "none"):
        value, gradient = value_and_gradient(
            label_smoothing_loss, logits, target, smoothing=smoothing, reduction=reduction, weight=weight
        )
        assert value.eq(0).all()
        assert gradient.eq(0).all()


def test_nothing_that_counts_is_zero() -> None:
    for target in (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5)):
        value, gradient = value_and_gradient(label_smoothing_loss, torch.zeros(0, 5), target)
        assert value == 0
        assert gradient.shape == (0, 5)
    weight = torch.tensor([0.0, 1, 1])
    value, gradient = value_and_gradient(label_smoothing_loss, torch.randn(2, 3), torch.zeros(2).long(), weight=weight)
    assert value == 0
    assert gradient.eq(0).all()


def test_logits_of_ignored_targets_do_not_matter() -> None:
    logits, target = torch.randn(4, 5), torch.tensor([1, -100, 0, -100])
    expected, expected_gradient = value_and_gradient(label_smoothing_loss, logits, target)
    logits[1], logits[3] = math.nan, -math.inf
    value, gradient = value_and_gradient(label_smoothing_loss, logits, target)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, target = (torch.randn(64, 9) * 50).to(dtype), torch.randint(9, (64,))
    weight = torch.rand(9).to(dtype)
    value, gradient = value_and_gradient(label_smoothing_loss, logits, target, weight=weight, reduction="sum")
    expected = F.cross_entropy(logits.float(), target, weight.float(), label_smoothing=0.1, reduction="sum")
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, expected)
    assert value.isfinite()


def test_gradcheck() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64)
    logits[:, 2] = -math.inf
    free = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    rest = torch.tensor([0, 1, 3, 4, 5])
    weight, target = torch.rand(6).double(), rest[torch.randint(5, (4,))]

    def loss(x: Tensor) -> Tensor:
        return label_smoothing_loss(logits.index_copy(1, rest, x), target, weight=weight)

    assert torch.autograd.gradcheck(loss, (free,))
    assert torch.autograd.gradgradcheck(loss, (free,))


def test_compiles_whole() -> None:
    compiled = torch.compile(label_smoothing_loss, fullgraph=True, backend="aot_eager")
    logits, target = torch.randn(2, 9, 7), torch.randint(7, (2, 9))
    target[0, :3] = -100
    for a, b in zip(
        value_and_gradient(compiled, logits, target, dim=-1),
        value_and_gradient(label_smoothing_loss, logits, target, dim=-1),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


x, t = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
ERRORS = {
    "smoothing": (ValueError, (x, t), {"smoothing": 1.5}, "smoothing: expected a number from 0 to 1, got 1.5"),
    "negative": (ValueError, (x, t), {"smoothing": -0.1}, "smoothing: expected a number from 0 to 1, got -0.1"),
    "reduction": (
        ValueError,
        (x, t),
        {"reduction": "max"},
        "reduction: expected one of 'mean', 'sum', 'none', got 'max'",
    ),
    "dim": (ValueError, (x, t), {"dim": 2}, r"dim: expected a dimension of logits of shape \[2, 3\], got 2"),
    "logits": (TypeError, (t, t), {}, "logits: expected a floating point tensor, got a tensor of shape"),
    "scalar": (ValueError, (torch.tensor(1.0), t), {}, r"logits: expected at least one dimension, got shape \[\]"),
    "target": (TypeError, (x, t.int()), {}, "target: expected an int64 or a floating point tensor, got a tensor"),
    "shape": (ValueError, (x, t[:1]), {}, r"target: expected shape \[2\], got \[1\]"),
    "probabilities": (ValueError, (x, x[:, :2]), {}, r"target: expected shape \[2, 3\], got \[2, 2\]"),
    "weight": (ValueError, (x, t), {"weight": torch.ones(2)}, r"weight: expected shape \[3\], got \[2\]"),
    "class": (IndexError, (x, t + 3), {}, "Target 3 is out of bounds"),
    "class-weighted": (IndexError, (x, t - 1), {"weight": torch.ones(3)}, "Target -1 is out of bounds"),
}


@pytest.mark.parametrize(("kind", "arguments", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(kind: type, arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(kind, match=message):
        label_smoothing_loss(*arguments, **options)
