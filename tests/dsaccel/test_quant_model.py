"""quantize_ replaces what goes through nn.Linear's forward, and reports every other matrix of weights."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from dsaccel.modules import WindowMultiheadAttention, replace_attention
from dsaccel.quant import QuantizationReport, QuantizedEmbedding, QuantizedLinear, quantize_

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ("int8_dynamic", "int8_weight_only", "int4_dynamic", "int4_weight_only", "fp8_block")


class Doubled(nn.Linear):
    """Has a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """Computes what nn.Linear does."""


class Projection(nn.Module):
    """A matrix that is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))


def with_nan() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.weight.data[1, 2] = torch.nan
    linear.weight.data[0, 0] = torch.inf
    return linear


def with_replaced_forward() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: x
    return linear


def with_more() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.register_buffer("mask", torch.ones(4))
    return linear


def with_state_hook() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.register_state_dict_post_hook(lambda *arguments: None)
    return linear


class Wrapped(Tensor):
    """A tensor that is more than its values, as a DTensor is."""


def with_wrapped_weight() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Wrapped))
    return linear


def complex_one() -> nn.Linear:
    return nn.Linear(4, 4, dtype=torch.complex64)


# What is kept, and what the reason says.
KEPT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own-forward": (lambda: Doubled(4, 4), "its class, Doubled, has a forward of its own"),
    "replaced-forward": (with_replaced_forward, "its forward was replaced by another function"),
    "conv1d": (lambda: nn.Conv1d(4, 4, 1), "convolutions stay in floating point"),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3), "convolutions stay in floating point"),
    "conv-transpose": (lambda: nn.ConvTranspose2d(4, 4, 3), "convolutions stay in floating point"),
    "embedding": (lambda: nn.Embedding(4, 4), "unless embeddings=True"),
    "embedding-bag": (lambda: nn.EmbeddingBag(4, 4), "embeddings stay in floating point"),
    "lstm": (lambda: nn.LSTM(4, 4), "its class, LSTM, has weights of its own that no nn.Linear computes"),
    "bilinear": (lambda: nn.Bilinear(4, 4, 4), "its class, Bilinear, has weights of its own"),
    "own-matrix": (Projection, "its class, Projection, has weights of its own"),
    "lazy": (lambda: nn.LazyLinear(4), "it is lazy"),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "it is parametrized"),
    "parametrized-bias": (
        lambda: parametrize.register_parametrization(nn.Linear(4, 4), "bias", nn.ReLU()),
        "it is parametrized",
    ),
    "spectral-norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "its weight is not a parameter, but computed"),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5), "not a parameter"),
    "more": (with_more, "it has mask beside weight and bias"),
    "state-hook": (with_state_hook, "it has hooks of its state dict"),
    "nan": (with_nan, "its weight has 2 values that are not finite"),
    "wrapped": (with_wrapped_weight, "its weight is a Wrapped, not a plain tensor"),
    "complex": (complex_one, "its weight is torch.complex64"),
    "quantized": (lambda: QuantizedLinear.from_linear(nn.Linear(4, 4), "fp8_block"), "it is quantized already"),
}


@pytest.mark.parametrize(("make", "reason"), KEPT.values(), ids=KEPT)
def test_keeps_and_says_why(make: Callable, reason: str) -> None:
    module = make()
    model = nn.Sequential(nn.Linear(4, 4), module)
    report = quantize_(model, "int8_dynamic")
    assert model[1] is module
    assert report.replaced == ("0",)
    assert set(report.kept) == {"1"}
    assert reason in report.kept["1"]
    assert f"kept: {report.kept['1']}" in str(report)


def test_computes_what_from_linear_does() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20, bias=False))
    expected = nn.Sequential(
        *(
            QuantizedLinear.from_linear(m, "int4_dynamic", group_size=16, symmetric=False) if len(m._parameters) else m
            for m in model
        )
    )
    quantize_(model, "int4_dynamic", group_size=16, symmetric=False)
    x = torch.randn(3, 40)
    assert torch.equal(model(x), expected(x))


def test_a_subclass_with_the_same_forward_is_replaced() -> None:
    model = nn.Sequential(Renamed(4, 4))
    (layer,) = quantize_(model, "int8_dynamic").layers
    assert (layer.kind, layer.became) == ("Renamed", "int8_dynamic")


def test_the_filter_is_asked_with_name_and_module() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4)), "c": nn.Conv1d(1, 1, 1)})
    asked = []

    def filter(name: str, module: nn.Module) -> bool:
        asked.append((name, module))
        return name == "a"

    linears = [("a", model["a"]), ("b.0", model["b"][0])]
    report = quantize_(model, "int8_dynamic", filter=filter)
    assert asked == linears
    assert report.replaced == ("a",)
    assert report.kept["b.0"] == "the filter says so"


def test_a_filter_that_raises_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def filter(name: str, module: nn.Module) -> bool:
        return {"0": True}[name]

    with pytest.raises(KeyError):
        quantize_(model, "int8_dynamic", filter=filter)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_a_layer_in_several_places_stays_one() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(4, 4), shared)})
    report = quantize_(model, "int8_dynamic")
    assert model["a"] is model["b"][1]
    assert isinstance(model["a"], QuantizedLinear)
    assert report.replaced == ("a", "b.0")
    assert report.layers[0].reason == "also b.1"


def test_one_no_of_the_filter_keeps_a_layer_in_all_places() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    report = quantize_(model, "int8_dynamic", filter=lambda name, module: name != "b.0")
    assert model["a"] is model["b"][0] is shared
    assert report.kept == {"a": "the filter says so of b.0"}


class OwnAttention(nn.MultiheadAttention):
    """Calls the forward of its base."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, OwnAttention])
