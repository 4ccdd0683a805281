"""quantized_matmul over shapes, schemes, groups and dtypes against numpy, and row by row against itself."""

from __future__ import annotations

import functools

import pytest
import torch
from quantized_matmul_oracle import CASES, Case, Expected, draw_rows, draw_weight
from torch import Tensor

import dskernels as dk

ROWS = (*range(18), 31, 32, 33, 64, 65)
COLUMNS = (1, 2, 31, 33, 100, 144, 288, 576)
GROUPS = (16, 48, 64, 128, 144, 256, 1024, -1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def problem(name: str, out_features: int, columns: int) -> tuple[Tensor, dk.QuantizedWeight, Tensor, Expected]:
    """Kept for all backends: numpy takes longer than they do."""
    weight, bias = draw_weight(CASES[name], out_features, columns), torch.randn(out_features)
    x = draw_rows(max(ROWS), columns)
    return x, weight, bias, Expected(x, weight, bias)


@pytest.mark.parametrize("out_features", [1, 3, 15, 17, 63, 65, 130])
@pytest.mark.parametrize("name", CASES)
def test_every_shape(name: str, out_features: int, backend: str) -> None:
    """Right for all rows at once; and a row has the same bits whatever the number of rows."""
    for columns in COLUMNS:
        x, weight, bias, expected = problem(name, out_features, columns)
        whole = dk.quantized_matmul(x, weight, bias, backend=backend)
        expected.check(whole)
        for rows in ROWS if backend != "reference" else (0, 1, 33):
            result = dk.quantized_matmul(x[:rows], weight, bias, backend=backend)
            # Sums of floats are torch's in the reference, whose order changes with the shape.
            if backend == "reference" and not CASES[name].is_integer:
                expected.check(result, slice(rows))
            else:
                assert torch.equal(result, whole[:rows])


@pytest.mark.parametrize("name", CASES)
def test_a_row_alone(name: str, backend: str) -> None:
    """Rows from the middle of a batch, which other rows of a register tile stand beside."""
    weight = draw_weight(CASES[name], 70, 288)
    x = draw_rows(65, 288)
    whole = dk.quantized_matmul(x, weight, backend=backend)
    alone = torch.cat([dk.quantized_matmul(row, weight, backend=backend) for row in x.split(1)])
    if backend == "reference":
        torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))
    else:
        assert torch.equal(alone, whole)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("scheme", ["int4_dynamic", "int4_weight_only"])
def test_groups(scheme: str, symmetric: bool, group: int, backend: str) -> None:
    for columns, dtype in zip((15, 288, 1100), DTYPES, strict=True):
        weight = draw_weight(Case(scheme, group, symmetric), 19, columns)
        for rows in (1, 4, 19):
            x = draw_rows(rows, columns, dtype=dtype)
            Expected(x, weight).check(dk.quantized_matmul(x, weight, backend=backend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dtypes_of_inputs_and_bias(name: str, dtype: torch.dtype, backend: str) -> None:
    assert_right_with_every_bias(name, dtype, backend)


@pytest.mark.parametrize("name", CASES)
def test_float64(name: str) -> None:
    assert_right_with_every_bias(name, torch.float64, "reference")


def assert_right_with_every_bias(name: str, dtype: torch.dtype, backend: str) -> None:
    weight = draw_weight(CASES[name], 37, 150)
    for rows in (1, 7, 40):
        x = draw_rows(rows, 150, dtype=dtype)
        for bias in (None, *(torch.randn(37).to(kind) for kind in (*DTYPES, torch.float64))):
            Expected(x, weight, bias).check(dk.quantized_matmul(x, weight, bias, backend=backend))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 1, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_leading_dimensions(name: str, shape: tuple[int, ...], backend: str) -> None:
    weight, bias = draw_weight(CASES[name], 20, 65), torch.randn(20)
    x = draw_rows(*shape, 65)
    result = dk.quantized_matmul(x, weight, bias, backend=backend)
    assert result.shape == (*shape, 20)
    if x.numel():
        Expected(x.reshape(-1, 65), weight, bias).check(result)


@pytest.mark.parametrize("name", CASES)
def test_nothing_to_multiply(name: str, backend: str) -> None:
    for rows, out_features, columns in ((3, 0, 70), (0, 0, 70), (3, 9, 0), (0, 9, 0), (3, 0, 0)):
        weight, bias = draw_weight(CASES[name], out_features, columns), torch.randn(out_features)
        x = torch.randn(rows, columns)
        result = dk.quantized_matmul(x, weight, bias, backend=backend)
        assert torch.equal(result, bias.expand(rows, out_features))
        without = dk.quantized_matmul(x, weight, backend=backend)
        assert torch.equal(without, torch.zeros(rows, out_features))


@pytest.mark.parametrize("name", CASES)
def test_sorted_columns(name: str, backend: str) -> None:
    """``input_order`` says which input feature a stored column belongs to."""
    for columns in (33, 288):
        weight = draw_weight(CASES[name], 21, columns)
        sorted_ = weight._replace(input_order=torch.randperm(columns))
        for dtype in DTYPES:
            x = draw_rows(5, columns, dtype=dtype)
            Expected(x, sorted_).check(dk.quantized_matmul(x, sorted_, backend=backend))
        # The same numbers as those of features that were put in order beforehand.
        for rows in (x[:1], x):
            ordered = dk.quantized_matmul(rows[:, sorted_.input_order], weight, backend=backend)
            assert torch.equal(dk.quantized_matmul(rows, sorted_, backend=backend), ordered)


@pytest.mark.parametrize("name", ["int4_dynamic", "int4_weight_only"])
def test_zero_points_beyond_the_codes(name: str, backend: str) -> None:
    """A zero point is a byte; checkpoints that store it less one hold 16."""
    weight = draw_weight(CASES[name], 19, 100)
    zeros = torch.tensor([16, 255, 0, 7], dtype=torch.uint8).expand(19, 4).contiguous()
    weight = weight._replace(zero_point=zeros)
    for rows in (1, 6):
        x = draw_rows(rows, 100)
        Expected(x, weight).check(dk.quantized_matmul(x, weight, backend=backend))


def test_large_enough_for_several_threads_and_panels(backend: str) -> None:
    for name in CASES:
        weight, bias = draw_weight(CASES[name], 1030, 1100), torch.randn(1030)
        for rows in (1, 37):
            x = draw_rows(rows, 1100)
            Expected(x, weight, bias).check(dk.quantized_matmul(x, weight, bias, backend=backend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_inputs_are_left_alone(name: str, dtype: torch.dtype, backend: str) -> None:
    weight, bias = draw_weight(CASES[name], 9, 50), torch.randn(9)
    x = draw_rows(4, 50, dtype=dtype)
    tensors = [x, bias, *(field for field in weight if isinstance(field, Tensor))]
    before = [tensor.clone() for tensor in tensors]
    dk.quantized_matmul(x, weight, bias, backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
