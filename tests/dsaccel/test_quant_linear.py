"""QuantizedLinear computes what dskernels.quantized_matmul does, and goes through all that modules go through."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dskernels as dk
from dsaccel.quant import QuantizedLinear

pytestmark = pytest.mark.usefixtures("one_thread")

# Options of every kind of state that a layer can have.
OPTIONS: dict[str, dict] = {
    "int8_dynamic": {"scheme": "int8_dynamic"},
    "int8_static": {"scheme": "int8_static", "input_scale": 0.025},
    "int8_weight_only": {"scheme": "int8_weight_only"},
    "int4_dynamic": {"scheme": "int4_dynamic", "group_size": 32},
    "int4_weight_only": {"scheme": "int4_weight_only", "group_size": -1},
    "int4_asymmetric": {"scheme": "int4_weight_only", "group_size": 16, "symmetric": False},
    "fp8_block": {"scheme": "fp8_block"},
}
K, N = 75, 33
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def make(options: dict, *, bias: bool = True) -> QuantizedLinear:
    return QuantizedLinear.from_linear(nn.Linear(K, N, bias=bias), **options)


def empty_like(layer: QuantizedLinear, **more) -> QuantizedLinear:
    group = layer.group_size if layer.scheme.startswith("int4") and layer.group_size != K else None
    group = -1 if layer.scheme.startswith("int4") and group is None else group
    return QuantizedLinear.empty(
        K, N, layer.scheme, group_size=group, symmetric=layer.zero_point is None, bias=layer.bias is not None, **more
    )


def assert_same(one: QuantizedLinear, other: QuantizedLinear) -> None:
    x = torch.randn(4, K)
    assert torch.equal(one(x), other(x))
    state, other_state = one.state_dict(), other.state_dict()
    assert list(state) == list(other_state)
    for name, value in state.items():
        assert value.dtype == other_state[name].dtype, name
        assert torch.equal(value, other_state[name]), name


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@with_options
def test_computes_the_product_with_the_quantized_weight(options: dict, bias: bool) -> None:
    linear = nn.Linear(K, N, bias=bias)
    layer = QuantizedLinear.from_linear(linear, **options)
    x = torch.randn(2, 3, K)
    weight = dk.quantize_weight(linear.weight, **options)
    assert torch.equal(layer(x), dk.quantized_matmul(x, weight, linear.bias))
    assert (layer.scheme, layer.in_features, layer.out_features) == (options["scheme"], K, N)
    assert layer.group_size == weight.group_size
    # A step of int4 in groups is a fifteenth of their range, here at most 2 / sqrt(K).
    assert (layer(x) - linear(x)).abs().max() < 0.5


@with_options
def test_weight_is_what_was_given(options: dict) -> None:
    weight = dk.quantize_weight(torch.randn(N, K), **options)
    layer = QuantizedLinear(weight)
    assert layer.weight[0] == weight[0]
    for name, mine, given in zip(weight._fields, layer.weight, weight, strict=True):
        assert mine is given or mine == given, name


def test_state_holds_plain_tensors_under_the_names_of_the_weight() -> None:
    assert set(make(OPTIONS["int8_dynamic"]).state_dict()) == {"qweight", "scale", "bias"}
    assert set(make(OPTIONS["int8_static"], bias=False).state_dict()) == {"qweight", "scale", "input_scale"}
    assert set(make(OPTIONS["int4_asymmetric"]).state_dict()) == {"qweight", "scale", "zero_point", "bias"}
    assert set(empty_like(make(OPTIONS["fp8_block"])).state_dict()) == {"qweight", "scale", "bias"}


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@with_options
def test_state_loads_strictly_into_a_fresh_layer(options: dict, assign: bool) -> None:
    layer = make(options)
    other = empty_like(layer)
    other.load_state_dict(layer.state_dict(), strict=True, assign=assign)
    assert_same(layer, other)
    assert not other.bias.requires_grad


@with_options
def test_state_loads_into_a_layer_on_meta(options: dict) -> None:
    layer = make(options, bias=False)
    with torch.device("meta"):
        other = empty_like(layer)
    assert all(tensor.is_meta for tensor in other.buffers())
    other.load_state_dict(layer.state_dict(), assign=True)
    assert_same(layer, other)
    real = empty_like(layer, device="meta").to_empty(device="cpu")
    real.load_state_dict(layer.state_dict())
    assert_same(layer, real)


def round_trip_torch(layer: QuantizedLinear, path: Path) -> QuantizedLinear:
    torch.save(layer.state_dict(), path)
    other = empty_like(layer)
    other.load_state_dict(torch.load(path, weights_only=True))
    return other


def round_trip_safetensors(layer: QuantizedLinear, path: Path) -> QuantizedLinear:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(layer.state_dict(), path)
    other = empty_like(layer)
    other.load_state_dict(safetensors.load_file(path))
    return other


def round_trip_module(layer: QuantizedLinear, path: Path) -> QuantizedLinear:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


ROUND_TRIPS: dict[str, Callable] = {
    "weights_only": round_trip_torch,
    "safetensors": round_trip_safetensors,
    "module": round_trip_module,
    "pickle": lambda layer, path: pickle.loads(pickle.dumps(layer)),
    "deepcopy": lambda layer, path: copy.deepcopy(layer),
}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@with_options
def test_survives(options: dict, round_trip: Callable, tmp_path: Path) -> None:
    layer = make(options)
    other = round_trip(layer, tmp_path / "state")
    assert_same(layer, other)
    assert other.qweight.data_ptr() != layer.qweight.data_ptr()


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float16),
    "there-and-back": lambda m: m.half().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@with_options
def test_casts_leave_codes_and_scales_as_they_are(options: dict, cast: Callable) -> None:
    layer = make(options)
    model = cast(nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer)))
    for (name, before), (_, after) in zip(layer.named_buffers(), model[1].named_buffers(), strict=True):
        assert after.dtype == before.dtype, name
        assert torch.equal(after, before), name
    assert model[1].bias.dtype == model[0].weight.dtype
    x = torch.randn(3, K, dtype=model[0].weight.dtype)
    assert torch.equal(model[1](x), dk.quantized_matmul(x, layer.weight, model[1].bias))


def test_a_move_and_a_cast_in_one_lose_nothing() -> None:
    layer = make(OPTIONS["int8_static"])
    scale = layer.scale.clone()
    layer.to("meta", torch.float16)
    assert layer.scale.is_meta
    assert layer.scale.dtype == layer.input_scale.dtype == torch.float32
    layer = make(OPTIONS["int8_static"])
    layer.scale = scale
    assert torch.equal(layer.to("cpu", torch.bfloat16).scale, scale)


def test_state_of_other_dtypes_is_refused_and_not_copied() -> None:
    layer, other = make(OPTIONS["fp8_block"]), make(OPTIONS["int8_dynamic"])
    before = copy.deepcopy(other)
    with pytest.raises(RuntimeError, match=r"0\.qweight: expected torch.int8, got torch.uint8 \[33, 75\]"):
        nn.Sequential(other).load_state_dict(nn.Sequential(layer).state_dict())
    half = {name: value.half() if name == "scale" else value for name, value in other.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"scale: expected torch.float32, got torch.float16"):
        other.load_state_dict(half, assign=True)
    assert_same(other, before)


def test_state_of_another_kind_is_refused() -> None:
    symmetric, asymmetric = (
        QuantizedLinear.from_linear(nn.Linear(K, N), "int4_dynamic", group_size=16, symmetric=s) for s in (True, False)
    )
    with pytest.raises(RuntimeError, match=r"Unexpected key.*zero_point"):
        symmetric.load_state_dict(asymmetric.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*zero_point"):
        asymmetric.load_state_dict(symmetric.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for scale"):
        empty_like(make(OPTIONS["int4_dynamic"])).load_state_dict(symmetric.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"qweight", "scale"'):
        make(OPTIONS["int8_dynamic"]).load_state_dict(nn.Linear(K, N).state_dict())


def test_columns_may_be_permuted() -> None:
    weight = dk.quantize_weight(torch.randn(N, K), "int4_weight_only", group_size=16)
    order = torch.randperm(K)
    layer = QuantizedLinear(weight._replace(input_order=order))
    x = torch.randn(2, K)
    torch.testing.assert_close(layer(x), x[:, order] @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
    empty = QuantizedLinear.empty(K, N, "int4_weight_only", group_size=16, bias=False, input_order=True)
    assert torch.equal(empty.input_order, torch.arange(K))
    empty.load_state_dict(layer.state_dict())
    assert_same(layer, empty)


def test_empty_has_the_sizes_and_places_that_were_asked_for() -> None:
    layer = QuantizedLinear.empty(K, N, "int4_dynamic", group_size=32, symmetric=False, dtype=torch.bfloat16)
    assert layer.bias.dtype == torch.bfloat16
    assert layer.zero_point.shape == layer.scale.shape == (N, 3)
    assert torch.equal(layer(torch.randn(2, K)), torch.zeros(2, N))
    assert QuantizedLinear.empty(K, N, "fp8_block", bias=False).bias is None
    assert QuantizedLinear.empty(0, 3, "int8_dynamic")(torch.randn(2, 0)).shape == (2, 3)


@with_options
def test_gradients_reach_the_input_and_on_request_the_bias(options: dict) -> None:
    layer = make(options)
    x = torch.randn(5, K, requires_grad=True)
    g = torch.randn(5, N)
    layer(x).backward(g)
    exact = g.double() @ layer.weight.dequantize().double()
    torch.testing.assert_close(x.grad.double(), exact, rtol=1e-5, atol=1e-5)
    assert layer.bias.grad is None
    layer.bias.requires_grad_()
    layer(x).backward(g)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


def test_from_linear_leaves_the_layer_alone_and_takes_its_mode() -> None:
    linear = nn.Linear(K, N).eval()
    layer = QuantizedLinear.from_linear(linear, "int8_dynamic")
    assert not layer.training
    assert linear.bias.requires_grad
    linear.bias.data.add_(1)
    assert not torch.equal(layer.bias, linear.bias)


@pytest.mark.parametrize("options", [OPTIONS["int8_static"], OPTIONS["int4_asymmetric"]], ids=["static", "int4"])
def test_compiles_and_exports_with_a_batch_of_any_size(options: dict) -> None:
    layer = make(options)
    trains = options["scheme"] == "int4_weight_only"
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 2, 9):
        x = torch.randn(rows, K, requires_grad=trains)
        out, expected = compiled(x), layer(x)
        assert torch.equal(out, expected)
        if trains:
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))
    for strict in (True, False):
        batch = torch.export.Dim("batch")
        program = torch.export.export(layer, (torch.randn(4, K),), dynamic_shapes=({0: batch},), strict=strict)
        x = torch.randn(7, K)
        assert torch.equal(program.module()(x), layer(x))
        assert set(program.state_dict) == set(layer.state_dict())


def test_functional_call_takes_other_tensors() -> None:
    layer, other = make(OPTIONS["int8_dynamic"]), make(OPTIONS["int8_dynamic"])
    x = torch.randn(2, K)
    assert torch.equal(torch.func.functional_call(layer, other.state_dict(), (x,)), other(x))


def test_repr_tells_the_scheme() -> None:
    assert "in_features=75, out_features=33, scheme=int8_dynamic, bias=True" in repr(make(OPTIONS["int8_dynamic"]))
    assert "group_size=16, symmetric=False" in repr(make(OPTIONS["int4_asymmetric"]))


def test_wrong_arguments_are_named() -> None:
    weight = dk.quantize_weight(torch.randn(N, K), "int8_dynamic")
    with pytest.raises(TypeError, match=r"weight: expected a QuantizedWeight, got a tensor"):
        QuantizedLinear(torch.randn(N, K))
    with pytest.raises(ValueError, match=r"bias: expected shape \[33\], got \[5\]"):
        QuantizedLinear(weight, torch.zeros(5))
    with pytest.raises(TypeError, match=r"bias: expected a tensor or None"):
        QuantizedLinear(weight, 3.0)
    with pytest.raises(ValueError, match=r"weight\.scale: expected torch.float32"):
        QuantizedLinear(weight._replace(scale=weight.scale.half()))
    with pytest.raises(ValueError, match=r"weight\.input_scale: expected a tensor for int8_static"):
        QuantizedLinear(weight._replace(scheme="int8_static"))
    with pytest.raises(TypeError, match=r"linear: expected an nn.Linear, got Conv1d"):
        QuantizedLinear.from_linear(nn.Conv1d(1, 1, 1), "int8_dynamic")
    doubled = nn.Linear(2, 2)
    doubled.forward = lambda x: 2 * x
    with pytest.raises(ValueError, match=r"linear: expected one with the forward of nn\.Linear, got Linear with"):
        QuantizedLinear.from_linear(doubled, "int8_dynamic")
    with pytest.raises(ValueError, match=r"scheme: expected one of .*, got 'int2'"):
        QuantizedLinear.from_linear(nn.Linear(K, N), "int2")
    with pytest.raises(ValueError, match=r"group_size: expected a multiple of 16"):
        QuantizedLinear.empty(K, N, "int4_dynamic", group_size=17)
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 75\], got \[2, 74\]"):
        QuantizedLinear(weight)(torch.randn(2, 74))
