"""swin_attention with padding that takes part, as in torchvision's and timm's models."""

from __future__ import annotations

import importlib

import pytest
import torch
from installed import require
from swin_attention_oracle import NAMES, Inputs, Options, Rope, check, draw, op, with_gradients
from torch import Tensor
from torch.nn.functional import linear

import dskernels as dk

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(9, 9), (14, 14), (14, 17), (17, 14), (5, 20), (8, 3)]


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pad", [False, True])
def test_matches_float64(size: tuple[int, int], pad: bool, dtype: torch.dtype, backend: str) -> None:
    options = Options((7, 7), (3, 2), 2, Rope() if pad else None, padding="attend")
    inputs, grad_out = draw((2, *size), 16, options, dtype, pad=pad)
    check(inputs, grad_out, options, backend)


@pytest.mark.parametrize("window", [(5, 7), (1, 7), (7, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("cosine", [False, True])
def test_windows(window: tuple[int, int], cosine: bool, backend: str) -> None:
    for shift in ((0, 0), (window[0] // 2, window[1] // 2)):
        options = Options(window, shift, 3, padding="attend")
        # Zeros, normalized, are zeros.
        inputs, grad_out = draw((2, 9, 11), 8, options, cosine=cosine, pad=not cosine)
        check(inputs, grad_out, options, backend)


def test_reference_in_float64() -> None:
    for size in SIZES:
        options = Options((7, 7), (3, 2), 2, Rope(), padding="attend")
        check(*draw((2, *size), 16, options, torch.float64, cosine=True, pad=True), options, "reference")


@pytest.mark.parametrize("shift", [(0, 0), (3, 3)], ids=str)
def test_padded_before_the_projection(shift: tuple[int, int], backend: str) -> None:
    """What torchvision computes: the image is filled up with zeros, which the Linear turns into its bias."""
    heads, channels, options = 2, 32, Options((7, 7), shift, 2)
    x, weight, projected = torch.randn(2, 10, 12, channels), torch.randn(3 * channels, channels) / 6, torch.randn(96)
    bias, grad_out = torch.randn(heads, 49, 49), torch.randn(2, 10, 12, channels)

    def before(x: Tensor, weight: Tensor, projected: Tensor, bias: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(x, (0, 0, 0, 2, 0, 4))
        return op(Inputs(linear(filled, weight, projected), bias), options, backend)[:, :10, :12]

    def after(x: Tensor, weight: Tensor, projected: Tensor, bias: Tensor) -> Tensor:
        inputs = Inputs(linear(x, weight, projected), bias, None, projected)
        return op(inputs, Options((7, 7), shift, 2, padding="attend"), backend)

    results = []
    for function in (before, after):
        leaves = [t.clone().requires_grad_() for t in (x, weight, projected, bias)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, grad_out)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [(0, 0), (3, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("cosine", [False, True])
def test_torchvision_itself(shift: tuple[int, int], cosine: bool, backend: str) -> None:
    require("torchvision")
    swin = importlib.import_module("torchvision.models.swin_transformer")
    heads, channels = 2, 32
    x, weight, projected = torch.randn(2, 10, 12, channels), torch.randn(3 * channels, channels) / 6, torch.randn(96)
    logit_scale = torch.randn(heads, 1, 1) if cosine else None
    bias = torch.randn(1, heads, 49, 49)
    right = swin.shifted_window_attention(
        *(x, weight, torch.eye(channels), bias, [7, 7], heads, list(shift)),
        qkv_bias=projected,
        logit_scale=logit_scale,
    )
    if cosine:
        projected = projected.clone()
        projected[channels : 2 * channels] = 0
        logit_scale = logit_scale.flatten().clamp(max=4.6).exp()
    inputs = Inputs(linear(x, weight, projected), bias[0], logit_scale, projected)
    result = op(inputs, Options((7, 7), shift, heads, padding="attend"), backend)
    torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)


def test_gradient_of_the_padded_token_alone(backend: str) -> None:
    """It is that of the tokens which are filled in, summed."""
    options = Options((5, 4), (1, 3), 2)
    inputs, grad_out = draw((2, 9, 11), 8, options)
    token = torch.randn(48)
    filled = torch.cat((inputs.qkv, token.expand(2, 9, 1, 48)), 2)
    filled = torch.cat((filled, token.expand(2, 1, 12, 48)), 1).requires_grad_()
    out = op(Inputs(filled, inputs.bias), options, backend)[:, :9, :11]
    (grad,) = torch.autograd.grad(out, filled, grad_out)
    right = grad[:, 9:].sum((0, 1, 2)) + grad[:, :9, 11:].sum((0, 1, 2))
    leaf = token.clone().requires_grad_()
    out = op(inputs._replace(pad_qkv=leaf), Options((5, 4), (1, 3), 2, padding="attend"), backend)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, grad_out)[0], right, rtol=1e-5, atol=1e-5)


def test_paddings_differ_only_where_there_is_padding(backend: str) -> None:
    options, filled = Options((7, 7), (3, 3), 2), Options((7, 7), (3, 3), 2, padding="attend")
    for size, same in (((14, 21), True), ((14, 20), False)):
        inputs, grad_out = draw((1, *size), 16, options)
        masked = with_gradients(op, inputs, grad_out, options, backend)[:3]
        attended = with_gradients(op, inputs, grad_out, filled, backend)[:3]
        for name, one, other in zip(NAMES, masked, attended, strict=False):
            assert torch.equal(one, other) == same, name
        # Rows and columns before the last windows have none.
        assert torch.equal(masked[0][:, :, :17], attended[0][:, :, :17])


def test_nothing_is_copied_without_need() -> None:
    """Whole windows reach the operator as they came."""
    qkv = torch.randn(1, 14, 21, 48)
    options = {"window_size": 7, "num_heads": 2, "padding": "attend", "pad_qkv": torch.randn(48)}
    call = dk.swin_attention.__globals__["prepare"](qkv, **options)
    assert call.qkv.data_ptr() == qkv.data_ptr()


def test_token_in_another_dtype_and_layout(backend: str) -> None:
    options = Options((4, 4), (1, 1), 2, padding="attend")
    inputs, grad_out = draw((1, 6, 7), 8, options, torch.bfloat16, pad=True)
    right = with_gradients(op, inputs, grad_out, options, backend)
    strided = torch.stack((inputs.pad_qkv, torch.full((48,), torch.nan)), 1)[:, 0]
    for token in (strided, inputs.pad_qkv.double()):
        results = with_gradients(op, inputs._replace(pad_qkv=token), grad_out, options, backend)
        assert results[4].dtype == token.dtype
        for one, other in zip(results, right, strict=True):
            assert one is None or torch.equal(one, other.to(one.dtype))


def test_result_is_contiguous_and_its_own(backend: str) -> None:
    options = Options((4, 4), (1, 1), 2, padding="attend")
    out = op(draw((2, 6, 7), 8, options, pad=True)[0], options, backend)
    assert out.is_contiguous()
    assert out.untyped_storage().nbytes() == 4 * out.numel()
