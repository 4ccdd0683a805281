"""Exactness of quantized_matmul where it is promised: sums of codes, and the codes of activations themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantized_matmul_oracle import Case, fp8_rows, raw_weight, row_codes, static_codes

import dskernels as dk

# A row whose largest magnitude is 127 has the scale 1: integers are their own codes.
EXTREMES = {
    "both": (-127, 127),
    "most_negative_weight": (-127, -128),
    "most_negative_weight_positive_row": (127, -128),
    "positive": (127, 127),
    "negative": (-127, -127),
}
INT4 = {"symmetric": None, "zero_point_0": 0, "zero_point_15": 15}


def rows_of_codes(rows: int, columns: int) -> np.ndarray:
    codes = np.random.default_rng(int(torch.randint(2**31, ()))).integers(-127, 128, (rows, columns))
    codes[:, :1] = 127
    return codes


def multiply(codes: np.ndarray, weight: dk.QuantizedWeight, backend: str) -> np.ndarray:
    return dk.quantized_matmul(torch.from_numpy(codes.astype(np.float32)), weight, backend=backend).numpy()


def rounded(sums: np.ndarray) -> np.ndarray:
    """Integers in float32: rounded once."""
    return sums.astype(np.float64).astype(np.float32)


@pytest.mark.parametrize("columns", [1, 7, 31, 64, 100, 515, 1100])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
def test_sums_of_int8_codes(scheme: str, columns: int, backend: str) -> None:
    fields = {"input_scale": torch.tensor(1.0)} if scheme == "int8_static" else {}
    for out_features in (1, 16, 37):
        codes = np.random.default_rng(columns).integers(-128, 128, (out_features, columns))
        weight = raw_weight(Case(scheme), codes, **fields)
        for rows in (1, 2, 5, 33):
            x = rows_of_codes(rows, columns)
            assert np.array_equal(multiply(x, weight, backend), rounded(x @ codes.T))


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
def test_extreme_int8_codes(scheme: str, name: str, backend: str) -> None:
    """Products that saturate the sums of pairs in 16 bits, or wrap them."""
    row, code = EXTREMES[name]
    fields = {"input_scale": torch.tensor(1.0)} if scheme == "int8_static" else {}
    for columns in (2, 64, 515):
        weight = raw_weight(Case(scheme), np.full((19, columns), code), **fields)
        for rows in (1, 2, 9):
            result = multiply(np.full((rows, columns), row), weight, backend)
            assert np.array_equal(result, np.full((rows, 19), row * code * columns, np.float32))


@pytest.mark.parametrize("zeros", INT4)
def test_sums_of_int4_codes(zeros: str, backend: str) -> None:
    zero = INT4[zeros]
    for columns, group in ((1, 32), (33, 16), (100, 32), (515, 128), (1100, -1)):
        for out_features in (1, 16, 37):
            codes = np.random.default_rng(columns).integers(0, 16, (out_features, columns))
            weight = raw_weight(Case("int4_dynamic", group), codes)
            if zero is not None:
                weight = weight._replace(zero_point=torch.full_like(weight.scale, zero, dtype=torch.uint8))
            less = codes - (8 if zero is None else zero)
            for rows in (1, 2, 5, 33):
                x = rows_of_codes(rows, columns)
                assert np.array_equal(multiply(x, weight, backend), rounded(x @ less.T))


@pytest.mark.parametrize("row", [-127, 127])
@pytest.mark.parametrize(("code", "zero"), [(0, None), (15, None), (0, 15), (15, 0)])
def test_extreme_int4_codes(code: int, zero: int | None, row: int, backend: str) -> None:
    for columns, group in ((64, 32), (515, 128), (2100, 1024), (4100, -1)):
        weight = raw_weight(Case("int4_dynamic", group), np.full((19, columns), code))
        if zero is not None:
            weight = weight._replace(zero_point=torch.full_like(weight.scale, zero, dtype=torch.uint8))
        value = code - (8 if zero is None else zero)
        for rows in (1, 2, 9):
            result = multiply(np.full((rows, columns), row), weight, backend)
            assert np.array_equal(result, np.full((rows, 19), row * value * columns, np.float32))


@pytest.mark.parametrize("code", [-128, -127, 127])
@pytest.mark.parametrize("row", [-127, 127])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static"])
def test_no_sum_wraps(scheme: str, row: int, code: int, backend: str) -> None:
    """Beyond what 32 bits hold, with a sign and without; float32 holds these very numbers."""
    columns = 140_000
    fields = {"input_scale": torch.tensor(1.0)} if scheme == "int8_static" else {}
    weight = raw_weight(Case(scheme), np.full((17, columns), code), **fields)
    for rows in (1, 3, 17):
        result = multiply(np.full((rows, columns), row), weight, backend)
        assert np.array_equal(result, rounded(np.full((rows, 17), row * code * columns)))


def test_no_sum_of_int4_wraps(backend: str) -> None:
    columns = 140_000
    for code, zero in ((0, None), (15, None), (15, 0), (0, 15)):
        weight = raw_weight(Case("int4_dynamic", -1), np.full((3, columns), code))
        if zero is not None:
            weight = weight._replace(zero_point=torch.full_like(weight.scale, zero, dtype=torch.uint8))
        value = code - (8 if zero is None else zero)
        for rows in (1, 5):
            result = multiply(np.full((rows, columns), -127), weight, backend)
            assert np.array_equal(result, rounded(np.full((rows, 3), -127 * value * columns)))


def test_long_sums_of_both_signs(backend: str) -> None:
    """Partial sums far beyond the result: rounded on the way they would show."""
    columns = 140_001
    codes = np.full((5, columns), -128)
    codes[:, columns // 2 :] = 127
    codes[:, ::3] = 64
    weight = raw_weight(Case("int8_dynamic"), codes)
    for rows in (1, 5):
        x = np.full((rows, columns), 127) - np.arange(rows)[:, None]
        x[:, 0] = 127
        assert np.array_equal(multiply(x, weight, backend), rounded(x @ codes.T))


def unit_weight(scheme: str, columns: int, **fields) -> dk.QuantizedWeight:
    """The identity, by which a product is its own left side."""
    codes = {"int8": np.eye(columns, dtype=np.int64), "int4": 8 + np.eye(columns, dtype=np.int64)}
    # The bits of 1 in e4m3 are those of the exponent's bias.
    codes["fp8_"] = np.eye(columns, dtype=np.int64) * (7 << 3)
    return raw_weight(Case(scheme, -1), codes[scheme[:4]], **fields)


def tricky_rows(columns: int) -> torch.Tensor:
    """Rows of every size, with values on the edges between codes."""
    rows = [torch.randn(columns) * 10.0**power for power in range(-44, 39)]
    half = torch.arange(columns) % 127 + 0.5
    rows += [half * scale for scale in (1.0, -1.0, 2.0**-130, 2.0**100, 0.1, 3e-20)]
    rows += [torch.full((columns,), value) for value in (0.0, -0.0, 3e38, 1e-45, 2.0**-60, 2.0**60)]
    rows += [half.nextafter(torch.tensor(toward)) for toward in (0.0, 1e9)]
    x = torch.stack(rows)
    # The largest of a row of halves is 127, so that its scale is a power of two and ties are ties.
    first = x.shape[0] - 14
    x[first : first + 4, 0] = 127 * torch.tensor([1.0, -1.0, 2.0**-130, 2.0**100])
    x[-2:, 0] = 127
    return x


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_dynamic"])
def test_codes_of_rows(scheme: str, backend: str) -> None:
    for columns in (1, 33, 130):
        x, weight = tricky_rows(columns), unit_weight(scheme, columns)
        codes, scale, unlift = row_codes(x.numpy())
        expected = codes.astype(np.float32) * scale[:, None] * unlift[:, None]
        assert np.array_equal(dk.quantized_matmul(x, weight, backend=backend).numpy(), expected)
        alone = torch.cat([dk.quantized_matmul(row, weight, backend=backend) for row in x.split(1)])
        assert np.array_equal(alone.numpy(), expected)


@pytest.mark.parametrize("step", [1.0, 0.1, 3e-5, 2.0**-126, 1e30])
def test_codes_by_a_static_scale(step: float, backend: str) -> None:
    scale = torch.tensor(step)
    for columns in (1, 33, 130):
        weight = unit_weight("int8_static", columns, input_scale=scale)
        x = torch.cat((tricky_rows(columns), torch.linspace(-130, 130, 7 * columns).view(7, columns) * step))
        expected = static_codes(x.numpy(), scale.numpy()).astype(np.float32) * scale.numpy()
        assert np.array_equal(dk.quantized_matmul(x, weight, backend=backend).numpy(), expected)


def test_codes_of_blocks(backend: str) -> None:
    for columns in (1, 33, 128, 300):
        x = tricky_rows(columns)
        # Every number of e4m3 in reach of its block's scale, and what lies in the middle of two.
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2))[torch.arange(5 * columns) % 253]
        ties = middles.view(5, columns).index_fill_(1, torch.arange(0, columns, 128), 448.0)
        x = torch.cat((x, ties, -ties * 2.0**-10, ties * 2.0**-130))
        weight = unit_weight("fp8_block", columns)
        result = dk.quantized_matmul(x, weight, backend=backend).numpy()
        assert np.array_equal(result, fp8_rows(x.numpy()).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_dynamic", "fp8_block"])
def test_codes_of_half_precision(scheme: str, dtype: torch.dtype, backend: str) -> None:
    """They are those of the same numbers in float32; the result is rounded to the dtype in the end."""
    weight = unit_weight(scheme, 130)
    x = (torch.randn(40, 130) * torch.logspace(-4, 3, 40)[:, None]).to(dtype)
    expected = dk.quantized_matmul(x.float(), weight, backend=backend).to(dtype)
    assert torch.equal(dk.quantized_matmul(x, weight, backend=backend), expected)
