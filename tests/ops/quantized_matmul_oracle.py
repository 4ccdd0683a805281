"""Products with quantized weights computed in another way than the package computes them, to compare with.

Everything follows the formulas of the documentation in numpy: codes of activations in float32, step by step; e4m3 from
the bits of its definition; sums in float64, where those of codes are exact. Weights are made of codes that were drawn,
so that nothing rests on `quantize_weight`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import dskernels as dk
from dskernels.testing import assert_close_to_reference

HALF_UNIT = 2.0**-24  # of float32: what one rounding may be off by, relatively
SMALLEST = 2.0**-149


class Case(NamedTuple):
    scheme: str
    group: int = 32
    symmetric: bool = True

    @property
    def is_int4(self) -> bool:
        return self.scheme.startswith("int4")

    @property
    def is_integer(self) -> bool:
        """Whether the activations are in int8, so that products are sums of integers."""
        return self.scheme in ("int8_dynamic", "int8_static", "int4_dynamic")


CASES = {
    "int8_dynamic": Case("int8_dynamic"),
    "int8_static": Case("int8_static"),
    "int8_weight_only": Case("int8_weight_only"),
    "int4_dynamic": Case("int4_dynamic"),
    "int4_dynamic_asymmetric": Case("int4_dynamic", symmetric=False),
    "int4_weight_only": Case("int4_weight_only"),
    "int4_weight_only_asymmetric": Case("int4_weight_only", symmetric=False),
    "fp8_block": Case("fp8_block"),
}


def raw_weight(case: Case, codes: np.ndarray, scale: np.ndarray | float = 1.0, **fields) -> dk.QuantizedWeight:
    """A weight of codes ``[N, K]``: -128 to 127, 0 to 15, or bits of e4m3. A scale that is a number holds for all."""
    rows, columns = codes.shape
    group = 128 if case.scheme == "fp8_block" else columns
    sizes: tuple[int, ...] = (rows,)
    if case.is_int4:
        group = columns if case.group == -1 else case.group
        sizes = (rows, -(-columns // group) if columns else 0)
        padded = np.zeros((rows, columns + columns % 2), np.int64)
        padded[:, :columns] = codes
        codes = padded[:, ::2] + 16 * padded[:, 1::2]
    elif case.scheme == "fp8_block":
        sizes = (-(-rows // 128), -(-columns // 128))
    kind = np.int8 if case.scheme.startswith("int8") else np.uint8
    scales = torch.from_numpy(np.broadcast_to(scale, sizes).astype(np.float32))
    if case.scheme == "int8_static":
        fields.setdefault("input_scale", torch.tensor(0.03))
    return dk.QuantizedWeight(case.scheme, torch.from_numpy(codes.astype(kind)), scales, columns, group, **fields)


def draw_weight(case: Case, rows: int, columns: int) -> dk.QuantizedWeight:
    """Codes over their whole range, -128 included, and for each group a scale (and zero point) like no other."""
    source = np.random.default_rng(int(torch.randint(2**31, ())))
    shape = (rows, columns)
    if case.is_int4:
        codes = source.integers(0, 16, shape)
    elif case.scheme == "fp8_block":
        codes = source.integers(0, 127, shape) + 128 * source.integers(0, 2, shape)
    else:
        codes = source.integers(-128, 128, shape)
    like = raw_weight(case, codes)
    scales = np.exp(source.normal(-4, 1, tuple(like.scale.shape)))
    fields = {}
    if not case.symmetric:
        fields["zero_point"] = torch.from_numpy(source.integers(0, 16, scales.shape).astype(np.uint8))
    return raw_weight(case, codes, scales, **fields)


def draw_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of different sizes and means."""
    sizes = torch.randn(*shape[:-1], 1).exp()
    return (sizes * (torch.randn(shape) + torch.randn(*shape[:-1], 1))).to(dtype)


def weight_codes(weight: dk.QuantizedWeight) -> np.ndarray:
    """What the scales multiply, ``[N, K]``: integers less their zero points, or the values of e4m3."""
    stored, columns = weight.qweight.numpy(), weight.in_features
    if weight.scheme.startswith("int8"):
        return stored.astype(np.int64)
    if weight.scheme == "fp8_block":
        return E4M3[stored]
    codes = np.empty((stored.shape[0], 2 * stored.shape[1]), np.int64)
    codes[:, ::2], codes[:, 1::2] = stored % 16, stored // 16
    zeros = 8 if weight.zero_point is None else by_column(weight.zero_point.numpy().astype(np.int64), weight)
    return codes[:, :columns] - zeros


def by_column(values: np.ndarray, weight: dk.QuantizedWeight) -> np.ndarray:
    """A value for each group or block, for each ``[N, K]``."""
    rows, columns = weight.qweight.shape[0], weight.in_features
    if weight.scheme.startswith("int8"):
        return np.broadcast_to(values[:, None], (rows, columns))
    row = np.arange(rows)[:, None] // (128 if weight.scheme == "fp8_block" else 1)
    return values[row, np.arange(columns)[None] // max(weight.group_size, 1)]


def stood_for(weight: dk.QuantizedWeight) -> np.ndarray:
    """The weight ``[N, K]`` in float64, exactly, in the order of the input features."""
    values = weight_codes(weight) * by_column(weight.scale.double().numpy(), weight)
    if weight.input_order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, weight.input_order.numpy()] = values
    return ordered


