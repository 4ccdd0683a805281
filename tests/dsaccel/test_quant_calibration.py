"""prepare, batches, convert: layers with a static step for their activations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dsaccel.modules import SlidingWindowLM
from dsaccel.quant import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    ObservedLinear,
    PercentileObserver,
    PerChannelMinMaxObserver,
    QuantizedLinear,
    convert,
    prepare,
    prepare_qat,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OBSERVERS: dict[str, Callable] = {
    "min-max": MinMaxObserver,
    "moving-average": MovingAverageObserver,
    "percentile": lambda: PercentileObserver(99.99),
    "histogram": HistogramObserver,
}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 10, bias=False))


@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_a_calibrated_model_is_near_the_original(observer: Callable) -> None:
    model = SlidingWindowLM(vocab_size=50, dim=32, num_layers=2, num_heads=2, window=8).eval()
    tokens = torch.randint(50, (8, 2, 13))
    plain = copy.deepcopy(model)
    with torch.no_grad():
        prepared = prepare(model, observer=observer)
        for batch in tokens:
            assert torch.equal(model(batch), plain(batch))
        converted = convert(model)
        out, expected = model(tokens[0]), plain(tokens[0])
    names = [name for name, module in plain.named_modules() if type(module) is nn.Linear]
    assert list(prepared.replaced) == list(converted.replaced) == names
    assert {layer.became for layer in prepared.layers if layer.name in names} == {"observed"}
    assert {layer.became for layer in converted.layers if layer.name in names} == {"int8_static"}
    assert 0 < (out - expected).norm() < 0.1 * expected.norm()


def test_the_steps_are_those_of_what_each_layer_saw() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    prepare(model)
    x = torch.randn(30, 20)
    for rows in x.split(7):
        model(rows)
    convert(model)
    hidden = plain[1](plain[0](x))
    for layer, linear, seen in ((model[0], plain[0], x), (model[2], plain[2], hidden)):
        expected = QuantizedLinear.from_linear(linear, "int8_static", input_scale=seen.abs().max() / 127)
        torch.testing.assert_close(layer.input_scale, expected.input_scale, rtol=1e-6, atol=0)
        assert torch.equal(layer.qweight, expected.qweight)
    assert isinstance(model[1], nn.GELU)


def test_prepared_parameters_stay_the_same_objects_under_the_same_names() -> None:
    model = mlp()
    parameters = dict(model.named_parameters())
    prepare(model)
    assert all(dict(model.named_parameters())[name] is value for name, value in parameters.items())
    assert all(isinstance(model[i], nn.Linear) for i in (0, 2))
    model[0](torch.randn(2, 20)).sum().backward()
    assert parameters["0.weight"].grad is not None


def test_layers_without_a_batch_are_named_and_the_model_stays() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Sequential(nn.Linear(4, 4)), "empty": nn.Linear(4, 4)})
    prepare(model)
    model["used"](torch.randn(2, 4))
    model["empty"](torch.randn(0, 4))
    message = r"model: expected layers that are ready, got unused\.0: it has seen no batch; empty: it has seen no batch"
    with pytest.raises(ValueError, match=message):
        convert(model)
    assert isinstance(model["used"], ObservedLinear)
    model["unused"](torch.randn(2, 4))
    model["empty"](torch.randn(2, 4))
    convert(model)


def test_a_layer_that_saw_only_zeros_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepare(model)
    model(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"0: what it has seen gives the clip 0\.0"):
        convert(model)


def test_a_batch_that_is_not_finite_is_an_error_that_names_the_layer() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4))})
    prepare(model)
    x = torch.randn(3, 4)
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"body\.0: x: expected finite values, got 1 of \[3, 4\] that are not"):
        model["body"](x)


def test_steps_for_each_channel_are_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepare(model, observer=PerChannelMinMaxObserver)
    model(torch.randn(3, 4))
    assert model[0].observer.clip().shape == (4,)
    reason = r"0: PerChannelMinMaxObserver has a step for each channel, and int8_static takes one for all of a tensor"
    with pytest.raises(ValueError, match=reason):
        convert(model)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepare(model)
    model(torch.randn(3, 4))
    model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"0: its weight is not finite"):
        convert(model)


def test_the_reports_say_what_was_kept() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"conv": nn.Conv1d(1, 1, 1), "a": nn.Linear(4, 4), "b": shared, "c": shared})
    report = prepare(model, filter=lambda name, module: name != "a")
    assert report.kept == {"conv": "convolutions stay in floating point", "a": "the filter says so"}
    assert report.layers[2].reason == "also c"
    assert model["b"] is model["c"]
    model["c"](torch.randn(2, 4))
    report = convert(model)
    assert report.kept == {"conv": "convolutions stay in floating point", "a": "it was not prepared"}
    assert model["b"] is model["c"]
    assert isinstance(model["b"], QuantizedLinear)


def test_hooks_and_modes_go_along_all_the_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    seen = []
    handle = model[0].register_forward_hook(lambda module, args, out: seen.append(type(module)))
    prepare(model)
    model(torch.randn(2, 4))
    convert(model)
    model(torch.randn(2, 4))
    assert seen == [ObservedLinear, QuantizedLinear]
    assert not model[0].training
    handle.remove()
    model(torch.randn(2, 4))
    assert len(seen) == 2


def test_encoder_layers_are_observed_in_inference_too() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 40, batch_first=True), 2).eval()
    prepare(model)
    with torch.no_grad():
        model(torch.randn(2, 5, 16), src_key_padding_mask=torch.arange(5).expand(2, 5) > 3)
    assert len(convert(model).replaced) == 4


def test_statistics_survive_casts_copies_and_state_dicts() -> None:
    model = mlp()
    prepare(model, observer=HistogramObserver)
    for _ in range(3):
        model(torch.randn(9, 20))
    other = mlp()
    prepare(other, observer=HistogramObserver)
    other.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model).half().float()
    steps = [m[0].observer.step() for m in (model, other, twin)]
    assert torch.equal(steps[0], steps[1])
    assert torch.equal(steps[0], steps[2])
    assert other.to_empty(device="cpu")[0].observer.counts.dtype == torch.int64


def test_a_tied_embedding_keeps_its_weight_and_the_report_says_so() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(30, 8), "head": nn.Linear(8, 30)})
    model["head"].weight = model["embed"].weight
    prepare(model)
    assert model["head"].weight is model["embed"].weight
    model["head"](torch.randn(2, 8))
    report = convert(model)
    assert report.layers[1].reason == "tied to embed, which keeps its 960 bytes of weight"


def test_wrong_arguments_are_named() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"scheme: expected int8_static .*, got 'int8_dynamic'"):
        prepare(model, "int8_dynamic")
    with pytest.raises(TypeError, match=r"observer: expected a function that makes an Observer, got 3"):
        prepare(model, observer=3)
    with pytest.raises(TypeError, match=r"observer: expected a function that makes an Observer"):
        prepare(model, observer=nn.ReLU)
    with pytest.raises(TypeError, match=r"filter: expected a function or None"):
        prepare(model, filter=["0"])
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got None"):
        prepare(None)
    with pytest.raises(ValueError, match=r"model: expected layers of prepare or prepare_qat in it, got none"):
        convert(model)
    with pytest.raises(ValueError, match=r"model: expected layers of prepare or prepare_qat in it, got none"):
        convert(ObservedLinear(nn.Linear(3, 3), MinMaxObserver()))
    with pytest.raises(TypeError, match=r"model: expected an nn.Module"):
        convert([model])
    with pytest.raises(TypeError, match=r"linear: expected an nn.Linear"):
        ObservedLinear(nn.ReLU(), MinMaxObserver())
    with pytest.raises(ValueError, match=r"linear: expected one with the forward of nn\.Linear, got ObservedLinear"):
        ObservedLinear(ObservedLinear(nn.Linear(3, 3), MinMaxObserver()), MinMaxObserver())
    with pytest.raises(TypeError, match=r"observer: expected an Observer"):
        ObservedLinear(nn.Linear(3, 3), nn.ReLU())
    assert [type(model[i]) for i in (0, 2)] == [nn.Linear, nn.Linear]


def test_a_prepared_model_is_not_prepared_again() -> None:
    model = mlp()
    prepare(model)
    report = prepare_qat(model, "int8_static")
    assert report.replaced == ()
    assert report.kept["0"] == "its class, ObservedLinear, has a forward of its own"
