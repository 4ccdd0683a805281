"""Gradients of swin_attention: numerical ones, those that are asked for alone, and those of odd losses and inputs."""

from __future__ import annotations

import pytest
import torch
from swin_attention_oracle import NAMES, Inputs, Options, Rope, check, draw, op, table, with_gradients
from torch import Tensor

import dskernels as dk
from dskernels.swin_attention.reference import swin_attention_backward_reference
from dskernels.swin_attention.schema import forward_op

ROPE_IDS = ["plain", "rope", "rope_by_head"]


def leaves_of(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else x.detach().requires_grad_() for x in inputs))


def attend(qkv: Tensor, bias: Tensor, pad_qkv: Tensor, options: Options) -> Tensor:
    return op(Inputs(qkv, bias, None, pad_qkv), options, "reference")


@pytest.mark.parametrize("rope", [None, Rope(), Rope(interleaved=True, by_head=True)], ids=ROPE_IDS)
@pytest.mark.parametrize("cosine", [False, True])
def test_gradcheck(cosine: bool, rope: Rope | None) -> None:
    options = Options((2, 2), (1, 0), 2, rope, padding="attend")
    inputs, _ = draw((1, 3, 2), 4, options, torch.float64, cosine=True, pad=True)
    qkv, bias, logit_scale, pad_qkv = leaves_of(inputs.double())
    if cosine:
        assert torch.autograd.gradcheck(lambda *x: op(Inputs(*x), options, "reference"), (qkv, bias, logit_scale))
    else:
        assert torch.autograd.gradcheck(lambda *x: attend(*x, options), (qkv, bias, pad_qkv))


@pytest.mark.parametrize("cosine", [False, True])
def test_gradgradcheck(cosine: bool) -> None:
    options = Options((2, 2), (1, 1), 1, Rope())
    inputs, _ = draw((1, 2, 3), 4, options, torch.float64, cosine=cosine)
    given = [x for x in leaves_of(inputs.double()) if x is not None]
    assert torch.autograd.gradgradcheck(lambda *x: op(Inputs(*x), options, "reference"), given)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("rope", [None, Rope(rotary_dim=4), Rope(interleaved=True, by_head=True)], ids=ROPE_IDS)
def test_default_of_the_backward_operator(rope: Rope | None, cosine: bool) -> None:
    """The explicit formula, which serves where nothing is compiled, against autograd; hidden rows included."""
    options = Options((3, 4), (1, 2), 2, rope)
    inputs, grad_out = draw((2, 7, 9), 8, options, torch.float64, cosine=cosine)
    inputs = inputs.double()
    inputs.bias[torch.rand(2, 12, 12) < 0.3] = -torch.inf
    inputs.bias[1, 5] = -torch.inf
    _, *by_autograd = with_gradients(op, inputs, grad_out, options, "reference")
    rotation = table(options, 8)
    tables = (None, None) if rotation is None else tuple(t.view(-1, 12, t.shape[-1]) for t in rotation[:2])
    arguments = (*tables, *inputs[1:3], 2, 3, 4, 1, 2, 1.0 if cosine else 8**-0.5, bool(rope and rope.interleaved))
    by_formula = swin_attention_backward_reference(grad_out, inputs.qkv, *arguments, True, cosine)
    for name, one, other in zip(NAMES[1:], by_formula, by_autograd, strict=False):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
    _, grad_bias, grad_logit_scale = swin_attention_backward_reference(grad_out, inputs.qkv, *arguments, False, False)
    assert grad_bias.shape == grad_logit_scale.shape == (0,)