def _decode_e4m3() -> np.ndarray:
    # One bit of sign, four of exponent (bias 7, 0 for subnormal numbers), three of mantissa; all ones is NaN.
    values = np.empty(256)
    for bits in range(256):
        exponent, mantissa = bits >> 3 & 15, bits & 7
        size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
        values[bits] = -size if bits & 128 else size
    values[[127, 255]] = np.nan
    return values


E4M3 = _decode_e4m3()


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest numbers of e4m3, of two that are equally near the one with even bits; up to 448."""
    sizes, table = np.abs(values).astype(np.float64), E4M3[:127]
    above = np.clip(np.searchsorted(table, sizes), 1, 126)
    low, high = sizes - table[above - 1], table[above] - sizes
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return np.copysign(table[np.where(up, above, above - 1)], values)


def row_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of the rows of float32 ``x``, their scales, and what undoes the lift of rows that are tiny or huge."""
    codes = np.zeros(x.shape, np.int64)
    scale, unlift = np.zeros(len(x), np.float32), np.ones(len(x), np.float32)
    for i, row in enumerate(x):
        largest = np.abs(row).max(initial=np.float32(0))
        lift = np.float32(2.0**64 if largest < 2.0**-60 else 2.0**-64 if largest > 2.0**60 else 1.0)
        largest, unlift[i] = largest * lift, 1 / lift
        if largest > 0:
            rounded = np.rint(row * lift * (np.float32(127) / largest))
            codes[i] = np.clip(rounded, -127, 127).astype(np.int64)
        scale[i] = largest / np.float32(127)
    return codes, scale, unlift


def static_codes(x: np.ndarray, input_scale: np.float32) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.clip(np.rint(x * (np.float32(1) / input_scale)), -127, 127).astype(np.int64)


def fp8_rows(x: np.ndarray) -> np.ndarray:
    """Rows of float32 ``x`` as blocks of 128 numbers of e4m3 with a scale each, in float64."""
    result = np.empty(x.shape)
    for first in range(0, x.shape[1], 128):
        block = x[:, first : first + 128]
        scale = np.maximum(np.abs(block).max(1, keepdims=True) / np.float32(448), np.float32(2.0**-126))
        result[:, first : first + 128] = to_e4m3(block / scale) * scale.astype(np.float64)
    return result


class Expected:
    """What a product of float tensors ``x`` ``[M, K]`` is to be, for all rows or some."""

    def __init__(self, x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> None:
        self.dtype, self.is_integer = x.dtype, Case(weight.scheme).is_integer
        if weight.input_order is not None:
            x, weight = x[:, weight.input_order], weight._replace(input_order=None)
        added = np.zeros(weight.out_features) if bias is None else bias.double().numpy()
        if self.is_integer:
            product, allowed = _integer_product(x.float().numpy(), weight)
            self.exact = torch.from_numpy(product + added)
            # The bias is rounded, then the sum.
            allowed += HALF_UNIT * (np.abs(added) + np.abs(product + added)) + 2 * SMALLEST
            self.allowed = torch.from_numpy(allowed)
            return
        given = x if weight.scheme != "fp8_block" else torch.from_numpy(fp8_rows(x.float().numpy()))
        stands_for = torch.from_numpy(stood_for(weight))
        self.exact = given.double() @ stands_for.T + torch.from_numpy(added)
        inputs = (tensor.to(x.dtype) for tensor in (given, stands_for, torch.from_numpy(added)))
        self.plain = torch.nn.functional.linear(*inputs)

    def check(self, result: Tensor, rows: slice = slice(None)) -> None:
        """Asserts that ``result``, shape ``[..., N]``, is right for ``rows``."""
        assert result.dtype == self.dtype
        assert result.is_contiguous()
        result, exact = result.reshape(-1, self.exact.shape[1]), self.exact[rows]
        assert result.shape == exact.shape
        if not self.is_integer:
            assert_close_to_reference(result, exact, self.plain[rows])
            return
        unit = torch.finfo(self.dtype)
        rounding = exact.abs() * unit.eps / 2 + unit.smallest_normal * unit.eps / 2
        error, allowed = (result.double() - exact).abs(), self.allowed[rows] + rounding
        # Not "error <= allowed" alone, which a NaN would not fail in a maximum.
        wrong = ~(error <= allowed)
        assert not wrong.any(), (
            f"{int(wrong.sum())} wrong, off by up to {float((error / allowed).max()):.3g} allowances"
        )


def _integer_product(x: np.ndarray, weight: dk.QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    """Products of codes in float64, and what float32 may be off by.

    For int8 three roundings: of the sum, of its product with the scale of the row, and of that with the channel's. For
    int4 one for each product of a weight with its scale, each sum over groups, the scale of the row.
    """
    unlift, size = np.ones(len(x)), 1.0
    if weight.input_scale is None:
        codes, scale, unlift = row_codes(x)
    else:
        size = weight.input_scale.numpy()
        codes, scale = static_codes(x, size), np.full(len(x), size)
    scale = (scale.astype(np.float64) * unlift)[:, None]
    codes, multiplied = codes.astype(np.float64), weight_codes(weight).astype(np.float64)
    if weight.scheme.startswith("int8"):
        # Every partial sum is an integer below 2**53: exact, whatever the order.
        product = codes @ multiplied.T * scale * weight.scale.double().numpy()
        return product, 4 * HALF_UNIT * np.abs(product)
    matrix = multiplied * by_column(weight.scale.double().numpy(), weight)
    roundings = 4 + weight.scale.shape[1]
    return codes @ matrix.T * scale, roundings * HALF_UNIT * (np.abs(codes) @ np.abs(matrix).T * scale)
