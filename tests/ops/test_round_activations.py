"""`dskernels.round_activations` says what `quantized_matmul` makes of its first argument."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dskernels as dk

COLUMNS = 200
SCHEMES = ("int8_dynamic", "int8_static", "int8_weight_only", "int4_dynamic", "int4_weight_only", "fp8_block")


def seen_by_the_product(x: Tensor, scheme: str, step: Tensor | None) -> Tensor:
    # A weight of ones on the diagonal, in codes that stand for them exactly.
    if scheme == "fp8_block":
        one = torch.ones((), dtype=torch.float8_e4m3fn).view(torch.uint8)
        weight = dk.QuantizedWeight(scheme, torch.eye(COLUMNS).byte() * one, torch.ones(2, 2), COLUMNS, 128)
    elif scheme.startswith("int4"):
        codes = torch.full((COLUMNS, COLUMNS // 2), 0x88, dtype=torch.uint8)
        for n in range(COLUMNS):
            codes[n, n // 2] += 1 << 4 * (n % 2)
        weight = dk.QuantizedWeight(scheme, codes, torch.ones(COLUMNS, 1), COLUMNS, COLUMNS)
    else:
        weight = dk.QuantizedWeight(scheme, torch.eye(COLUMNS).char(), torch.ones(COLUMNS), COLUMNS, COLUMNS)
        weight = weight._replace(input_scale=step)
    return dk.quantized_matmul(x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_what_the_product_sees(scheme: str, dtype: torch.dtype) -> None:
    step = torch.tensor(0.013) if scheme == "int8_static" else None
    for shape in ((3, 5, COLUMNS), (COLUMNS,), (0, COLUMNS)):
        x = (torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()).to(dtype)
        rounded = dk.round_activations(x, scheme, input_scale=step)
        assert rounded.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(rounded.to(dtype), seen_by_the_product(x, scheme, step))


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if not scheme.endswith("weight_only")])
def test_rows_that_are_not_finite(scheme: str) -> None:
    step = 0.1 if scheme == "int8_static" else None
    x = torch.randn(4, COLUMNS)
    x[1, 7], x[2, 150] = torch.inf, torch.nan
    rounded = dk.round_activations(x, scheme, input_scale=step)
    assert rounded[[0, 3]].isfinite().all()
    assert not rounded[1].isfinite().all()
    assert not rounded[2].isfinite().all()


def test_wrong_arguments() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(TypeError, match=r"x: expected a tensor, got 3"):
        dk.round_activations(3, "fp8_block")
    with pytest.raises(ValueError, match=r"x: expected floating point of shape .*, got torch.int64 of 1 dim"):
        dk.round_activations(torch.arange(3), "fp8_block")
    with pytest.raises(ValueError, match=r"scheme: expected one of int8_dynamic, .*, got 'int3'"):
        dk.round_activations(x, "int3")
    with pytest.raises(ValueError, match=r"input_scale: expected None for int8_dynamic, got 2"):
        dk.round_activations(x, "int8_dynamic", input_scale=2)
    with pytest.raises(ValueError, match=r"input_scale: expected the step of the activations for int8_static"):
        dk.round_activations(x, "int8_static")