@pytest.mark.parametrize("part", ["q", "k", "v", "grad_out"])
def test_default_of_the_backward_operator_keeps_nan_to_pairs_that_there_are(part: str) -> None:
    inputs, grad_out = draw((1, 9, 9), 8, Options((7, 7)), torch.float64)
    # The last window has four tokens.
    if part == "grad_out":
        grad_out[0, 8, 8] = torch.nan
    else:
        inputs.qkv.unflatten(-1, (3, 8))[0, 8, 8, "qkv".index(part)] = torch.nan
    options = (None, None, inputs.bias.double(), None, 1, 7, 7, 0, 0, 0.4, False)
    _, grad_bias, _ = swin_attention_backward_reference(grad_out, inputs.qkv, *options, True, False)
    places = torch.tensor([0, 1, 7, 8])
    there = torch.zeros(49, 49, dtype=torch.bool)
    there[places[:, None], places] = True
    assert grad_bias[0, there].isnan().any()
    assert grad_bias[0, ~there].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_and_zero_tokens_in_cosine_attention(dtype: torch.dtype, backend: str) -> None:
    """As normalize has it: divided by 1e-12 at least, with a finite gradient at 0."""
    options = Options((3, 3), (1, 1), 2, Rope())
    inputs, grad_out = draw((1, 7, 8), 16, options, cosine=True)
    sizes = torch.ones(7, 8, 1)
    sizes[1, 2] = sizes[6, 7] = 0
    sizes[4, 4], sizes[3, 3], sizes[2, 2], sizes[0, 5] = 1e-14, 1e-11, 1e-8, 1e8
    scaled = inputs.qkv.clone()
    scaled[..., :64] *= sizes
    inputs, grad_out = inputs._replace(qkv=scaled.to(dtype)), grad_out.to(dtype)
    results = with_gradients(op, inputs, grad_out, options, backend)[:4]
    right = with_gradients(op, inputs.double(), grad_out, options, "reference")[:4]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip(results, right, strict=True):
        assert one.isfinite().all()
        if one.shape == inputs.qkv.shape:
            # Token by token: gradients go with the inverse of its size.
            one, other = (x.double() / other.abs().amax(-1, keepdim=True) for x in (one, other))
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def test_double_backward_of_the_kernel_says_no() -> None:
    qkv = torch.randn(1, 4, 4, 24, requires_grad=True)
    out = forward_op(qkv, None, None, None, None, 1, 2, 2, 1, 1, 0.4, False)
    (grad,) = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'swin_attention: .* backend="reference"'):
        grad.sum().backward()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 2), (1, 3)], ids=str)
def test_only_the_gradients_asked_for(wanted: tuple[int, ...], backend: str) -> None:
    options = Options((3, 4), (1, 2), 2, Rope(), padding="attend")
    inputs, grad_out = draw((2, 7, 9), 8, options, cosine=True, pad=True)
    _, *all_grads = with_gradients(op, inputs, grad_out, options, backend)
    leaves = Inputs(*(x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)))
    op(leaves, options, backend).backward(grad_out)
    for i, (leaf, grad) in enumerate(zip(leaves, all_grads, strict=True)):
        if i in wanted:
            assert torch.equal(leaf.grad, grad)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("make", ["expanded", "one_row", "channels_first", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_the_output_gradient(make: str, dtype: torch.dtype, backend: str) -> None:
    options = Options((3, 4), (1, 2), 2, Rope())
    inputs, _ = draw((2, 7, 9), 8, options, dtype)
    given = {
        "expanded": torch.ones(()).expand(2, 7, 9, 16),
        "one_row": torch.randn(1, 1, 9, 16).expand(2, 7, 9, 16),
        "channels_first": torch.randn(2, 16, 7, 9).permute(0, 2, 3, 1),
        "sliced": torch.randn(2, 7, 10, 33)[:, :, 1:, 1::2],
    }[make].to(dtype)
    strided = with_gradients(op, inputs, given, options, backend)
    dense = with_gradients(op, inputs, given.contiguous(), options, backend)
    for one, other in zip(strided[1:3], dense[1:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_gradients_accumulate_over_calls(backend: str) -> None:
    """A bias that several layers share."""
    options, shifted = Options((4, 4), (0, 0), 2), Options((4, 4), (2, 2), 2)
    inputs, grad_out = draw((2, 8, 9), 8, options)
    bias = inputs.bias.clone().requires_grad_()
    for each in (options, shifted):
        op(inputs._replace(bias=bias), each, backend).backward(grad_out)
    parts = [with_gradients(op, inputs, grad_out, each, backend)[2] for each in (options, shifted)]
    torch.testing.assert_close(bias.grad, parts[0] + parts[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits(dtype: torch.dtype, backend: str) -> None:
    """Scores of some thousands: a softmax without its maximum overflows."""
    options = Options((4, 5), (1, 2), 2, scale=10.0)
    inputs, grad_out = draw((1, 9, 11), 16, options, dtype)
    check(inputs._replace(qkv=inputs.qkv * 8), grad_out, options, backend)


def test_gradient_steps_descend(backend: str) -> None:
    qkv, target = torch.randn(2, 6, 7, 48), torch.randn(2, 6, 7, 16)
    leaves = [qkv, torch.zeros(2, 16, 16), torch.ones(2)]
    losses = []
    for _ in range(40):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = dk.swin_attention(
            *leaves[:1], window_size=4, shift=2, num_heads=2, bias=leaves[1], logit_scale=leaves[2], backend=backend
        )
        loss = (out - target).square().mean()
        losses.append(loss.item())
        grads: tuple[Tensor, ...] = torch.autograd.grad(loss, leaves)
        leaves = [x - 4 * grad for x, grad in zip(leaves, grads, strict=True)]
    assert losses[-1] < 0.9 * losses[0]
