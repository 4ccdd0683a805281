"""Right values of quantized_matmul where they are known: ones, zeros, tiny and huge numbers, NaN and infinities."""

from __future__ import annotations

import itertools

import pytest
import torch
from quantized_matmul_oracle import CASES, Case, draw_rows, draw_weight
from torch import Tensor

import dskernels as dk

# The ways to quantize a weight, by the names of the cases.
WAYS = {
    "int8_dynamic": {},
    "int8_static": {"input_scale": 0.03},
    "int8_weight_only": {},
    "int4_dynamic": {"group_size": 32},
    "int4_dynamic_asymmetric": {"group_size": 32, "symmetric": False},
    "int4_weight_only": {"group_size": 32},
    "int4_weight_only_asymmetric": {"group_size": 32, "symmetric": False},
    "fp8_block": {},
}
# Schemes whose activations have a scale of their own.
FOLLOWING = [name for name in WAYS if name != "int8_static"]
# Error of a row of some 100 products, of the largest, where activations are rounded: e4m3 has three bits, int8 seven.
ROUNDED_ROWS = {name: 0.06 if name == "fp8_block" else 0.02 for name in WAYS}


def quantize(name: str, weight: Tensor, **options) -> dk.QuantizedWeight:
    return dk.quantize_weight(weight, CASES[name].scheme, **{**WAYS[name], **options})


# Of what 512 ones times ones add up to.
ERROR_OF_ONES = 0.012


def relative_error(result: Tensor, exact: Tensor) -> Tensor:
    """Of each row, against its largest value."""
    return (result.double() - exact).abs().amax(-1) / exact.abs().amax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_ones(name: str, dtype: torch.dtype, backend: str) -> None:
    step = {"input_scale": 1 / 127} if name == "int8_static" else {}
    for columns, w_sign in itertools.product((512, 144, 33), (1, -1)):
        weight = quantize(name, torch.full((65, columns), float(w_sign)), **step)
        for rows, x_sign in itertools.product((1, 5, 33), (1, -1)):
            result = dk.quantized_matmul(torch.full((rows, columns), x_sign, dtype=dtype), weight, backend=backend)
            exact = x_sign * w_sign * columns
            assert ((result.double() - exact).abs() <= ERROR_OF_ONES * columns).all()


@pytest.mark.parametrize("name", WAYS)
def test_many_ones(name: str, backend: str) -> None:
    """A sum of 2,258,060,000 where both sides are codes of 127."""
    step = {"input_scale": 1 / 127} if name == "int8_static" else {}
    for group in (32, -1) if CASES[name].is_int4 else (None,):
        weight = quantize(name, torch.ones(3, 140_000), **step, **({"group_size": group} if group else {}))
        for rows in (1, 4):
            result = dk.quantized_matmul(torch.ones(rows, 140_000), weight, backend=backend)
            assert ((result - 140_000).abs() <= ERROR_OF_ONES * 140_000).all()


def test_half_precision_does_not_overflow_on_the_way(backend: str) -> None:
    """Weights of 1e-3 have scales that float16 would round, and sums of their codes are beyond it."""
    for name in WAYS:
        step = {"input_scale": 1.0} if name == "int8_static" else {}
        weight = quantize(name, torch.full((17, 512), 1e-3), **step)
        for rows in (1, 9):
            result = dk.quantized_matmul(torch.full((rows, 512), 100.0).half(), weight, backend=backend)
            assert ((result.double() - 51.2).abs() <= ERROR_OF_ONES * 51.2).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1e-12, 1e-19, 1e-25, 1e-32, 1e-37, 1e-38, 1e20, 1e30])
@pytest.mark.parametrize("name", FOLLOWING)
def test_tiny_and_huge_rows(name: str, factor: float, dtype: torch.dtype, backend: str) -> None:
    """They are as right as others, and their neighbours do not matter."""
    weight = quantize(name, torch.randn(20, 300))
    x = torch.randn(9, 300)
    rows = x * factor
    rows[::3] = x[::3]
    rows = rows.to(dtype)
    matrix = weight.dequantize(torch.float64)
    error = relative_error(dk.quantized_matmul(rows, weight, backend=backend), rows.double() @ matrix.T)
    x = x.to(dtype)
    usual = relative_error(dk.quantized_matmul(x, weight, backend=backend), x.double() @ matrix.T)
    # The floor is for subnormal numbers, which have some bits less.
    assert (error <= 2 * usual.max() + 1e-4).all()
    assert usual.max() < ROUNDED_ROWS[name]


@pytest.mark.parametrize("name", FOLLOWING)
def test_huge_rows_whose_sums_fit(name: str, backend: str) -> None:
    weight = quantize(name, torch.randn(20, 300) * 1e-6)
    x = torch.randn(4, 300).clamp(-3, 3)
    exact = x.double() * 1e38 @ weight.dequantize(torch.float64).T
    error = relative_error(dk.quantized_matmul(x * 1e38, weight, backend=backend), exact)
    assert (error < ROUNDED_ROWS[name]).all()


