"""The tensors of compressed-tensors, written here value by value, in both directions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import dskernels as dk
from dsaccel.quant.checkpoints import CompressedScheme, from_compressed_tensors, to_compressed_tensors


def words(values: list[int], bits: int) -> list[int]:
    """Values from 0 up in int32 words, lowest bits first; the last word is filled with 0."""
    packed, in_word = [], 32 // bits
    for first in range(0, len(values), in_word):
        total = sum(value << (bits * i) for i, value in enumerate(values[first : first + in_word]))
        packed.append(total - 2**32 if total >= 2**31 else total)
    return packed


def integers(rows: int, columns: int, low: int, high: int) -> list[list[int]]:
    found = [[random.randint(low, high) for _ in range(columns)] for _ in range(rows)]
    found[0][0], found[-1][-1] = low, high
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)


def _int4(rows: int, columns: int, group: int, symmetric: bool, packed: bool, group_of: list[int]) -> tuple[Any, Any]:
    """A weight and its tensors; ``group_of`` is the group of each column."""
    groups = -(-columns // group)
    codes = integers(rows, columns, -8, 7)
    zeros = [[0] * groups] * rows if symmetric else integers(rows, groups, -8, 7)
    scale = torch.empty(rows, groups).uniform_(0.01, 0.1).bfloat16()
    weight = torch.tensor(
        [[float(scale[n, g]) * (codes[n][k] - zeros[n][g]) for k, g in enumerate(group_of)] for n in range(rows)]
    )
    tensors = {"weight_scale": scale}
    if packed:
        tensors["weight_packed"] = torch.tensor(
            [words([code + 8 for code in row], 4) for row in codes], dtype=torch.int32
        )
        tensors["weight_shape"] = torch.tensor([rows, columns])
    else:
        tensors["weight"] = torch.tensor(codes, dtype=torch.int8)
    if not symmetric and packed:
        # [ceil(N / 8), G]: consecutive rows in one word.
        stored = [words([zeros[n][g] + 8 for n in range(rows)], 4) for g in range(groups)]
        tensors["weight_zero_point"] = torch.tensor(stored, dtype=torch.int32).T.contiguous()
    elif not symmetric:
        tensors["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
    return weight, tensors


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("scheme", ["int4_weight_only", "int4_dynamic"])
@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        pytest.param(8, 32, 16, id="small"),
        pytest.param(131, 64, 32, id="odd_rows_more_than_a_block"),
        pytest.param(3, 37, 37, id="odd_columns"),
        pytest.param(1, 1, 1, id="one_weight"),
    ],
)
def test_int4_both_ways(rows: int, columns: int, group: int, format: str, scheme: str, symmetric: bool) -> None:
    is_packed = format == "pack-quantized"
    want, tensors = _int4(rows, columns, group, symmetric, is_packed, [k // group for k in range(columns)])
    stored = CompressedScheme(scheme, format, None if group == columns else group, symmetric)
    weight = from_compressed_tensors(tensors, stored)
    assert weight.scheme == scheme
    assert torch.equal(weight.dequantize(), want)
    assert (weight.zero_point is None) == symmetric
    again, back = to_compressed_tensors(weight)
    assert again.format == ("pack-quantized" if scheme == "int4_weight_only" else "int-quantized")
    assert (again.group_size, again.symmetric, again.scheme) == (stored.group_size, symmetric, scheme)
    if again == stored:
        _assert_same(back, tensors)
    _assert_same(from_compressed_tensors(back, again)._asdict(), weight._asdict())


def _assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if not isinstance(value, Tensor):
            assert got[name] == value, name
        elif name == "weight_scale":
            assert torch.equal(got[name], value.float()), name
        else:
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
def test_sorted_columns_both_ways(format: str) -> None:
    group_of = [0, 1] * 24
    random.shuffle(group_of)
    want, tensors = _int4(16, 48, 24, False, format == "pack-quantized", group_of)
    # Groups of 24 are of no use to dskernels.
    tensors["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    scheme = "int4_weight_only" if format == "pack-quantized" else "int4_dynamic"
    with pytest.raises(ValueError, match="group_size: expected a multiple of 16, or -1 for all 48 columns, got 24"):
        from_compressed_tensors(tensors, CompressedScheme(scheme, format, 24, False, ordered=True))
    group_of = [0, 1, 2] * 16
    random.shuffle(group_of)
    want, tensors = _int4(16, 48, 16, False, format == "pack-quantized", group_of)
    tensors["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    stored = CompressedScheme(scheme, format, 16, False, ordered=True)
    weight = from_compressed_tensors(tensors, stored)
    assert weight.input_order is not None
    assert torch.equal(weight.dequantize(), want)
    again, back = to_compressed_tensors(weight)
    assert again == stored
    _assert_same(back, tensors)


def test_column_order_of_one_group_is_undone() -> None:
    weight = dk.quantize_weight(torch.randn(8, 48), "int4_weight_only", group_size=-1)
    weight = weight._replace(input_order=torch.randperm(48))
    scheme, tensors = to_compressed_tensors(weight)
    assert not scheme.ordered
    assert "weight_g_idx" not in tensors
    assert torch.equal(from_compressed_tensors(tensors, scheme).dequantize(), weight.dequantize())


def test_codes_at_an_odd_place_in_memory() -> None:
    weight = dk.quantize_weight(torch.randn(8, 48), "int4_weight_only", group_size=16)
    shifted = torch.empty(8 * 24 + 1, dtype=torch.uint8)[1:].view(8, 24).copy_(weight.qweight)
    _, want = to_compressed_tensors(weight)
    _assert_same(to_compressed_tensors(weight._replace(qweight=shifted))[1], want)


def test_g_idx_that_was_never_filled_is_not_read() -> None:
    want, tensors = _int4(8, 32, 16, True, True, [k // 16 for k in range(32)])
    tensors["weight_g_idx"] = torch.full((32,), -1, dtype=torch.int32)
    weight = from_compressed_tensors(tensors, CompressedScheme("int4_weight_only", "pack-quantized", 16))
    assert torch.equal(weight.dequantize(), want)


@pytest.mark.parametrize("per_tensor", [False, True], ids=["channel", "tensor"])
@pytest.mark.parametrize("columns", [32, 37])
@pytest.mark.parametrize(
    ("scheme", "format"),
    [
        ("int8_weight_only", "pack-quantized"),
        ("int8_weight_only", "int-quantized"),
        ("int8_dynamic", "int-quantized"),
        ("int8_static", "int-quantized"),
        ("int8_dynamic", "naive-quantized"),
    ],
)
def test_int8_both_ways(scheme: str, format: str, columns: int, per_tensor: bool) -> None:
    codes = integers(5, columns, -128, 127)
    scale = torch.empty(1 if per_tensor else 5, 1).uniform_(0.01, 0.1).half()
    if format == "pack-quantized":
        packed = torch.tensor([words([code + 128 for code in row], 8) for row in codes], dtype=torch.int32)
        tensors = {"weight_packed": packed, "weight_shape": torch.tensor([5, columns])}
    else:
        tensors = {"weight": torch.tensor(codes, dtype=torch.int8)}
    tensors["weight_scale"] = scale[0] if per_tensor else scale
    if scheme == "int8_static":
        tensors["input_scale"] = torch.tensor([0.25]).bfloat16()
    weight = from_compressed_tensors(tensors, CompressedScheme(scheme, format, per_tensor=per_tensor))
    assert weight.scheme == scheme
    rows = [[float(scale[0 if per_tensor else n, 0]) * code for code in row] for n, row in enumerate(codes)]
    assert torch.equal(weight.dequantize(), torch.tensor(rows))
    assert weight.input_scale is None if scheme != "int8_static" else float(weight.input_scale) == 0.25
    again, back = to_compressed_tensors(weight)
    for name in ("weight", "weight_packed", "weight_shape"):
        if name in tensors and name in back:
            assert torch.equal(back[name], tensors[name])
    _assert_same(from_compressed_tensors(back, again)._asdict(), weight._asdict())


def test_fp8_both_ways() -> None:
    codes = torch.randn(130, 200).to(torch.float8_e4m3fn)
    scale = torch.empty(2, 2).uniform_(0.01, 0.1)
    stored = CompressedScheme("fp8_block", "float-quantized")
    weight = from_compressed_tensors({"weight": codes, "weight_scale": scale}, stored)
    want = [
        [float(scale[n // 128, k // 128]) * float(codes[n, k]) for k in range(0, 200, 9)] for n in range(0, 130, 43)
    ]
    assert torch.allclose(weight.dequantize()[::43, ::9], torch.tensor(want), rtol=1e-7, atol=0.0)
    again, back = to_compressed_tensors(weight)
    assert again == stored
    assert torch.equal(back["weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(back["weight_scale"], scale)


def test_zeros_that_are_stored_for_symmetric_weights() -> None:
    tensors = {"weight": torch.ones(2, 16, dtype=torch.int8), "weight_scale": torch.ones(2, 1)}
    scheme = CompressedScheme("int8_dynamic", "int-quantized")
    zeros = {"weight_zero_point": torch.zeros(2, 1, dtype=torch.int8), "input_zero_point": torch.zeros(1)}
    assert torch.equal(from_compressed_tensors({**tensors, **zeros}, scheme).dequantize(), torch.ones(2, 16))
    for name in zeros:
        with pytest.raises(ValueError, match=f"{name}: expected 0, for symmetric quantization, got others"):
            from_compressed_tensors({**tensors, name: torch.ones(2, 1)}, scheme)


PACKED = CompressedScheme("int4_weight_only", "pack-quantized", 16, False)
BYTES = CompressedScheme("int4_dynamic", "int-quantized", 16, False)
STATIC = CompressedScheme("int8_static", "int-quantized")


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (PACKED, {"weight_shape": torch.tensor([8, 33])}, r"weight_packed: expected shape \[8, 5\], got \[8, 4\]"),
        (PACKED, {"weight_shape": torch.tensor([8])}, r"weight_shape: expected shape \[2\], got \[1\]"),
        (PACKED, {"weight_packed": torch.zeros(8, 4)}, "weight_packed: expected torch.int32, got torch.float32"),
        (PACKED, {"weight_scale": torch.ones(8, 3)}, r"weight_scale: expected shape \[8, 2\], got \[8, 3\]"),
        (PACKED, {"weight_zero_point": torch.zeros(8, 2, dtype=torch.int8)}, "weight_zero_point: expected torch.int32"),
        (PACKED, {"weight_g_idx": torch.zeros(32, dtype=torch.int32)}, "weight_g_idx: expected 16 columns in each"),
        (
            BYTES,
            {"weight": torch.full((8, 32), 8, dtype=torch.int8)},
            "weight: expected codes of -8 to 7.*, got 8 to 8",
        ),
        (BYTES, {"weight": torch.zeros(8, 32)}, "weight: expected torch.int8, got torch.float32"),
        (
            BYTES,
            {"weight_zero_point": torch.full((8, 2), -9, dtype=torch.int8)},
            "weight_zero_point: expected codes of -8 to 7 for 4 bits, got -9 to -9",
        ),
        (STATIC, {"weight_scale": torch.ones(8, 2)}, r"weight_scale: expected shape \[8, 1\], got \[8, 2\]"),
        (STATIC, {"input_scale": torch.ones(2)}, r"input_scale: expected one floating point element, got .* \[2\]"),
        (STATIC, {"weight_g_idx": torch.ones(32, dtype=torch.int32)}, "weight_g_idx: expected one group"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(scheme: CompressedScheme, changes: Any, message: str) -> None:
    if scheme is STATIC:
        tensors = {"weight": torch.ones(8, 32, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
        tensors["input_scale"] = torch.ones(1)
    else:
        _, tensors = _int4(8, 32, 16, False, scheme is PACKED, [k // 16 for k in range(32)])
    with pytest.raises(ValueError, match=message):
        from_compressed_tensors({**tensors, **changes}, scheme)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        pytest.param(
            dk.quantize_weight(torch.ones(4, 80), "int4_dynamic", group_size=32),
            "group_size: expected one that divides 80 .*, got 32",
            id="short_last_group",
        ),
        pytest.param(
            dk.quantize_weight(torch.ones(4, 32), "int4_dynamic", group_size=32)._replace(
                zero_point=torch.full((4, 1), 16, dtype=torch.uint8)
            ),
            "zero_point: expected at most 15, got 16",
            id="zero_point",
        ),
        pytest.param(
            dk.quantize_weight(torch.ones(4, 32), "int8_dynamic")._replace(input_order=torch.arange(32)),
            "input_order: expected none for int8_dynamic, got one",
            id="order_of_int8",
        ),
    ],
)
def test_weights_that_the_format_cannot_hold_are_errors(weight: dk.QuantizedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_compressed_tensors(weight)


def test_only_quantized_weights_are_converted() -> None:
    with pytest.raises(TypeError, match="weight: expected a QuantizedWeight, got a tensor"):
        to_compressed_tensors(torch.ones(4, 4))
