"""quantize_weight: codes and scales by their formulas, and how far what they stand for may be from the weight."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from quantized_matmul_oracle import CASES, E4M3, Case, by_column, draw_weight, stood_for, to_e4m3, weight_codes
from torch import Tensor

import dskernels as dk
from dskernels.quantized_matmul.arguments import check_quantized_weight

SHAPES = [(1, 1), (3, 2), (15, 31), (17, 33), (130, 100), (65, 300), (129, 257)]
INT4 = [name for name in CASES if CASES[name].is_int4]


def quantize(case: Case, weight: Tensor, **options) -> dk.QuantizedWeight:
    if case.is_int4:
        options = {"group_size": case.group, "symmetric": case.symmetric, **options}
    if case.scheme == "int8_static":
        options = {"input_scale": 0.5, **options}
    return dk.quantize_weight(weight, case.scheme, **options)


def blocks(case: Case, weight: np.ndarray, group: int):
    """The parts of a weight that share a scale, in the order of the scales."""
    rows, columns = weight.shape
    height, width = (128, 128) if case.scheme == "fp8_block" else (1, group if case.is_int4 else columns)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield weight[top : top + height, left : left + width]


def squared_error(part: np.ndarray, scale: np.float32) -> np.float64:
    values = np.clip(np.rint(np.float64(part) / scale), -8, 7) * np.float64(scale)
    return np.square(values - part).sum()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales(name: str, shape: tuple[int, int]) -> None:
    case = CASES[name]
    matrix = torch.randn(shape) * torch.randn(shape[0], 1).exp()
    weight = quantize(case, matrix)
    check_quantized_weight(weight)
    assert (weight.in_features, weight.out_features) == (shape[1], shape[0])
    scales, zeros = [], []
    for part in blocks(case, matrix.numpy(), 32):
        largest = np.abs(part).max()
        if case.is_int4 and not case.symmetric:
            low, high = np.minimum(part.min(), np.float32(0)), np.maximum(part.max(), np.float32(0))
            scales.append((high / 2 - low / 2) / np.float32(7.5))
            zeros.append(np.rint(-np.float64(low) / scales[-1]))
        elif case.is_int4:
            # Steps that use all codes, or wider ones that reach both ends, if these leave less.
            narrow, wide = (largest / np.float32(range_) for range_ in (7.5, 7))
            scales.append(wide if squared_error(part, wide) < squared_error(part, narrow) else narrow)
        else:
            scales.append(largest / np.float32(448 if name == "fp8_block" else 127))
    assert np.array_equal(weight.scale.flatten().numpy(), np.array(scales))
    assert (weight.zero_point is None) == (not zeros)
    if zeros:
        assert np.array_equal(weight.zero_point.flatten().numpy(), np.array(zeros))
    exact = matrix.double().numpy() / by_column(weight.scale.double().numpy(), weight)
    if name == "fp8_block":
        quotients = matrix.numpy() / by_column(weight.scale.numpy(), weight)
        assert np.array_equal(weight_codes(weight), to_e4m3(quotients))
        return
    low, high = np.full(shape, -127), np.full(shape, 127)
    if case.is_int4:
        zero = by_column(weight.zero_point.numpy().astype(np.int64), weight) if zeros else np.full(shape, 8)
        low, high = -zero, 15 - zero
    assert np.array_equal(weight_codes(weight), np.clip(np.rint(exact), low, high))


def assert_within_half_a_step(weight: dk.QuantizedWeight, matrix: Tensor) -> None:
    step = by_column(weight.scale.double().numpy(), weight)
    if weight.scheme == "fp8_block":
        # Of e4m3: a sixteenth of a number, or of the smallest that is normal.
        step = step * 2.0 ** np.floor(np.log2(np.maximum(np.abs(matrix.double().numpy() / step), 2.0**-6))) / 8
    off = np.abs(stood_for(weight) - matrix.double().numpy())
    assert (off <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("factor", [1.0, 1e-9, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_a_step(name: str, factor: float) -> None:
    for shape in SHAPES:
        matrix = torch.randn(shape) * factor
        matrix[0] = 0.0
        assert_within_half_a_step(quantize(CASES[name], matrix), matrix)


@pytest.mark.parametrize("name", INT4)
def test_groups_of_one_sign(name: str) -> None:
    for sign, offset in ((1, 0.0), (-1, 0.0), (1, 5.0), (-1, 5.0)):
        matrix = sign * (torch.rand(9, 100) + offset)
        weight = quantize(CASES[name], matrix)
        assert_within_half_a_step(weight, matrix)
        if weight.zero_point is not None:
            # The range reaches from 0 to the largest number, so the code of 0 is the first or the last.
            assert (weight.zero_point == (0 if sign == 1 else 15)).all()


@pytest.mark.parametrize("group", [16, 48, 64, 128, 144, 256, 1024, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_group_sizes(group: int, symmetric: bool) -> None:
    for columns in (16, 100, 1025):
        matrix = torch.randn(5, columns) * torch.randn(5, columns).exp()
        weight = dk.quantize_weight(matrix, "int4_weight_only", group_size=group, symmetric=symmetric)
        assert weight.group_size == (columns if group == -1 else group)
        assert weight.scale.shape == (5, 1 if group == -1 else -(-columns // group))
        assert_within_half_a_step(weight, matrix)


def test_defaults() -> None:
    matrix = torch.randn(9, 300)
    assert dk.quantize_weight(matrix, "int4_dynamic").group_size == 128
    assert dk.quantize_weight(matrix, "int4_dynamic").zero_point is None
    assert dk.quantize_weight(matrix, "int8_dynamic").group_size == 300
    assert dk.quantize_weight(matrix, "fp8_block").group_size == 128
    static = dk.quantize_weight(matrix, "int8_static", input_scale=0.25)
    assert torch.equal(static.input_scale, torch.tensor(0.25))
    for step in (torch.tensor([[0.25]], dtype=torch.float64), torch.tensor(0.25, requires_grad=True)):
        other = dk.quantize_weight(matrix, "int8_static", input_scale=step).input_scale
        assert torch.equal(other, static.input_scale)
        assert not other.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    matrix = torch.randn(20, 100).to(dtype)
    for one, other in zip(quantize(CASES[name], matrix), quantize(CASES[name], matrix.float()), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", CASES)
def test_views(name: str) -> None:
    """The layout of the codes is the canonical one whatever that of the weight."""
    matrix = torch.randn(128, 256)
    case = CASES[name]._replace(group=128)
    views = (matrix.t(), torch.stack((matrix, matrix), -1)[..., 0], matrix[:, :1].expand(128, 256), matrix[::2, 1::3])
    for view in views:
        weight, expected = quantize(case, view), quantize(case, view.contiguous())
        check_quantized_weight(weight)
        for one, other in zip(weight, expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", CASES)
def test_zeros_and_nothing(name: str) -> None:
    for shape in ((0, 40), (9, 0), (0, 0), (9, 40)):
        weight = quantize(CASES[name], torch.zeros(shape))
        check_quantized_weight(weight)
        assert torch.equal(weight.dequantize(), torch.zeros(shape))


@pytest.mark.parametrize("name", CASES)
def test_dequantize(name: str) -> None:
    for order in (None, torch.randperm(100)):
        weight = draw_weight(CASES[name], 37, 100)._replace(input_order=order)
        exact = torch.from_numpy(stood_for(weight))
        assert torch.equal(weight.dequantize(), exact.float())
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(weight.dequantize(dtype), exact.float().to(dtype))
        assert torch.equal(weight.dequantize(torch.float64), exact)


def test_every_code_of_e4m3() -> None:
    weight = dk.QuantizedWeight("fp8_block", torch.arange(256, dtype=torch.uint8)[None], torch.ones(1, 2), 256, 128)
    assert np.array_equal(weight.dequantize().numpy()[0], E4M3.astype(np.float32), equal_nan=True)


def test_no_gradient() -> None:
    matrix = torch.randn(9, 40, requires_grad=True)
    for case in CASES.values():
        assert not any(field.requires_grad for field in quantize(case, matrix) if isinstance(field, Tensor))


@pytest.mark.parametrize(
    ("scheme", "changes", "error", "message"),
    [
        ("int8", {}, ValueError, "scheme: expected one of int8_dynamic, int8_static, .*, got 'int8'"),
        (None, {}, ValueError, "scheme: expected one of .*, got None"),
        ("int8_dynamic", {"weight": [[1.0]]}, TypeError, "weight: expected a tensor"),
        ("int8_dynamic", {"weight": torch.randn(3)}, ValueError, r"weight: expected shape \[N, K\], got \[3\]"),
        (
            "int8_dynamic",
            {"weight": torch.ones(3, 3).int()},
            ValueError,
            "weight: expected float32, .* got torch.int32",
        ),
        (
            "int8_dynamic",
            {"weight": torch.full((2, 2), torch.nan)},
            ValueError,
            "weight: expected finite.*, got 4 that",
        ),
        (
            "fp8_block",
            {"weight": torch.tensor([[1.0, torch.inf]])},
            ValueError,
            "weight: expected finite.*, got 1 that",
        ),
        ("int4_dynamic", {"weight": torch.tensor([[1e39]]).double() * 1e9}, ValueError, "weight: expected finite"),
        ("int8_dynamic", {"symmetric": False}, ValueError, "symmetric: expected True for int8_dynamic, got False"),
        ("fp8_block", {"symmetric": False}, ValueError, "symmetric: expected True for fp8_block"),
        ("int4_dynamic", {"symmetric": 1}, TypeError, "symmetric: expected True or False, got 1"),
        ("int8_dynamic", {"group_size": 32}, ValueError, "group_size: expected None for int8_dynamic, got 32"),
        ("fp8_block", {"group_size": 128}, ValueError, "group_size: expected None for fp8_block"),
        ("int4_dynamic", {"group_size": 32.0}, TypeError, r"group_size: expected an int or None, got 32.0 \(float\)"),
        ("int4_dynamic", {"group_size": True}, TypeError, "group_size: expected an int or None"),
        *(
            ("int4_dynamic", {"group_size": size}, ValueError, f"group_size: expected a multiple of 16 .*, got {size}")
            for size in (-2, 0, 8, 24, 1040)
        ),
        ("int8_static", {}, ValueError, "input_scale: expected the step of the activations for int8_static, got None"),
        ("int8_dynamic", {"input_scale": 1.0}, ValueError, "input_scale: expected None for int8_dynamic, got 1.0"),
        ("int8_static", {"input_scale": "1"}, TypeError, "input_scale: expected a number or a tensor of one element"),
        ("int8_static", {"input_scale": True}, TypeError, "input_scale: expected a number"),
        ("int8_static", {"input_scale": torch.ones(2)}, TypeError, "input_scale: expected a number or a tensor of one"),
        *(
            ("int8_static", {"input_scale": step}, ValueError, "input_scale: expected a positive, finite number")
            for step in (0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e300, torch.tensor(-2.0))
        ),
    ],
)
def test_wrong_arguments(scheme: str, changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"weight": torch.randn(9, 40), "scheme": scheme, **changes}
    with pytest.raises(error, match=message):
        dk.quantize_weight(**arguments)


@pytest.mark.parametrize("name", CASES)
def test_large_weights_are_rounded_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the codes and scales of the whole, whatever a part holds."""
    case, source = CASES[name], torch.randn(700, 90)
    whole = quantize(case, source)
    for size in (1, 300 * 90):
        monkeypatch.setattr(sys.modules[dk.QuantizedWeight.__module__], "_PART", size)
        for one, other in zip(quantize(case, source), whole, strict=True):
            if isinstance(one, Tensor):
                assert one.is_contiguous()
                assert torch.equal(one, other)
            else:
                assert one == other


def test_to_moves_every_tensor() -> None:
    weight = dk.quantize_weight(torch.randn(5, 40), "int4_weight_only", group_size=16, symmetric=False)
    moved = weight.to("meta")
    assert isinstance(moved, dk.QuantizedWeight)
    assert all(part.is_meta for part in moved if isinstance(part, torch.Tensor))
    assert [part for part in moved if not isinstance(part, torch.Tensor)] == ["int4_weight_only", 40, 16, None, None]
