"""Observers against what a direct computation over all that was seen gives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsaccel.quant import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    Observer,
    PercentileObserver,
    PerChannelMinMaxObserver,
    PerChannelMovingAverageObserver,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OBSERVERS: dict[str, Callable[[], Observer]] = {
    "min-max": MinMaxObserver,
    "moving-average": MovingAverageObserver,
    "percentile": PercentileObserver,
    "histogram": HistogramObserver,
    "channel-min-max": PerChannelMinMaxObserver,
    "channel-moving-average": PerChannelMovingAverageObserver,
}
every_observer = pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)


def batches() -> list[Tensor]:
    # Of different shapes and widths; the largest magnitude is negative, and comes neither first nor last.
    return [torch.randn(rows, 3, 6) * width for rows, width in ((4, 1.0), (7, 5.0), (2, 0.1), (9, 2.0))]


def after(observer: Observer, seen: list[Tensor]) -> Observer:
    for x in seen:
        observer(x)
    return observer


def test_min_max_is_the_largest_magnitude() -> None:
    seen = batches()
    seen[1][0, 0, 0] = -77.25
    observer = after(MinMaxObserver(), seen)
    assert observer.clip() == 77.25
    assert observer.step() == torch.tensor(77.25) / 127
    assert observer.batches == 4


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_moving_average_starts_at_the_first_batch(decay: float) -> None:
    seen = batches()
    observer = after(MovingAverageObserver(decay), seen)
    average = seen[0].abs().max().double()
    for x in seen[1:]:
        average = decay * average + (1 - decay) * x.abs().max().double()
    torch.testing.assert_close(observer.clip().double(), average, rtol=1e-6, atol=0)


def test_moving_average_in_training_passes_over_batches_that_are_not_finite() -> None:
    observer = MovingAverageObserver(0.5)
    observer.update(torch.tensor([torch.inf]))
    assert observer.step().isnan()
    observer.update(torch.tensor([2.0]))
    observer.update(torch.tensor([1.0, torch.nan]))
    assert (observer.clip(), observer.batches) == (2.0, 1)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_per_channel_observers_reduce_all_other_dimensions(dim: int) -> None:
    seen = [torch.randn(5, 4, 6) * width for width in (1.0, 3.0, 0.5)]
    others = tuple(d for d in range(3) if d != dim % 3)
    largest = torch.stack([x.abs().amax(others) for x in seen])
    assert torch.equal(after(PerChannelMinMaxObserver(dim), seen).clip(), largest.amax(0))
    average = largest[0].double()
    for row in largest[1:].double():
        average = 0.9 * average + 0.1 * row
    observer = after(PerChannelMovingAverageObserver(dim, decay=0.9), seen)
    torch.testing.assert_close(observer.clip().double(), average, rtol=1e-6, atol=0)
    assert torch.equal(observer.step(), observer.clip() / 127)


@pytest.mark.parametrize("percentile", [1.0, 50.0, 99.0, 99.9, 100.0])
def test_percentile_is_within_a_bin_of_that_of_all_values(percentile: float) -> None:
    seen = [*batches(), torch.zeros(10, 6), torch.randn(300, 6) * 40]
    observer = after(PercentileObserver(percentile), seen)
    magnitudes = torch.cat([x.flatten() for x in seen]).double().abs()
    exact = torch.quantile(magnitudes, percentile / 100, interpolation="higher")
    bin_width = float(observer.limit) / 4096
    # The rank of an interpolated quantile may be one away from that of the definition: neighbours count as well.
    lower = torch.quantile(magnitudes, percentile / 100, interpolation="lower")
    assert float(lower) * (1 - 1e-6) <= float(observer.clip()) <= float(exact) + 1.001 * bin_width
    exceeding = (magnitudes > float(observer.clip()) * (1 + 1e-6)).double().mean()
    assert exceeding <= 1 - percentile / 100 + 1e-9


def quantization_error(x: Tensor, clip: float) -> float:
    step = clip / 127
    return float(((x / step).round().clamp(-127, 127) * step - x).square().mean())


def mixture() -> Tensor:
    return torch.cat([torch.randn(20000), torch.randn(20) * 100])


SAMPLES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(20000),
    "uniform": lambda: torch.rand(20000) * 2 - 1,
    "heavy-tails": lambda: torch.distributions.StudentT(2.0).sample((20000,)),
    "outliers": mixture,
    # Here what becomes 0 has most of the error.
    "narrow": lambda: torch.cat([torch.randn(100000) * 0.002, torch.tensor([0.6, 0.6])]),
    "relu": lambda: torch.randn(20000).relu(),
    "tiny": lambda: torch.randn(20000) * 1e-30,
    "one-value": lambda: torch.full((100,), 3.0),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_histogram_finds_a_clip_with_nearly_the_smallest_error(sample: Callable) -> None:
    x = sample()
    observer = HistogramObserver()
    for part in x.chunk(7):
        observer(part)
    x = x.double()
    largest = float(x.abs().max())
    best = min(quantization_error(x, largest * i / 500) for i in range(5, 501))
    got = quantization_error(x, float(observer.clip()))
    # Errors of single values scatter about their expectation, which the histogram minimises; for one value there is
    # nothing to average, and a bin is a 4096th.
    assert got <= 1.1 * best + (largest / 4096) ** 2 * (x.unique().numel() == 1)
    assert float(observer.clip()) <= largest * 1.0001


def test_histogram_clips_outliers_that_min_max_follows() -> None:
    # Clipping one of 400000 values costs less than a step that is wide enough for it costs all the others.
    x = torch.cat([torch.randn(400000), torch.tensor([30.0])])
    clips = [float(after(observer, [x]).clip()) for observer in (HistogramObserver(), MinMaxObserver())]
    errors = [quantization_error(x.double(), clip) for clip in clips]
    assert clips[0] < 15
    assert clips[1] == 30
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("width", [1e-3, 1.0, 1e5])
def test_histograms_count_every_value_once_as_their_range_grows(width: float) -> None:
    observer = PercentileObserver(bins=256)
    seen = [torch.rand(50) * width * 3**i for i in range(6)] + [torch.zeros(7)]
    after(observer, seen)
    assert int(observer.counts.sum()) + int(observer.zeros) == 307
    assert observer.limit >= max(float(x.max()) for x in seen)
    # The first limit, doubled as often as need be: bins of the finest batch end on edges of the last ones.
    assert float(torch.log2(observer.limit / seen[0].max())).is_integer()
    edges = torch.arange(257, dtype=torch.float64) * observer.limit / 256
    values = torch.cat([x[x > 0] for x in seen]).double()
    expected = torch.histogram(values, edges).hist
    # Values on an edge up to rounding may fall to either side.
    assert (expected.cumsum(0) - observer.counts.cumsum(0)).abs().max() <= 1


@every_observer
def test_without_a_batch_there_is_no_step(make: Callable) -> None:
    assert make().step().isnan().all()
    assert after(make(), [torch.randn(0, 6)]).batches == 0


@every_observer
def test_zeros_have_the_smallest_step(make: Callable) -> None:
    observer = after(make(), [torch.zeros(2, 6)])
    assert (observer.clip() == 0).all()
    assert (observer.step() == 2.0**-126).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@every_observer
def test_values_that_are_not_finite_are_an_error_and_leave_no_trace(make: Callable, wrong: float) -> None:
    observer = after(make(), batches())
    before = copy.deepcopy(observer.state_dict())
    x = torch.randn(2, 6)
    x[1, 3] = wrong
    with pytest.raises(ValueError, match=r"x: expected finite values, got 1 of \[2, 6\] that are not"):
        observer(x)
    for name, value in observer.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@every_observer
def test_batches_of_any_dtype_give_steps_in_float32(make: Callable, dtype: torch.dtype) -> None:
    seen = [x.to(dtype) for x in batches()]
    step = after(make(), seen).step()
    assert step.dtype == torch.float32
    torch.testing.assert_close(step, after(make(), [x.float() for x in seen]).step(), rtol=1e-6, atol=0)


@every_observer
def test_statistics_are_in_the_state_dict(make: Callable) -> None:
    observer = after(make(), batches())
    other = make()
    other.load_state_dict(observer.state_dict())
    assert torch.equal(other.step(), observer.step())
    more = torch.randn(3, 6) * 9
    assert torch.equal(after(other, [more]).step(), after(observer, [more]).step())


@every_observer
def test_casts_leave_the_statistics_alone(make: Callable) -> None:
    observer = after(make(), batches())
    before = copy.deepcopy(observer.state_dict())
    nn.Sequential(observer).half().type(torch.float64)
    for name, value in observer.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name


@every_observer
def test_inference_mode_and_gradients_do_not_matter(make: Callable) -> None:
    seen = batches()
    observer = make()
    with torch.inference_mode():
        observer(seen[0])
    observer(seen[1].requires_grad_())
    with torch.inference_mode():
        observer(seen[2])
    assert not observer.step().requires_grad
    assert torch.equal(observer.step(), after(make(), seen[:3]).step())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"decay: expected a number, got 'a'"):
        MovingAverageObserver("a")
    with pytest.raises(ValueError, match=r"decay: expected a number from 0 to below 1, got 1"):
        PerChannelMovingAverageObserver(decay=1)
    with pytest.raises(TypeError, match=r"dim: expected an int, got 0\.5"):
        PerChannelMinMaxObserver(0.5)
    with pytest.raises(TypeError, match=r"percentile: expected a number, got None"):
        PercentileObserver(None)
    with pytest.raises(ValueError, match=r"percentile: expected a number above 0, up to 100, got 101"):
        PercentileObserver(101)
    with pytest.raises(TypeError, match=r"bins: expected an int"):
        HistogramObserver(1e3)
    with pytest.raises(ValueError, match=r"bins: expected an even number of at least 256, got 257"):
        HistogramObserver(257)
    with pytest.raises(TypeError, match=r"x: expected a floating point tensor"):
        MinMaxObserver()(torch.arange(3))
    with pytest.raises(ValueError, match=r"x: expected a tensor with a dimension 2, got \[3, 4\]"):
        PerChannelMinMaxObserver(2)(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"x: expected size 4 of dimension -1, as before, got \[3, 5\]"):
        after(PerChannelMinMaxObserver(), [torch.randn(3, 4), torch.randn(3, 5)])
