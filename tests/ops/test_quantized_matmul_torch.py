"""quantized_matmul as a citizen of PyTorch: tracing, export, autocast, counting, tensors without data."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from quantized_matmul_oracle import CASES, draw_rows, draw_weight
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from dskernels.quantized_matmul.schema import backward_op, forward_op
from dskernels.quantized_matmul.weight import SCHEMES

ORDERED = [*CASES, "sorted"]


def make(name: str, out_features: int = 21, columns: int = 70) -> dk.QuantizedWeight:
    if name == "sorted":
        weight = draw_weight(CASES["int4_dynamic_asymmetric"], out_features, columns)
        return weight._replace(input_order=torch.randperm(columns))
    return draw_weight(CASES[name], out_features, columns)


def operands(weight: dk.QuantizedWeight, bias: Tensor | None = None) -> tuple:
    """The arguments of the forward operator after x."""
    _, qweight, scale, _, group, zero_point, input_scale, input_order = weight
    return qweight, scale, zero_point, input_scale, input_order, bias, SCHEMES.index(weight.scheme), group


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ORDERED), ("int8_dynamic", torch.bfloat16), ("fp8_block", torch.float16)],
    ids=str,
)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    weight, bias = make(name), torch.randn(21)
    x, grad = draw_rows(2, 3, 70, dtype=dtype), torch.randn(2, 3, 21).to(dtype)
    leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
    torch.library.opcheck(forward_op, (leaves[0], *operands(weight, leaves[1])))
    torch.library.opcheck(forward_op, (x.transpose(0, 1), *operands(weight)))
    qweight, scale, zero_point, _, order, _, scheme, group = operands(weight)
    arguments = grad.transpose(0, 1), qweight, scale, zero_point, order, scheme, group, 70
    torch.library.opcheck(backward_op, arguments)


@pytest.mark.parametrize("name", ["int8_dynamic", "int4_weight_only_asymmetric", "fp8_block"])
def test_opcheck_of_nothing(name: str) -> None:
    for rows, out_features, columns in ((0, 21, 70), (3, 0, 70), (3, 21, 0)):
        weight = make(name, out_features, columns)
        torch.library.opcheck(forward_op, (torch.randn(rows, columns, requires_grad=True), *operands(weight)))


def layer(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor, backend: str | None = None) -> Tensor:
    return dk.quantized_matmul(x.sin(), weight, bias, backend=backend).tanh()


def value_and_grads(function, x: Tensor, weight: dk.QuantizedWeight, bias: Tensor, *extra) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, bias)]
    out = function(leaves[0], weight, leaves[1], *extra)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_all_close(results: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(results, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int8_dynamic", "int8_static", "fp8_block", "sorted"])
def test_compile_fullgraph_dynamic(name: str, backend: str) -> None:
    """The weight is an argument like others; neither more rows nor another weight compile again in vain."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape, columns in (((2, 5), 70), ((4, 33), 70), ((3, 2), 144)):
        weight, bias = make(name, 21, columns), torch.randn(21)
        arguments = draw_rows(*shape, columns), weight, bias, backend
        assert_all_close(value_and_grads(compiled, *arguments), value_and_grads(layer, *arguments))


