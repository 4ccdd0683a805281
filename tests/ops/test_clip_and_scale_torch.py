"""The operators of grad_norm and clip_and_scale_ as citizens of PyTorch: opcheck and export."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

import dskernels as dk
from dskernels.clip_and_scale.schema import clip_and_scale_op, grad_norm_op


def gradients() -> list[Tensor]:
    return [torch.randn(30, 7), torch.randn(5).bfloat16(), torch.randn(4, 6).half().t(), torch.randn(3).double()]


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
@pytest.mark.parametrize("loss_scale", [None, torch.tensor(8.0)], ids=["none", "tensor"])
def test_opcheck(loss_scale: Tensor | None, norm_type: float) -> None:
    torch.library.opcheck(grad_norm_op, (gradients(), loss_scale, norm_type))
    for max_norm in (None, 0.25, 1e6):
        torch.library.opcheck(clip_and_scale_op, (gradients(), max_norm, loss_scale, norm_type))


def test_opcheck_of_empty_lists_and_tensors() -> None:
    for grads in ([], [torch.zeros(0, 3), torch.zeros(2)]):
        torch.library.opcheck(grad_norm_op, (grads, None, 2.0))
        torch.library.opcheck(clip_and_scale_op, (grads, 1.0, None, 2.0))


class Clipped(nn.Module):
    """Two gradients clipped together, and the norm that is left."""

    def forward(self, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        weight, bias = weight.clone(), bias.clone()
        before = dk.clip_and_scale_([weight, bias], max_norm=0.5, loss_scale=scale)
        return weight, bias, before.total_norm, dk.grad_norm([weight, bias]).total_norm


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_free_length(strict: bool) -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    inputs = torch.randn(9, 3), torch.randn(3), torch.tensor(8.0)
    shapes = ({0: rows}, None, None)
    program = torch.export.export(Clipped(), inputs, dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in (9, 2, 40):
        inputs = torch.randn(length, 3), torch.randn(3), torch.tensor(4.0)
        untouched = [each.clone() for each in inputs]
        for got, wanted in zip(loaded(*inputs), Clipped()(*inputs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(inputs, untouched, strict=True))
        norm = torch.cat([each.flatten() for each in inputs[:2]]).double().norm() / 4
        torch.testing.assert_close(loaded(*inputs)[2].double(), norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(loaded(*inputs)[3], torch.tensor(0.5), rtol=1e-5, atol=0)