def test_a_layer_that_attention_reads_somewhere_is_kept_everywhere(kind: type[nn.Module]) -> None:
    attention = kind(8, 2)
    model = nn.ModuleDict({"attention": attention, "again": attention.out_proj})
    report = quantize_(model, "int8_dynamic")
    assert report.replaced == ()
    assert "nn.MultiheadAttention reads the weight of its out_proj" in report.kept["attention.out_proj"]
    assert "input projections" in report.kept["attention"]
    x = torch.randn(3, 2, 8)
    model["attention"](x, x, x)


def test_the_output_projection_of_windowed_attention_is_a_layer() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])
    replace_attention(model, window=(None, None))
    x = torch.randn(2, 5, 16)
    before, _ = model[0](x, x, x, need_weights=False)
    report = quantize_(model, "int8_weight_only")
    assert report.replaced == ("0.out_proj",)
    assert isinstance(model[0], WindowMultiheadAttention)
    after, _ = model[0](x, x, x, need_weights=False)
    assert 0 < (after - before).norm() < 0.02 * before.norm()


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "length_first"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm_first", "norm_last"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "dense"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_encoder_layers_compute_with_their_quantized_layers_in_inference(batch_first, norm_first, nested) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 40, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(3, 5, 16)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1:, -1] = True
    plain = copy.deepcopy(model)
    report = quantize_(model, "int8_weight_only")
    assert report.replaced == ("layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2")
    for copied, quantized in zip(plain.layers, model.layers, strict=True):
        for name in ("linear1", "linear2"):
            getattr(copied, name).weight.data = getattr(quantized, name).weight.dequantize()
    if not batch_first:
        x = x.transpose(0, 1)
    # The plain one takes its fused path where it can; with the same weights, both are right up to rounding.
    with torch.no_grad():
        out, expected = model(x, src_key_padding_mask=mask), plain(x, src_key_padding_mask=mask)
    valid = ~mask if batch_first else ~mask.T
    torch.testing.assert_close(out[valid], expected[valid])


def test_hooks_of_the_call_go_along() -> None:
    linear = nn.Linear(4, 4)
    seen: list[str] = []
    handles = [
        linear.register_forward_hook(lambda m, args, out: seen.append("forward")),
        linear.register_forward_hook(lambda m, args, kwargs, out: seen.append("kwargs"), with_kwargs=True),
        linear.register_forward_pre_hook(lambda m, args: seen.append("pre")),
        linear.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append("backward")),
        linear.register_full_backward_pre_hook(lambda m, grad_out: seen.append("backward pre")),
    ]
    model = nn.Sequential(linear)
    quantize_(model, "int8_dynamic")
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert seen == ["pre", "forward", "kwargs", "backward pre", "backward"]
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    linear(x)
    assert len(seen) == 5