@pytest.mark.parametrize("name", ["int8_dynamic", "sorted"])
def test_inductor(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    weight, bias = make(name), torch.randn(21)
    for rows in (2, 9):
        arguments = draw_rows(rows, 70), weight, bias
        if dk.explain(dk.quantized_matmul, *arguments).chosen == "reference":
            pytest.skip("inductor's code for plain PyTorch is not ours to test")
        assert_all_close(value_and_grads(compiled, *arguments), value_and_grads(layer, *arguments))


class Linear(torch.nn.Module):
    """A weight in buffers, as modules hold it, put together when it is used."""

    def __init__(self, weight: dk.QuantizedWeight, backend: str | None = None) -> None:
        super().__init__()
        self.scheme, self.sizes, self.backend = weight.scheme, weight[3:5], backend
        self.bias = torch.nn.Parameter(torch.randn(weight.out_features))
        self.names = [name for name, field in weight._asdict().items() if isinstance(field, Tensor)]
        for name in self.names:
            self.register_buffer(name, getattr(weight, name))

    def forward(self, x: Tensor) -> Tensor:
        in_features, group = self.sizes
        fields = {name: getattr(self, name) for name in self.names}
        weight = dk.QuantizedWeight(self.scheme, in_features=in_features, group_size=group, **fields)
        return dk.quantized_matmul(x, weight, self.bias, backend=self.backend)


class Holder(torch.nn.Module):
    """A weight that is an attribute as it is."""

    def __init__(self, weight: dk.QuantizedWeight, backend: str | None = None) -> None:
        super().__init__()
        self.weight, self.backend = weight, backend

    def forward(self, x: Tensor) -> Tensor:
        return dk.quantized_matmul(x, self.weight, backend=self.backend)


@pytest.mark.parametrize("module", [Linear, Holder])
@pytest.mark.parametrize("name", ["int8_dynamic", "int4_weight_only_asymmetric"])
def test_compiled_modules(name: str, module: type[torch.nn.Module], backend: str) -> None:
    torch._dynamo.reset()
    eager = module(make(name), backend)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 2, 40):
        x = draw_rows(rows, 70)
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("module", [Linear, Holder])
@pytest.mark.parametrize("name", ["int8_static", "sorted"])
def test_export_with_dynamic_rows(name: str, module: type[torch.nn.Module], strict: bool, backend: str) -> None:
    eager = module(make(name), backend)
    rows = torch.export.Dim("rows", min=1, max=512)
    program = torch.export.export(eager, (draw_rows(6, 70),), dynamic_shapes={"x": {0: rows}}, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for again in (program, torch.export.load(file)):
        for number in (1, 5, 40):
            x = draw_rows(number, 70)
            torch.testing.assert_close(again.module()(x), eager(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ORDERED)
def test_state_of_a_module(name: str, tmp_path) -> None:
    one, other = Linear(make(name)), Linear(make(name))
    x = draw_rows(5, 70)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for assign in (False, True):
        fresh = copy.deepcopy(other)
        fresh.load_state_dict(state, strict=True, assign=assign)
        assert torch.equal(fresh(x), one(x))
    assert torch.equal(copy.deepcopy(one)(x), one(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ORDERED)
def test_autocast(name: str, dtype: torch.dtype, backend: str) -> None:
    """x is rounded beforehand; the arithmetic and its gradient are not lowered."""
    weight, bias, x = make(name), torch.randn(21), draw_rows(5, 70)
    expected = dk.quantized_matmul(x.to(dtype), weight, bias, backend=backend)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        out = dk.quantized_matmul(leaf, weight, bias, backend=backend)
        direct = forward_op(x, *operands(weight, bias))
        wide = dk.quantized_matmul(x.double(), weight, bias)
    assert torch.equal(out, expected)
    assert torch.equal(dk.quantized_matmul(x.to(dtype), weight, bias), direct)
    assert wide.dtype == torch.float64
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    rounded = x.to(dtype).requires_grad_()
    plain = dk.quantized_matmul(rounded, weight, bias, backend=backend)
    (right,) = torch.autograd.grad(plain, rounded, torch.ones_like(out))
    assert grad.dtype == torch.float32
    assert torch.equal(grad, right.float())


def test_autocast_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    arguments = draw_rows(5, 70), make("int4_dynamic"), torch.randn(21)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = compiled(*arguments), layer(*arguments)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["int8_dynamic", "int4_weight_only"])
def test_activation_checkpointing(name: str, backend: str) -> None:
    def checkpointed(*arguments) -> Tensor:
        return checkpoint(layer, *arguments, use_reentrant=False)

    arguments = draw_rows(5, 70), make(name), torch.randn(21), backend
    results, right = value_and_grads(checkpointed, *arguments), value_and_grads(layer, *arguments)
    assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_inference_mode_and_no_grad(name: str, backend: str) -> None:
    weight, bias = make(name), torch.randn(21, requires_grad=True)
    x = draw_rows(5, 70).requires_grad_()
    expected = dk.quantized_matmul(x, weight, bias, backend=backend).detach()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = dk.quantized_matmul(x, weight, bias, backend=backend)
        assert not out.requires_grad
        assert torch.equal(out.clone(), expected)


def to_device(weight: dk.QuantizedWeight, device: str) -> dk.QuantizedWeight:
    return dk.QuantizedWeight(*(field.to(device) if isinstance(field, Tensor) else field for field in weight))


@pytest.mark.parametrize("name", ORDERED)
def test_tensors_without_data(name: str) -> None:
    weight, bias = to_device(make(name), "meta"), torch.randn(21, device="meta")
    x = torch.randn(2, 5, 70, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for out in (forward_op(x, *operands(weight, bias)), dk.quantized_matmul(x, weight, bias)):
        assert (out.shape, out.dtype, out.device.type) == ((2, 5, 21), torch.bfloat16, "meta")
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert (grad.shape, grad.dtype) == ((2, 5, 70), torch.bfloat16)
    assert weight.dequantize(torch.bfloat16).shape == (21, 70)


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors(name: str) -> None:
    case = CASES[name]
    with FakeTensorMode():
        options = {"group_size": 32, "symmetric": case.symmetric} if case.is_int4 else {}
        step = {"input_scale": torch.ones(())} if name == "int8_static" else {}
        weight = dk.quantize_weight(torch.randn(21, 70), case.scheme, **options, **step)
        out = dk.quantized_matmul(torch.randn(3, 70), weight)
    assert (out.shape, out.dtype) == ((3, 21), torch.float32)
    real = make(name)
    for field, other in zip(weight, real, strict=True):
        if isinstance(other, Tensor):
            assert (field.shape, field.dtype) == (other.shape, other.dtype)
        else:
            assert field == other


@pytest.mark.parametrize("name", ORDERED)
def test_operations(name: str) -> None:
    x = torch.randn(2, 5, 70, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = forward_op(x, *operands(make(name)))
    # A product and a sum for each row, channel and feature; of int4, two codes in a byte, too.
    assert counter.get_total_flops() == 2 * 10 * 21 * 70
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 10 * 21 * 70
