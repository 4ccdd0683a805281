"""quantized_matmul under the transforms of torch.func."""

from __future__ import annotations

import warnings

import pytest
import torch
from quantized_matmul_oracle import CASES, draw_rows, draw_weight, stood_for
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import dskernels as dk

V, M, N, K = 3, 5, 21, 70


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_vmap_is_a_loop(name: str, backend: str) -> None:
    """Over x, over the bias, over both, wherever the mapped dimension stands."""
    weight = draw_weight(CASES[name], N, K)
    x, bias = draw_rows(V, M, K), torch.randn(V, N)

    def call(x: Tensor, bias: Tensor) -> Tensor:
        return dk.quantized_matmul(x, weight, bias, backend=backend)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it loops for want of a rule
        for dim in range(3):
            result = vmap(call, (dim, None))(x.movedim(0, dim), bias[0])
            assert_close(result, torch.stack([call(row, bias[0]) for row in x]))
        result = vmap(call, (0, 1))(x, bias.t())
        assert_close(result, torch.stack([call(row, b) for row, b in zip(x, bias, strict=True)]))
        result = vmap(call, (None, 0))(x[0], bias)
        assert_close(result, torch.stack([call(x[0], b) for b in bias]))
        assert vmap(call, (0, None))(x[:0], bias[0]).shape == (0, M, N)
        assert vmap(call, (0, 0))(x[:0], bias[:0]).shape == (0, M, N)
        assert_close(vmap(vmap(call, (0, None)), (0, None))(x, bias[0]), call(x, bias[0]))


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_weights(name: str, backend: str) -> None:
    weights = [draw_weight(CASES[name], N, K) for _ in range(V)]
    tensors = [field for field in weights[0]._fields if isinstance(getattr(weights[0], field), Tensor)]
    stacked = {field: torch.stack([getattr(weight, field) for weight in weights]) for field in tensors}
    x, cotangent = draw_rows(M, K), torch.randn(M, N)

    def call(fields: dict[str, Tensor], x: Tensor) -> Tensor:
        return dk.quantized_matmul(x, weights[0]._replace(**fields), backend=backend)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = vmap(call, (0, None))(stacked, x)
    assert_close(result, torch.stack([dk.quantized_matmul(x, weight, backend=backend) for weight in weights]))
    each = vmap(grad(lambda fields, x: (call(fields, x) * cotangent).sum(), argnums=1), (0, None))(stacked, x)
    matrices = torch.stack([torch.from_numpy(stood_for(weight)).float() for weight in weights])
    assert_close(each, cotangent @ matrices)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, backend: str) -> None:
    weight, bias = draw_weight(CASES[name], N, K), torch.randn(N)
    matrix = torch.from_numpy(stood_for(weight)).float()
    x, cotangent = draw_rows(V, M, K), torch.randn(V, M, N)

    def loss(x: Tensor, bias: Tensor, cotangent: Tensor) -> Tensor:
        return (dk.quantized_matmul(x, weight, bias, backend=backend) * cotangent).sum()

    grad_x, grad_bias = grad(loss, (0, 1))(x, bias, cotangent)
    assert_close(grad_x, cotangent @ matrix)
    assert_close(grad_bias, cotangent.sum((0, 1)))
    grad_x, grad_bias = vmap(grad(loss, (0, 1)), (0, None, 0))(x, bias, cotangent)
    assert_close(grad_x, cotangent @ matrix)
    assert_close(grad_bias, cotangent.sum(1))
    out, pull = vjp(lambda x: dk.quantized_matmul(x, weight, backend=backend), x)
    assert_close(pull(cotangent)[0], cotangent @ matrix)
    assert torch.equal(out, dk.quantized_matmul(x, weight, backend=backend))
    jacobian = jacrev(lambda row: dk.quantized_matmul(row, weight, backend=backend))(x[0, 0])
    assert_close(jacobian, matrix)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name: str, backend: str) -> None:
    weight, x, tangent = draw_weight(CASES[name], N, K), draw_rows(M, K), torch.randn(M, K)

    def call(x: Tensor) -> Tensor:
        return dk.quantized_matmul(x, weight, backend=backend)

    if backend != "reference":
        with pytest.raises(NotImplementedError, match=r"quantized_matmul: .* forward-mode"):
            jvp(call, (x,), (tangent,))
        return
    out, slope = jvp(call, (x,), (tangent,))
    assert torch.equal(out, call(x))
    assert_close(slope, tangent @ torch.from_numpy(stood_for(weight)).float().T)


def test_functional_call(backend: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = draw_weight(CASES["int4_dynamic"], N, K)
            self.bias = torch.nn.Parameter(torch.zeros(N))

        def forward(self, x: Tensor) -> Tensor:
            return dk.quantized_matmul(x, self.weight, self.bias, backend=backend)

    layer, x, bias = Layer(), draw_rows(M, K), torch.randn(N)
    expected = dk.quantized_matmul(x, layer.weight, bias, backend=backend)
    assert torch.equal(functional_call(layer, {"bias": bias}, x), expected)
    each = grad(lambda bias: functional_call(layer, {"bias": bias}, x).sum())(bias)
    assert_close(each, torch.full((N,), float(M)))


@pytest.mark.parametrize("name", ["int8_dynamic", "fp8_block"])
def test_under_autocast(name: str, backend: str) -> None:
    weight, x = draw_weight(CASES[name], N, K), draw_rows(M, K)

    def loss(x: Tensor) -> Tensor:
        out = dk.quantized_matmul(x, weight, backend=backend)
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])
