"""Low-rank updates are trained through frozen quantized weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsaccel.quant import LoRALinear, QuantizedLinear, add_lora_, quantize_
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ("int8_dynamic", "int8_weight_only", "int4_dynamic", "int4_weight_only", "fp8_block")
K, N, R = 50, 34, 5
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def make(scheme: str = "int4_weight_only", **options) -> LoRALinear:
    layer = LoRALinear(QuantizedLinear.from_linear(nn.Linear(K, N), scheme), R, **options)
    nn.init.normal_(layer.lora_B)
    return layer


@every_scheme
def test_starts_as_the_layer_below(scheme: str) -> None:
    base = QuantizedLinear.from_linear(nn.Linear(K, N), scheme)
    layer = LoRALinear(base, R)
    x = torch.randn(2, 3, K)
    assert torch.equal(layer(x), base(x))
    assert layer.lora_A.shape == (R, K)
    assert layer.lora_B.shape == (N, R)
    # As nn.Linear's weight: uniform within 1 / sqrt(K).
    assert 0.9 / math.sqrt(K) < layer.lora_A.abs().max() <= 1 / math.sqrt(K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [None, 12])
def test_adds_the_update_of_equation_3(alpha: int | None, dtype: torch.dtype) -> None:
    layer = make(alpha=alpha)
    x = torch.randn(7, K).to(dtype)
    scaling = 1.0 if alpha is None else alpha / R
    a, b, base = layer.lora_A.double(), layer.lora_B.double(), layer.base(x)
    exact = base.double() + scaling * (x.double() @ a.T) @ b.T
    plain = base + scaling * (x @ a.to(dtype).T) @ b.to(dtype).T
    assert layer(x).dtype == dtype
    assert_close_to_reference(layer(x), exact, plain)


@every_scheme
def test_gradients_reach_the_update_and_the_input(scheme: str) -> None:
    layer = make(scheme, alpha=2 * R)
    x = torch.randn(7, K, requires_grad=True)
    g = torch.randn(7, N)
    layer(x).backward(g)
    x64, g64, a, b = x.detach().double(), g.double(), layer.lora_A.double(), layer.lora_B.double()
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(layer.lora_A.grad.double(), 2 * (g64 @ b).T @ x64, **close)
    torch.testing.assert_close(layer.lora_B.grad.double(), 2 * g64.T @ (x64 @ a.T), **close)
    weight = layer.base.weight.dequantize().double() + 2 * b @ a
    torch.testing.assert_close(x.grad.double(), g64 @ weight, **close)
    assert layer.base.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merged_is_a_plain_that_computes_the_same(dtype: torch.dtype) -> None:
    layer = make("int8_weight_only", alpha=3).eval()
    linear = layer.merged(dtype)
    assert type(linear) is nn.Linear
    assert linear.weight.dtype == dtype
    assert not linear.training
    x = torch.randn(4, K)
    torch.testing.assert_close(linear(x.to(dtype)).float(), layer(x), rtol=1e-4, atol=1e-4)
    without_bias = LoRALinear(QuantizedLinear.from_linear(nn.Linear(K, N, bias=False), "int8_dynamic"), R)
    assert without_bias.merged().bias is None


def test_dropout_touches_the_update_alone_and_only_in_training() -> None:
    layer = make(dropout=0.5)
    x = torch.randn(4, K)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    nn.init.zeros_(layer.lora_B)
    assert torch.equal(layer.train()(x), layer.base(x))


@every_scheme
def test_a_model_learns_through_frozen_codes(scheme: str) -> None:
    model = nn.Sequential(nn.Embedding(30, 32), nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 30))
    quantize_(model, scheme)
    names = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    report = add_lora_(model, 4, alpha=8)
    assert list(report.replaced) == names
    assert {layer.became for layer in report.layers if layer.became} == {f"{scheme} + rank 4"}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{side}" for name in names for side in "AB"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    tokens = torch.randint(30, (2, 9))
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trained), name


def test_updates_alone_make_a_small_state_dict() -> None:
    model = nn.Sequential(nn.Linear(K, N))
    quantize_(model, "int4_weight_only")
    other = copy.deepcopy(model)
    add_lora_(model, R)
    add_lora_(other, R)
    nn.init.normal_(model[0].lora_B)
    state = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert set(state) == {"0.lora_A", "0.lora_B"}
    assert other.load_state_dict(state, strict=False).unexpected_keys == []
    x = torch.randn(2, K)
    assert torch.equal(other(x), model(x))


def test_trains_under_autocast_and_after_casts() -> None:
    layer = make()
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(3, K)).float().sum().backward()
    assert layer.lora_A.grad.dtype == torch.float32
    scale = layer.base.scale.clone()
    layer.half()
    assert layer.lora_A.dtype == torch.float16
    assert torch.equal(layer.base.scale, scale)
    assert layer(torch.randn(3, K).half()).dtype == torch.float16


def test_compiles() -> None:
    layer = make("int4_weight_only")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 6):
        x = torch.randn(rows, K)
        torch.testing.assert_close(compiled(x), layer(x))


def test_hooks_move_to_the_new_layer_and_are_called_once() -> None:
    model = nn.Sequential(nn.Linear(K, N))
    quantize_(model, "int8_dynamic")
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(module))
    add_lora_(model, R)
    model(torch.randn(2, K))
    assert seen == [model[0]]


def test_the_report_says_what_got_no_update() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(4, 4), "conv": nn.Conv1d(1, 1, 1)})
    quantize_(model, "int8_dynamic")
    plain = model["plain"] = nn.Linear(4, 4)
    report = add_lora_(model, 2, filter=lambda name, module: name != "c", freeze=False)
    assert model["a"] is model["b"]
    assert isinstance(model["a"], LoRALinear)
    assert report.layers[0].reason == "also b"
    assert report.kept == {
        "c": "the filter says so of c",
        "conv": "it is not a QuantizedLinear",
        "plain": "it is not a QuantizedLinear",
    }
    assert plain.weight.requires_grad
    report = add_lora_(model, 3)
    assert report.kept["a"] == "it is the update itself"
    assert report.kept["a.base"] == "it has an update already"
    assert report.replaced == ("c",)
    assert not plain.weight.requires_grad
    assert model["a"].lora_A.requires_grad


def test_wrong_arguments_are_named() -> None:
    base = QuantizedLinear.from_linear(nn.Linear(K, N), "int8_dynamic")
    with pytest.raises(TypeError, match=r"base: expected a QuantizedLinear, got Linear"):
        LoRALinear(nn.Linear(K, N), R)
    with pytest.raises(TypeError, match=r"rank: expected an int, got 2\.5"):
        LoRALinear(base, 2.5)
    with pytest.raises(ValueError, match=r"rank: expected an int of at least 1, got 0"):
        LoRALinear(base, 0)
    with pytest.raises(TypeError, match=r"alpha: expected a number or None"):
        LoRALinear(base, R, alpha="a")
    with pytest.raises(TypeError, match=r"dropout: expected a number"):
        LoRALinear(base, R, dropout=None)
    with pytest.raises(ValueError, match=r"dropout: expected a number from 0 to below 1, got 1"):
        LoRALinear(base, R, dropout=1)
    with pytest.raises(TypeError, match=r"dtype: expected a torch\.dtype"):
        LoRALinear(base, R, dtype="float32")
    with pytest.raises(ValueError, match=r"dtype: expected float32, .*got torch\.int8"):
        LoRALinear(base, R, dtype=torch.int8)
    model = nn.Sequential(nn.Linear(K, N))
    with pytest.raises(ValueError, match=r"model: expected a QuantizedLinear that can be adapted"):
        add_lora_(model, R)
    assert model[0].weight.requires_grad
    with pytest.raises(TypeError, match=r"filter: expected a function or None"):
        add_lora_(model, R, filter=3)
    with pytest.raises(TypeError, match=r"freeze: expected True or False"):
        add_lora_(model, R, freeze=None)
    with pytest.raises(ValueError, match=r"rank: expected"):
        add_lora_(model, -1)
    with pytest.raises(ValueError, match=r"\(the model itself\).*see LoRALinear"):
        add_lora_(base, R)