@pytest.mark.parametrize("name", WAYS)
def test_a_tiny_group_of_weights(name: str, backend: str) -> None:
    """It keeps its precision beside large ones that have another scale: other rows, other groups, other blocks."""
    matrix = torch.randn(140, 300)
    matrix[:128, :128] *= 1e-9
    matrix[130] *= 1e-9
    weight = quantize(name, matrix)
    own = weight.dequantize(torch.float64)
    half_step = 1 / 16 if name == "fp8_block" else 1 / 15 if CASES[name].is_int4 else 1 / 254
    rows, columns = (slice(130, 131), slice(300)) if name.startswith("int8") else (slice(128), slice(128))
    off = (own[rows, columns] - matrix[rows, columns].double()).abs().max()
    assert off <= 1.01 * half_step * matrix[rows, columns].abs().max()
    x = torch.zeros(3, 300)
    x[:, columns] = torch.randn(3, 300)[:, columns].clamp(-3.5, 3.5)
    exact = x.double() @ own[rows].T
    result = dk.quantized_matmul(x, weight, backend=backend)[:, rows]
    assert (result.double() - exact).abs().max() <= ROUNDED_ROWS[name] * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_zero_rows_and_channels_give_the_bias(name: str, dtype: torch.dtype, backend: str) -> None:
    matrix = torch.randn(37, 100)
    matrix[[0, 17, 36]] = 0.0
    if name == "fp8_block":
        matrix[:] = 0.0
    weight, bias = quantize(name, matrix), torch.randn(37)
    for rows in (1, 2, 17, 40):
        x = torch.randn(rows, 100).to(dtype)
        x[::2] = 0.0
        result = dk.quantized_matmul(x, weight, bias, backend=backend)
        assert torch.equal(result[::2], bias.to(dtype).expand_as(result[::2]))
        for channel in (0, 17, 36):
            assert (result[:, channel] == bias[channel].to(dtype)).all()
        x[::2] = -0.0
        assert torch.equal(dk.quantized_matmul(x, weight, bias, backend=backend), result)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_a_row_that_is_not_finite(name: str, dtype: torch.dtype, value: float, backend: str) -> None:
    """It stays so, whatever stands elsewhere in it, and touches no other."""
    for rows, columns, place in ((1, 100, 0), (7, 100, 99), (7, 33, 32), (34, 300, 128), (65, 31, 17)):
        weight, bias = quantize(name, torch.randn(19, columns)), torch.randn(19)
        x = torch.randn(rows, columns).to(dtype)
        before = dk.quantized_matmul(x, weight, bias, backend=backend)
        wrong = rows // 2
        x[wrong, place] = value
        result = dk.quantized_matmul(x, weight, bias, backend=backend)
        assert not result[wrong].isfinite().any()
        others = torch.arange(rows) != wrong
        assert torch.equal(result[others], before[others])
        x[wrong] = value
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                assert not dk.quantized_matmul(x, weight, bias, backend=backend)[wrong].isfinite().any()


@pytest.mark.parametrize("name", WAYS)
def test_a_bias_that_is_not_finite(name: str, backend: str) -> None:
    weight, bias = quantize(name, torch.randn(19, 64)), torch.zeros(19)
    bias[4], bias[5] = torch.inf, torch.nan
    result = dk.quantized_matmul(torch.randn(3, 64), weight, bias, backend=backend)
    assert (result[:, 4] == torch.inf).all()
    assert result[:, 5].isnan().all()
    assert result[:, :4].isfinite().all()
    assert result[:, 6:].isfinite().all()


def test_not_a_number_among_the_codes_of_fp8(backend: str) -> None:
    weight = draw_weight(Case("fp8_block"), 150, 200)
    weight.qweight[140, 7], weight.qweight[3, 199] = 127, 255
    for rows in (1, 5):
        result = dk.quantized_matmul(draw_rows(rows, 200), weight, backend=backend)
        assert (result.isnan().nonzero()[:, 1].unique() == torch.tensor([3, 140])).all()


@pytest.mark.parametrize("name", ["int4_dynamic", "int4_weight_only", "fp8_block"])
def test_each_group_has_its_scale(name: str, backend: str) -> None:
    """Scales that are powers of two, and one column of x at a time, show which scale was taken."""
    case = CASES[name]
    for columns in (100, 290):
        weight = draw_weight(case, 260 if name == "fp8_block" else 9, columns)
        powers = torch.arange(weight.scale.numel()).view(weight.scale.shape) % 40 - 20
        one = 56 if name == "fp8_block" else 0x99
        weight = weight._replace(qweight=torch.full_like(weight.qweight, one), scale=2.0**powers)
        result = dk.quantized_matmul(127 * torch.eye(columns), weight, backend=backend).T
        n, k = torch.meshgrid(torch.arange(result.shape[0]), torch.arange(columns), indexing="ij")
        rows_a_scale = 128 if name == "fp8_block" else 1
        expected = 127 * weight.scale[n // rows_a_scale, k // weight.group_size]
        assert torch.allclose(result, expected, rtol=2**-22, atol=0)
