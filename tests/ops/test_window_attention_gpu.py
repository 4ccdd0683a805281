"""window_attention on CUDA tensors, with the backend that automatic choice takes there."""

from __future__ import annotations

import pytest
import torch
from window_attention_oracle import NAMES, Options, Rope, expected

import dskernels as dk
from dskernels.testing import assert_close_to_reference, random_tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_matches_float64(dtype: torch.dtype, compiled: bool) -> None:
    options = Options(window=(31, 7), rope=Rope(rotary_dim=32))
    inputs = [random_tensor(shape, dtype) for shape in ((2, 6, 100, 40), (2, 2, 120, 40), (2, 2, 120, 24))]
    grads = [random_tensor((2, 6, 100, 24), dtype), torch.randn(2, 6, 100)]
    exact_results, plain_results = expected(inputs, grads, options)

    leaves = [x.cuda().requires_grad_() for x in inputs]
    table = dk.rope_table(40, 120, rotary_dim=32).to("cuda")
    attend = torch.compile(dk.window_attention, fullgraph=True) if compiled else dk.window_attention
    out, lse = attend(*leaves, window=options.window, rope=table, return_lse=True)
    results = [out, lse, *torch.autograd.grad((out, lse), leaves, [g.cuda() for g in grads])]
    for name, result, right, usual in zip(NAMES, results, exact_results, plain_results, strict=True):
        if name == "lse" and dtype != torch.float32:
            # Rotated queries and keys may be rounded for the tensor cores; the plain lse is not of rounded ones.
            torch.testing.assert_close(result.cpu().double(), right, rtol=0, atol=8 * torch.finfo(dtype).eps)
        else:
            assert_close_to_reference(result.cpu(), right, usual, name)
