"""What the compiled kernels of swin_attention could get wrong on their own: operators called directly, odd tables."""

from __future__ import annotations

import pytest
import torch

import dskernels as dk
from dskernels.swin_attention.schema import backward_op, forward_op


@pytest.mark.parametrize("heads", [0, -2, 5, 25, 2**62, -(2**62), (2**64 + 2) // 3])
def test_operators_refuse_heads_that_do_not_divide_the_channels(heads: int) -> None:
    """Up to numbers whose threefold, as 64 bits have it, divides the channels again."""
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    qkv, grad_out = torch.randn(1, 4, 4, 24), torch.randn(1, 4, 4, 8)
    options = (None, None, None, None, heads, 2, 2, 1, 1, 0.4, False)
    with pytest.raises(RuntimeError, match="qkv: expected"):
        forward_op(qkv, *options)
    with pytest.raises(RuntimeError, match="qkv: expected"):
        backward_op(grad_out, qkv, *options, False, False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cosine_attention_with_a_table_that_scales(
    dtype: torch.dtype, rotary_dim: int, interleaved: bool, backend: str
) -> None:
    """A table may carry an attention factor (YaRN's does): its transpose, in the gradient, is not its inverse then."""
    table = dk.rope_table_2d(12, 3, 4, rotary_dim=rotary_dim, interleaved=interleaved)
    rope = dk.RopeTable(1.3 * table.cos, 1.3 * table.sin, interleaved)
    qkv, logit_scale = torch.randn(2, 7, 9, 3 * 2 * 12).to(dtype), torch.tensor([3.0, -5.0])
    grad_out = torch.randn(2, 7, 9, 2 * 12).to(dtype)

    def gradients(qkv: torch.Tensor, logit_scale: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
        leaves = qkv.clone().requires_grad_(), logit_scale.clone().requires_grad_()
        out = dk.swin_attention(
            leaves[0],
            window_size=(3, 4),
            shift=(1, 2),
            num_heads=2,
            rope=rope,
            logit_scale=leaves[1],
            backend=backend,
        )
        return torch.autograd.grad(out, leaves, grad_out.to(out.dtype))

    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    if backend == "cuda" and dtype == torch.bfloat16:
        # Tensor cores take rounded rows and gradients of scores, times factors of up to 5 * 1.3 ** 2.
        tolerance = 2**-5
    exact = gradients(qkv.double(), logit_scale.double(), "reference")
    for one, other in zip(gradients(qkv, logit_scale, backend), exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
