"""Gradients of quantized_matmul: straight through the rounding of x, which is to say, those of a float layer."""

from __future__ import annotations

import pytest
import torch
from quantized_matmul_oracle import CASES, draw_rows, draw_weight, stood_for
from torch import Tensor

import dskernels as dk
from dskernels.quantized_matmul.schema import backward_op
from dskernels.quantized_matmul.weight import SCHEMES
from dskernels.testing import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients(
    x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None, grad: Tensor, backend: str
) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, bias) if tensor is not None]
    out = dk.quantized_matmul(leaves[0], weight, *leaves[1:], backend=backend)
    return torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_float_weight(name: str, dtype: torch.dtype, backend: str) -> None:
    for rows, out_features, columns in ((1, 1, 1), (1, 37, 100), (7, 130, 33), (40, 17, 300)):
        weight = draw_weight(CASES[name], out_features, columns)
        matrix = torch.from_numpy(stood_for(weight))
        x, grad = draw_rows(rows, columns, dtype=dtype), torch.randn(rows, out_features).to(dtype)
        for bias in (None, *(torch.randn(out_features).to(kind) for kind in (*DTYPES, torch.float64))):
            grad_x, *rest = gradients(x, weight, bias, grad, backend)
            assert_close_to_reference(grad_x, grad.double() @ matrix, grad @ matrix.to(dtype), "gradient of x")
            for grad_bias in rest:
                plain = grad.sum(0).to(bias.dtype) if bias.dtype != torch.float64 else grad.float().sum(0).double()
                # In float32 however precise the bias is, as the sum of its gradients.
                exact = grad.double().sum(0)
                if bias.dtype == torch.float64:
                    torch.testing.assert_close(grad_bias, exact, rtol=1e-5, atol=1e-5)
                else:
                    assert_close_to_reference(grad_bias, exact, plain, "gradient of the bias")


@pytest.mark.parametrize("name", CASES)
def test_sorted_columns(name: str, backend: str) -> None:
    weight = draw_weight(CASES[name], 37, 100)._replace(input_order=torch.randperm(100))
    matrix = torch.from_numpy(stood_for(weight))
    grad = torch.randn(5, 37)
    (grad_x,) = gradients(draw_rows(5, 100), weight, None, grad, backend)
    assert_close_to_reference(grad_x, grad.double() @ matrix, grad @ matrix.float())


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_asked_for(name: str, backend: str) -> None:
    weight, x, bias = draw_weight(CASES[name], 37, 100), draw_rows(5, 100), torch.randn(37)
    grad = torch.randn(5, 37)
    both = gradients(x, weight, bias, grad, backend)
    out = dk.quantized_matmul(x, weight, bias, backend=backend)
    assert not out.requires_grad
    out = dk.quantized_matmul(x.requires_grad_(), weight, bias, backend=backend)
    assert torch.equal(torch.autograd.grad(out, x, grad)[0], both[0])
    out = dk.quantized_matmul(x.detach(), weight, bias.requires_grad_(), backend=backend)
    assert torch.equal(torch.autograd.grad(out, bias, grad)[0], both[1])


@pytest.mark.parametrize("name", CASES)
def test_a_weight_has_no_gradient(name: str, backend: str) -> None:
    """Not even where its scale asks for one."""
    weight = draw_weight(CASES[name], 9, 40)
    asking = weight._replace(scale=weight.scale.clone().requires_grad_())
    assert not dk.quantized_matmul(torch.randn(3, 40), asking, backend=backend).requires_grad
    x = torch.randn(3, 40, requires_grad=True)
    dk.quantized_matmul(x, asking, backend=backend).sum().backward()
    assert asking.scale.grad is None


