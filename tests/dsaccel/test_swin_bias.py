"""The position biases of Swin are what their formulas say, for any window."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from dsaccel.modules import ContinuousPositionBias, RelativePositionBias
from dsaccel.modules.swin_bias import resized_bias_table

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = [(1, 1), (1, 7), (3, 4), (5, 2), (7, 7)]
window_ids = pytest.mark.parametrize("window", WINDOWS, ids=lambda window: "x".join(map(str, window)))


def places(window: tuple[int, int]) -> list[tuple[int, int]]:
    return [(y, x) for y in range(window[0]) for x in range(window[1])]


def network(module: ContinuousPositionBias, dy: int, dx: int, pretrained: tuple[int, int]) -> Tensor:
    """The bias of an offset, one at a time, in float64."""
    coordinates = []
    for offset, size in ((dy, pretrained[0]), (dx, pretrained[1])):
        scaled = 8 * offset / (size - 1) if offset else 0.0
        coordinates.append(math.copysign(math.log(1 + abs(scaled), 8), scaled))
    c = torch.tensor(coordinates, dtype=torch.float64)
    hidden = (module.hidden_weight.double() @ c + module.hidden_bias.double()).clamp(min=0)
    return 16 / (1 + (-(module.output_weight.double() @ hidden)).exp())


@window_ids
def test_table_holds_the_bias_of_each_offset(window: tuple[int, int]) -> None:
    module = RelativePositionBias(window, 3)
    height, width = window
    table = module.table.view(2 * height - 1, 2 * width - 1, 3)
    bias = module()
    assert bias.shape == (3, height * width, height * width)
    for n, (y, x) in enumerate(places(window)):
        for m, (v, u) in enumerate(places(window)):
            assert torch.equal(bias[:, n, m], table[y - v + height - 1, x - u + width - 1])


def test_gradient_of_the_table_counts_its_uses() -> None:
    module = RelativePositionBias((3, 2), 1)
    module().sum().backward()
    # An offset (dy, dx) occurs (3 - |dy|) * (2 - |dx|) times.
    counts = [(3 - abs(dy)) * (2 - abs(dx)) for dy in range(-2, 3) for dx in range(-1, 2)]
    assert module.table.grad.flatten().tolist() == counts


@window_ids
@pytest.mark.parametrize("pretrained", [None, (6, 3)], ids=["own", "pretrained"])
def test_network_gives_the_bias_of_each_offset(window: tuple[int, int], pretrained: tuple[int, int] | None) -> None:
    module = ContinuousPositionBias(window, 3, hidden=9, pretrained_window_size=pretrained).double()
    for p in module.parameters():
        nn.init.normal_(p)
    offsets = [(y - v, x - u) for y, x in places(window) for v, u in places(window)]
    of_offset = {offset: network(module, *offset, pretrained or window) for offset in set(offsets)}
    expected = torch.stack([of_offset[offset] for offset in offsets], -1)
    torch.testing.assert_close(module().flatten(1), expected, rtol=1e-6, atol=1e-6)
    parameters = tuple(module.parameters())
    if max(window) < 5:
        assert torch.autograd.gradcheck(lambda *_: module(), parameters, raise_exception=True)


def test_network_is_computed_in_float32_under_autocast_and_in_half_precision() -> None:
    module = ContinuousPositionBias(8, 4)
    nn.init.normal_(module.output_weight)
    exact = copy.deepcopy(module).double()()
    with torch.autocast("cpu", torch.bfloat16):
        bias = module()
    assert bias.dtype == torch.float32
    torch.testing.assert_close(bias, exact.float(), rtol=1e-5, atol=1e-5)
    half = copy.deepcopy(module).bfloat16()
    assert half.coordinates.dtype == torch.float32
    rounded = copy.deepcopy(half).double()()
    assert half().dtype == torch.float32
    torch.testing.assert_close(half(), rounded.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [RelativePositionBias, ContinuousPositionBias])
def test_derived_buffers_are_not_saved_and_survive(kind: type[nn.Module]) -> None:
    module = kind((3, 2), 2)
    parameters = {name for name, _ in module.named_parameters()}
    assert set(module.state_dict()) == parameters
    with torch.device("meta"):
        other = kind((3, 2), 2)
    other.to_empty(device="cpu")
    other.load_state_dict(module.state_dict(), strict=True)
    for copied in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(), module())
    assert module.half().index.dtype == torch.int64
    assert module.to("meta").index.is_meta


def test_starts_as_in_the_papers() -> None:
    table = RelativePositionBias(12, 24).table
    network = ContinuousPositionBias(12, 24)
    assert not network.hidden_bias.any()
    for weight in (table, network.hidden_weight, network.output_weight):
        assert 0.018 < weight.std() < 0.022
        assert abs(weight.mean()) < 0.002


@pytest.mark.parametrize("old", [(3, 3), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_table_of_the_same_window_is_not_changed(old: tuple[int, int], dtype: torch.dtype) -> None:
    table = torch.randn((2 * old[0] - 1) * (2 * old[1] - 1), 4, dtype=dtype)
    assert torch.equal(resized_bias_table(table, old, old), table)


def cubic(old: int, new: int) -> Tensor:
    """The matrix of cubic convolution with a = -3/4 and repeated borders, from ``old`` points to ``new``."""

    def kernel(t: float) -> float:
        t, a = abs(t), -0.75
        if t <= 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0

    matrix = torch.zeros(new, old, dtype=torch.float64)
    for row in range(new):
        # The n-th of N points lies at (n + 1/2) / N of the picture.
        place = (row + 0.5) * old / new - 0.5
        for point in range(math.floor(place) - 1, math.floor(place) + 3):
            matrix[row, min(max(point, 0), old - 1)] += kernel(place - point)
    return matrix


@pytest.mark.parametrize("new", [(9, 13), (5, 12), (1, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_resized_table_is_interpolated_head_by_head(new: tuple[int, int], dtype: torch.dtype) -> None:
    old = (7, 9)
    rows, columns = (cubic(2 * n - 1, 2 * m - 1) for n, m in zip(old, new, strict=True))
    table = torch.randn(13 * 17, 2, dtype=dtype)
    resized = resized_bias_table(table, old, new)
    pictures = table.double().T.unflatten(1, (13, 17))
    expected = (rows @ pictures @ columns.T).flatten(1).T
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}[dtype]
    assert resized.dtype == dtype
    torch.testing.assert_close(resized.double(), expected, rtol=rounding, atol=rounding)
    flat = resized_bias_table(torch.full((13 * 17, 2), 0.3, dtype=torch.float64), old, new)
    torch.testing.assert_close(flat, torch.full_like(flat, 0.3))


ERRORS = {
    "window-type": (lambda: RelativePositionBias(7.0, 2), TypeError, "window_size: expected an int or a pair of ints"),
    "window-three": (lambda: RelativePositionBias((7, 7, 7), 2), TypeError, "window_size: expected an int or a pair"),
    "window-zero": (lambda: RelativePositionBias((7, 0), 2), ValueError, "window_size: expected at least 1, got"),
    "heads": (lambda: RelativePositionBias(7, 0), ValueError, "num_heads: expected a positive number, got 0"),
    "heads-type": (lambda: ContinuousPositionBias(7, 2.0), TypeError, "num_heads: expected an int, got 2.0"),
    "hidden": (lambda: ContinuousPositionBias(7, 2, hidden=0), ValueError, "hidden: expected a positive number, got 0"),
    "pretrained": (
        lambda: ContinuousPositionBias(7, 2, pretrained_window_size=0),
        ValueError,
        "pretrained_window_size: expected at least 1, got 0",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
