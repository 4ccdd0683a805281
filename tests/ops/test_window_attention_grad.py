"""Gradients of window_attention: numerical ones, those that are asked for alone, and those of odd losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from window_attention_oracle import NAMES, Options, Rope, exact, op, with_gradients

import dskernels as dk
from dskernels.window_attention.reference import window_attention_backward_reference


def small(dtype: torch.dtype = torch.float64, queries: int = 5, keys: int = 6) -> list[Tensor]:
    shapes = ((1, 4, queries, 6), (1, 2, keys, 6), (1, 2, keys, 3))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("rope", [Rope(), Rope(interleaved=True, rotary_dim=4)], ids=["half", "pairs"])
@pytest.mark.parametrize("window", [(2, 0), (-1, 3)], ids=str)
def test_gradcheck(window: tuple[int, int], rope: Rope) -> None:
    options = Options(window=window, rope=rope)

    def finite_part(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = op(*inputs, options, "reference")
        return out, lse.clamp(min=-1e3)

    assert torch.autograd.gradcheck(finite_part, small(queries=4, keys=4))


def test_gradgradcheck() -> None:
    options = Options(window=(2, 0), rope=Rope())
    inputs = small(queries=3, keys=3)
    assert torch.autograd.gradgradcheck(lambda *x: op(*x, options, "reference"), inputs)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("rope", [None, Rope(rotary_dim=4)], ids=["plain", "rope"])
def test_default_of_the_backward_operator(rope: Rope | None, token_major: bool) -> None:
    """The explicit formula, which serves where nothing is compiled, against autograd; blind rows included."""
    options = Options(window=(2, 1), rope=rope, query_offset=0 if rope else -3)
    inputs = [x.detach() for x in small(queries=9, keys=6)]
    if token_major:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    grads = [torch.randn(1, 4, 9, 3), torch.randn(1, 4, 9)]
    by_autograd = with_gradients(op, inputs, grads, options, "reference")
    table = dk.rope_table(6, 9, rotary_dim=4)[:2] if rope else (None, None)
    tables = (*table, None, None, None)
    arguments = (*tables, *options.window, options.offset(*inputs[:2]), options.factor(inputs[0]), 0.0, False, False)
    *by_formula, grad_bias = window_attention_backward_reference(
        *(g.double() for g in grads), *inputs, *(x.detach() for x in by_autograd[:2]), *arguments
    )
    assert grad_bias.numel() == 0
    for name, one, other, given in zip(NAMES[2:], by_formula, by_autograd[2:], inputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
        assert one.stride() == given.stride(), name


def test_double_backward_of_the_kernel_says_no() -> None:
    inputs = small(torch.float32)
    tables, (left, right, offset, scale, softcap) = (None,) * 5, (2, 0, 1, 0.4, 0.0)
    options = (*tables, left, right, offset, scale, softcap, False)
    out, _ = torch.ops.dskernels.window_attention.default(*inputs, *options)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="reference"'):
        grad.sum().backward()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_the_gradients_asked_for(wanted: tuple[int, ...], backend: str) -> None:
    inputs = small(torch.float32)
    options = Options(window=(2, 0), rope=Rope())
    all_grads = torch.autograd.grad(op(*inputs, options, backend)[0].square().sum(), inputs)
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    op(*leaves, options, backend)[0].square().sum().backward()
    for i, (leaf, grad) in enumerate(zip(leaves, all_grads, strict=True)):
        if i in wanted:
            assert torch.equal(leaf.grad, grad)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_of_lse_alone(dtype: torch.dtype, backend: str) -> None:
    inputs = [x.detach().to(dtype).requires_grad_() for x in small(queries=70, keys=80)]
    options = Options(window=(20, 3), rope=Rope())
    _, lse = op(*inputs, options, backend)
    grads = torch.autograd.grad(lse.sin().sum(), inputs, materialize_grads=True, allow_unused=True)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact_grads = torch.autograd.grad(exact(*wide, options)[1].sin().sum(), wide, allow_unused=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for grad, right in zip(grads[:2], exact_grads[:2], strict=True):
        torch.testing.assert_close(grad.double(), right, rtol=tolerance, atol=tolerance)
    assert (grads[2] == 0).all()


@pytest.mark.parametrize("make", ["expanded", "token_major", "sliced"])
def test_strides_of_the_output_gradient(make: str, backend: str) -> None:
    inputs = [x.detach().float().requires_grad_() for x in small(queries=40, keys=50)]
    options = Options(window=(9, 2), rope=Rope())
    out, _ = op(*inputs, options, backend)
    given = {
        "expanded": torch.ones(()).expand(out.shape),
        "token_major": torch.randn(1, 40, 4, 3).transpose(1, 2),
        "sliced": torch.randn(1, 4, 41, 6)[:, :, 1:, ::2],
    }[make]
    strided = torch.autograd.grad(out, inputs, given, retain_graph=True)
    dense = torch.autograd.grad(out, inputs, given.contiguous())
    for one, other in zip(strided, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_gradient_steps_descend(backend: str) -> None:
    q, k, v = (x.detach().float() for x in small(queries=16, keys=16))
    target = torch.randn(1, 4, 16, 3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    losses = []
    for _ in range(30):
        loss = (dk.window_attention(*leaves, window=(4, 0), backend=backend) - target).square().mean()
        losses.append(loss.item())
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.data -= 2 * grad
    assert losses[-1] < 0.9 * losses[0]