def test_modes_go_along() -> None:
    model = nn.Sequential(nn.Linear(4, 4).eval(), nn.Linear(4, 4))
    quantize_(model, "int8_dynamic")
    assert [layer.training for layer in model] == [False, True]


def test_layers_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import dskernels as dk

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    references = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    quantize_weight = dk.quantize_weight

    def counting(weight: Tensor, *args, **kwargs):
        if not weight.is_meta:
            alive.append(sum(reference() is not None for reference in references))
        return quantize_weight(weight, *args, **kwargs)

    monkeypatch.setattr(dk, "quantize_weight", counting)
    quantize_(model, "int8_dynamic")
    assert alive == [4, 3, 2, 1]
    assert all(reference() is None for reference in references)


def test_layers_with_one_weight_share_one_quantized_weight() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model[1].weight = model[0].weight
    report = quantize_(model, "int4_dynamic")
    assert model[0].qweight is model[1].qweight
    assert model[0].scale is model[1].scale
    assert model[0].bias is not model[1].bias
    assert [layer.reason for layer in report.layers] == ["tied to 1", "tied to 0"]


def test_the_model_itself_cannot_be_replaced() -> None:
    report = quantize_(nn.Linear(4, 4), "int8_dynamic")
    assert "QuantizedLinear.from_linear" in report.kept[""]
    assert "(the model itself)" in str(report)


def test_on_meta_nothing_is_computed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 30))
    quantize_(model, "int4_dynamic", group_size=16)
    other = nn.Sequential(nn.Linear(40, 30))
    quantize_(other, "int4_dynamic", group_size=16)
    model.load_state_dict(other.state_dict(), assign=True)
    x = torch.randn(2, 40)
    assert torch.equal(model(x), other(x))


def test_the_report_counts_bytes_and_prints_a_table() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Conv1d(50, 2, 1), nn.LayerNorm(3))
    report = quantize_(model, "int8_dynamic")
    linear, conv, norm = 4 * 5050, 4 * 102, 4 * 6
    # Codes, scales and the bias.
    quantized = 5000 + 4 * 50 + 4 * 50
    assert (report.bytes_before, report.bytes_after) == (linear + conv + norm, quantized + conv + norm)
    assert str(report).splitlines() == [
        "1 replaced, 1 kept: 20632 -> 5832 bytes",
        "  0  Linear  20200 -> 5400  int8_dynamic",
        "  2  Conv1d  408            kept: convolutions stay in floating point",
    ]
    assert isinstance(report, QuantizationReport)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.layers = ()


def test_reading_a_replaced_weight_past_the_layer_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    quantize_(model, "int8_dynamic")
    with pytest.raises(TypeError, match=r"QuantizedWeight"):
        F.linear(torch.randn(2, 4), model[0].weight)


def test_wrong_arguments_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got 3"):
        quantize_(3, "int8_dynamic")
    with pytest.raises(ValueError, match=r"scheme: expected one of .*, got 'int3'"):
        quantize_(model, "int3")
    with pytest.raises(ValueError, match=r"scheme: expected .*prepare and convert.*, got 'int8_static'"):
        quantize_(model, "int8_static")
    with pytest.raises(TypeError, match=r"filter: expected a function or None, got 'a'"):
        quantize_(model, "int8_dynamic", filter="a")
    with pytest.raises(ValueError, match=r"group_size: expected None for int8_dynamic, got 32"):
        quantize_(model, "int8_dynamic", group_size=32)
    with pytest.raises(ValueError, match=r"symmetric: expected True for fp8_block"):
        quantize_(model, "fp8_block", symmetric=False)
    with pytest.raises(TypeError, match=r"embeddings: expected True or False"):
        quantize_(model, "int8_dynamic", embeddings="all")
    assert type(model[0]) is nn.Linear


def test_embeddings_are_replaced_on_request() -> None:
    model = nn.ModuleList([nn.Embedding(9, 4, padding_idx=2), nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 9)])
    report = quantize_(model, "int4_dynamic", embeddings=True)
    assert report.replaced == ("0", "2")
    assert isinstance(model[0], QuantizedEmbedding)
    assert "max_norm" in report.kept["1"]
    assert report.layers[0].became == "int8_weight_only"
