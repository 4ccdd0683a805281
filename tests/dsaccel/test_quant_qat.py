"""Training through quantized products: prepare and convert agree bit for bit, and gradients follow the formulas."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dskernels as dk
from dsaccel.modules import SlidingWindowLM
from dsaccel.quant import QATLinear, QuantizedLinear, convert, prepare_qat
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, dict] = {
    "int8_dynamic": {"scheme": "int8_dynamic"},
    "int8_static": {"scheme": "int8_static"},
    "int8_weight_only": {"scheme": "int8_weight_only"},
    **{f"int4_dynamic-{g}": {"scheme": "int4_dynamic", "group_size": g} for g in (16, 32, 128, -1)},
    **{f"int4_weight_only-{g}": {"scheme": "int4_weight_only", "group_size": g} for g in (16, 48, 1024)},
    "int4_asymmetric": {"scheme": "int4_dynamic", "group_size": 32, "symmetric": False},
    "fp8_block": {"scheme": "fp8_block"},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
K, N = 145, 37
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def as_codes_stand_for(x: Tensor, scheme: str, step: Tensor | None) -> Tensor:
    """The activations as the product sees them: what it gives for a weight of ones on the diagonal."""
    if scheme.endswith("weight_only"):
        return x.double()
    if scheme == "fp8_block":
        one = torch.ones((), dtype=torch.float8_e4m3fn).view(torch.uint8)
        blocks = -(-x.shape[-1] // 128)
        weight = dk.QuantizedWeight(scheme, torch.eye(K, dtype=torch.uint8) * one, torch.ones(blocks, blocks), K, 128)
    else:
        # int4 rounds activations as int8 does.
        scheme = scheme.replace("int4", "int8")
        weight = dk.QuantizedWeight(scheme, torch.eye(K, dtype=torch.int8), torch.ones(K), K, K, None, step)
    return dk.quantized_matmul(x if x.dtype == torch.float64 else x.float(), weight).double()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@with_options
def test_prepare_and_convert_agree_bit_for_bit(options: dict, dtype: torch.dtype, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(K, N, bias=bias), nn.Tanh(), nn.Linear(N, K)).to(dtype)
    prepare_qat(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(6, K).to(dtype)).float().square().mean().backward()
        optimizer.step()
    x = torch.randn(2, 5, K).to(dtype)
    model.eval()
    with_gradients = model(x)
    with torch.no_grad():
        without = model(x)
    report = convert(model)
    assert {layer.became for layer in report.layers} == {options["scheme"]}
    assert all(isinstance(model[i], QuantizedLinear) for i in (0, 2))
    out = model(x)
    assert out.dtype == dtype
    assert torch.equal(out, with_gradients)
    assert torch.equal(out, without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@with_options
def test_they_agree_under_autocast(options: dict, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, 3))
    prepare_qat(model, **options)
    x = torch.randn(4, K)
    with torch.autocast("cpu", dtype):
        model(x)
        model.eval()
        before = model(x)
        convert(model)
        assert torch.equal(model(x), before)


@with_options
def test_forward_is_the_quantized_product(options: dict) -> None:
    linear = nn.Linear(K, N)
    layer = QATLinear(linear, **options).eval()
    x = torch.randn(3, K)
    if layer.observer is not None:
        layer.train()(x)
        options = {**options, "input_scale": x.abs().max() / 127}
    expected = dk.quantized_matmul(x, dk.quantize_weight(linear.weight, **options), linear.bias)
    assert torch.equal(layer(x), expected)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@with_options
def test_gradients_are_those_of_the_formulas(options: dict, dtype: torch.dtype) -> None:
    layer = QATLinear(nn.Linear(K, N, dtype=dtype), **options)
    x = torch.randn(2, 7, K).to(dtype)
    x[0, 3] = 0
    if layer.observer is not None:
        layer(x / 2)
        layer.eval()
    x.requires_grad_()
    g = torch.randn(2, 7, N).to(dtype)
    layer(x).backward(g)

    step = None if layer.observer is None else layer.observer.step()
    seen = as_codes_stand_for(x.detach(), options["scheme"], step)
    exact = g.double() @ layer.quantized_weight().dequantize(torch.float64)
    plain = g @ layer.quantized_weight().dequantize(dtype)
    if step is not None:
        within = x.detach().double().abs() <= 127.5 * step.double()
        assert 0 < (~within).sum() < within.numel() / 2
        exact, plain = exact * within, plain * within
    assert_close_to_reference(x.grad, exact, plain, "grad_x")
    rows, grad_rows = seen.flatten(0, 1), g.flatten(0, 1)
    exact = grad_rows.double().T @ rows
    assert_close_to_reference(layer.weight.grad, exact, grad_rows.T @ rows.to(dtype), "grad_W")
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    exact = grad_rows.double().sum(0)
    assert_close_to_reference(layer.bias.grad, exact, grad_rows.sum(0), "grad_bias")


def test_without_rounding_the_gradients_are_those_of_linear() -> None:
    # Weights and inputs that are codes already: nothing is rounded, and all of F.linear's gradients must come out.
    linear = nn.Linear(K, N)
    linear.weight.data = torch.randint(-127, 128, (N, K)).float()
    linear.weight.data[:, 0] = 127.0
    x = torch.randint(-127, 128, (9, K)).float()
    x[:, 0] = 127.0
    layer = QATLinear(copy.deepcopy(linear), "int8_dynamic")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    g = torch.randn(9, N)
    out, expected = layer(a), linear(b)
    torch.testing.assert_close(out, expected)
    out.backward(g)
    expected.backward(g)
    for mine, plain in ((a, b), (layer.weight, linear.weight), (layer.bias, linear.bias)):
        torch.testing.assert_close(mine.grad, plain.grad)


@pytest.mark.parametrize("scale", [1e-12, 1e-30, 1e30])
def test_rows_of_any_magnitude_have_gradients(scale: float) -> None:
    layer = QATLinear(nn.Linear(16, 4, bias=False), "int8_dynamic")
    x = torch.randn(3, 16)
    g = torch.randn(3, 4)
    grads = []
    for factor in (1.0, scale):
        layer.weight.grad = None
        layer(x * factor).backward(g / factor)
        grads.append(layer.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(K,), (0, K), (1, 1, K)], ids=["vector", "no-rows", "one-row"])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_weight_only", "fp8_block"])
def test_inputs_of_any_rank(shape: tuple[int, ...], scheme: str) -> None:
    layer = QATLinear(nn.Linear(K, N), scheme)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == (*shape[:-1], N)
    out.sum().backward()
    seen = as_codes_stand_for(x.detach(), scheme, None).reshape(-1, K)
    expected = torch.ones(len(seen), N).double().T @ seen
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_frozen_parameters_get_no_gradient() -> None:
    layer = QATLinear(nn.Linear(K, N), "int8_dynamic")
    layer.weight.requires_grad_(False)
    x = torch.randn(2, K, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    layer.weight.requires_grad_()
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


def test_what_follows_may_write_into_the_result() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(inplace=True))
    x = torch.randn(5, K)
    expected = QuantizedLinear.from_linear(model[0], "int8_dynamic")(x).relu()
    prepare_qat(model, "int8_dynamic")
    out = model(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.equal(model[0].bias.grad, (expected > 0).float().sum(0))


def test_the_static_step_is_learned_in_training_and_frozen_in_inference() -> None:
    layer = QATLinear(nn.Linear(4, 3), "int8_static", decay=0.75)
    batches = [torch.randn(5, 4) * width for width in (1.0, 4.0, 0.5)]
    average = batches[0].abs().max()
    for x in batches:
        layer(x)
        average = 0.75 * average + 0.25 * x.abs().max()
    step = layer.observer.step()
    torch.testing.assert_close(step, average / 127)
    layer.eval()
    layer(torch.randn(5, 4) * 100)
    assert torch.equal(layer.observer.step(), step)
    overflowed = torch.full((1, 4), torch.inf)
    assert not layer.train()(overflowed).isfinite().any()
    assert torch.equal(layer.observer.step(), step)


def test_a_static_layer_without_a_batch_is_named() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4))}).eval()
    prepare_qat(model, "int8_static")
    with pytest.raises(ValueError, match=r"body\.0: it has seen no batch in training"):
        model["body"](torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"body\.0: it has seen no batch"):
        convert(model)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4))})
    prepare_qat(model, "int8_dynamic")
    model["body"][0].weight.data[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"body\.0: weight: expected finite values in float32, got 1 that are not"):
        model["body"](torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"body\.0: its weight is not finite"):
        convert(model)


@pytest.mark.parametrize("scheme", ["int8_static", "int4_weight_only"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_what_is_trained_is_what_is_converted(scheme: str, autocast: bool) -> None:
    teacher, student = (nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 4)) for _ in range(2))
    x = torch.randn(256, 16)
    with torch.no_grad():
        y = teacher(x)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    prepare_qat(student, scheme, group_size=16 if scheme.startswith("int4") else None)
    losses = []
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.mse_loss(student(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(p.grad.dtype == torch.float32 for p in student.parameters())
    convert(student.eval())
    assert losses[-1] < 0.2 * losses[0]
    assert F.mse_loss(student(x), y) < 0.2 * losses[0]


def test_a_tied_head_trains_the_weight_that_the_embedding_has() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(30, 16), "head": nn.Linear(16, 30, bias=False)})
    model["head"].weight = model["embed"].weight
    prepare_qat(model, "int8_dynamic")
    assert model["head"].weight is model["embed"].weight
    model["head"](model["embed"](torch.randint(30, (4, 5)))).logsumexp(-1).sum().backward()
    assert model["embed"].weight.grad.abs().sum(1).count_nonzero() == 30
    assert convert(model).layers[1].reason == "tied to embed, which keeps its 1920 bytes of weight"


def test_a_language_model_trains_saves_and_loads() -> None:
    def make() -> SlidingWindowLM:
        model = SlidingWindowLM(vocab_size=30, dim=16, num_layers=1, num_heads=2, window=4)
        prepare_qat(model, "int8_static")
        return model

    model, other = make(), make()
    tokens = torch.randint(30, (2, 9))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None for p in model.parameters())
    other.load_state_dict(model.state_dict())
    models = [m.eval() for m in (model, other, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    outs = [m(tokens) for m in models]
    assert all(torch.equal(out, outs[0]) for out in outs)
    half = copy.deepcopy(model).half().float()
    layer = next(m for m in half.modules() if isinstance(m, QATLinear))
    original = next(m for m in model.modules() if isinstance(m, QATLinear))
    assert torch.equal(layer.observer.step(), original.observer.step())


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_weight_only"])
def test_compiles_in_training(scheme: str) -> None:
    layer = QATLinear(nn.Linear(32, 5), scheme)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(rows, 32)
        grads = []
        for module in (layer, compiled):
            layer.zero_grad()
            module(x).square().sum().backward()
            grads.append(layer.weight.grad)
        torch.testing.assert_close(grads[0], grads[1])


def test_the_filter_and_the_report() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "conv": nn.Conv1d(1, 1, 1)})
    report = prepare_qat(model, "int8_dynamic", filter=lambda name, module: name == "a")
    assert report.layers[0].became == "int8_dynamic in training"
    assert report.kept == {"b": "the filter says so", "conv": "convolutions stay in floating point"}
    assert "scheme=int8_dynamic" in repr(model)


def test_wrong_arguments_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"scheme: expected one of .*, got 'int2'"):
        prepare_qat(model, "int2")
    with pytest.raises(ValueError, match=r"group_size: expected a multiple of 16"):
        prepare_qat(model, "int4_dynamic", group_size=5)
    with pytest.raises(ValueError, match=r"symmetric: expected True for int8_dynamic"):
        prepare_qat(model, "int8_dynamic", symmetric=False)
    with pytest.raises(TypeError, match=r"filter: expected a function or None"):
        prepare_qat(model, "int8_dynamic", filter=1)
    with pytest.raises(ValueError, match=r"decay: expected a number from 0 to below 1, got 2"):
        prepare_qat(model, "int8_static", decay=2)
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        prepare_qat("model", "int8_dynamic")
    with pytest.raises(TypeError, match=r"linear: expected an nn\.Linear, got ReLU"):
        QATLinear(nn.ReLU(), "int8_dynamic")
    with pytest.raises(ValueError, match=r"linear: expected one with the forward of nn\.Linear, got QATLinear"):
        QATLinear(QATLinear(model[0], "int8_dynamic"), "int8_dynamic")
    assert type(model[0]) is nn.Linear