@pytest.mark.parametrize("name", CASES)
def test_empty(name: str, backend: str) -> None:
    for shape, out_features in (((0, 40), 9), ((2, 0, 40), 9), ((3, 40), 0), ((3, 0), 9)):
        weight, bias = draw_weight(CASES[name], out_features, shape[-1]), torch.randn(out_features)
        x, grad = torch.randn(shape), torch.randn(*shape[:-1], out_features)
        grad_x, grad_bias = gradients(x, weight, bias, grad, backend)
        assert torch.equal(grad_x, torch.zeros(shape))
        torch.testing.assert_close(grad_bias, grad.reshape(-1, out_features).sum(0) if grad.numel() else bias * 0)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 1, 5)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_odd_gradients(name: str, shape: tuple[int, ...], backend: str) -> None:
    """Leading dimensions, and gradients that are expanded or strided."""
    weight, x = draw_weight(CASES[name], 20, 65), draw_rows(*shape, 65)
    for grad in (torch.ones(()).expand(*shape, 20), torch.randn(20, *shape).movedim(0, -1)):
        results = gradients(x, weight, torch.zeros(20), grad, backend)
        expected = gradients(x, weight, torch.zeros(20), grad.contiguous(), backend)
        assert results[0].shape == (*shape, 65)
        assert torch.equal(results[0], expected[0])
        torch.testing.assert_close(results[1], expected[1])


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("weight_only", "only_asymmetric"))])
def test_gradcheck(name: str) -> None:
    """Of the schemes that round no activations; the others have the same gradient, which is not their slope."""
    weight = draw_weight(CASES[name], 4, 33)
    x, bias = torch.randn(3, 33, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for ordered in (weight, weight._replace(input_order=torch.randperm(33))):

        def call(x: Tensor, bias: Tensor, weight: dk.QuantizedWeight = ordered) -> Tensor:
            return dk.quantized_matmul(x, weight, bias, backend="reference")

        inputs = (x.requires_grad_(), bias.requires_grad_())
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_float64(name: str) -> None:
    weight, bias = draw_weight(CASES[name], 37, 100), torch.randn(37, dtype=torch.float64)
    grad = torch.randn(5, 37, dtype=torch.float64)
    grad_x, grad_bias = gradients(draw_rows(5, 100, dtype=torch.float64), weight, bias, grad, "reference")
    torch.testing.assert_close(grad_x, grad @ torch.from_numpy(stood_for(weight)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_bias, grad.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str, backend: str) -> None:
    """Of the reference, where they are those of a linear layer; the kernels say that they have none."""
    weight = draw_weight(CASES[name], 9, 40)
    matrix = torch.from_numpy(stood_for(weight)).float()
    x = torch.randn(3, 40, requires_grad=True)
    out = dk.quantized_matmul(x, weight, backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 2 * out @ matrix, rtol=1e-4, atol=1e-4)
    if backend == "reference":
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, 2 * (torch.ones(3, 40) @ matrix.T) @ matrix, rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(NotImplementedError, match="quantized_matmul: the compiled backward cannot"):
            torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("name", CASES)
def test_more_rows_than_are_dequantized_at_a_time(name: str, backend: str) -> None:
    """Straight to the operator, which serves whether or not it is compiled; blocks of 128 rows end in between."""
    weight = draw_weight(CASES[name], 1100, 50)
    scheme, grad = SCHEMES.index(weight.scheme), torch.randn(3, 1100)
    for order in (None, torch.randperm(50)):
        options = order, scheme, weight.group_size, 50
        result = backward_op(grad, weight.qweight, weight.scale, weight.zero_point, *options)
        matrix = torch.from_numpy(stood_for(weight._replace(input_order=order)))
        assert_close_to_reference(result, grad.double() @ matrix, grad @ matrix.float())


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_that_is_not_finite_stays_in_its_row(name: str, backend: str) -> None:
    weight, x = draw_weight(CASES[name], 37, 100), draw_rows(5, 100)
    grad = torch.randn(5, 37)
    (before,) = gradients(x, weight, None, grad, backend)
    grad[2, 11] = torch.nan
    (after,) = gradients(x, weight, None, grad, backend)
    assert after[2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(after[others], before[others])
