"""What the Triton kernels of quantized_matmul read and write in few bits: codes of activations, codes of weights.

Activations are rounded by a kernel of its own before the product, each row once: inside the product every tile of
columns would do it again, and a scale is not known before all of a row has been seen.

Floats of e4m3 are decoded, and rounded to, by operations on bits, which every GPU has: units for them come with sm_89,
and add up what they multiply in less than float32. As float16, which holds them exactly, they have exact products too.
"""
# Triton reads annotations, as objects: no `from __future__ import annotations` here, and few on what it compiles.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskernels.quantized_matmul.weight import FP8_BLOCK, INT4_SCHEMES, SCHEMES

# Columns of a row, and blocks of e4m3, that a program takes at a time.
_ROW_BLOCK = 1024
_FP8_BLOCKS = 8
# Rows and columns of a tile of weights that is turned into floats.
_DEQUANTIZED = (32, 128)

_INT8_LARGEST = tl.constexpr(127.0)
_FP8_LARGEST = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
# As the reference has them: rows beyond these bounds are lifted into the middle of float32's range.
_SMALL, _LARGE, _LIFT = tl.constexpr(2.0**-60), tl.constexpr(2.0**60), tl.constexpr(2.0**64)
# Added and taken away again, these round to the nearest integer, and to the nearest multiple of 2**-9, ties to even.
_INTEGERS, _STEPS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(1.5 * 2.0**14)
_SMALLEST_E4M3 = tl.constexpr(2.0**-6)
# The code of 0 where groups are symmetric.
INT4_ZERO = tl.constexpr(8)


@triton.jit
def _int8_codes(x, by):
    """``clamp(round(x * by), -127, 127)``, and 0 for a NaN."""
    scaled = x * by
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    # Clamped first, so that what rounds by addition is small enough for it.
    scaled = tl.minimum(tl.maximum(scaled, -_INT8_LARGEST), _INT8_LARGEST)
    return ((scaled + _INTEGERS) - _INTEGERS).to(tl.int8)


@triton.jit
def _quantize_rows_kernel(
    x, input_scale, codes, row_scale, unlift, x_stride, x_column_stride, columns, BLOCK: tl.constexpr
):
    """One row as `activations.quantize_rows` has it, or with ``input_scale`` as `activations.quantize_rows_by`."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * x_stride
    magnitudes = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int1)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(x_row + at.to(tl.int64) * x_column_stride, mask=at < columns, other=0.0).to(tl.float32)
        magnitude = tl.abs(values)
        # What a maximum makes of a NaN differs between GPU and interpreter; the flag tells of it.
        finite = magnitude < float("inf")
        broken = broken | ~finite
        magnitudes = tl.maximum(magnitudes, tl.where(finite, magnitude, 0.0))
    is_finite = tl.max(broken.to(tl.int32), 0) == 0
    lift = 1.0
    # A plain `/` is off by a unit in the last place on a GPU.
    if input_scale is not None:
        scale = tl.load(input_scale)
        by = tl.div_rn(1.0, scale)
    else:
        largest = tl.max(magnitudes, 0)
        is_small, is_large = largest < _SMALL, largest > _LARGE
        lift = tl.where(is_small, _LIFT, tl.where(is_large, 1 / _LIFT, 1.0))
        largest = largest * lift
        scale = tl.div_rn(largest, _INT8_LARGEST)
        by = tl.where(largest > 0, tl.div_rn(_INT8_LARGEST, tl.where(largest > 0, largest, 1.0)), 0.0)
        tl.store(unlift + row, tl.where(is_small, 1 / _LIFT, tl.where(is_large, _LIFT, 1.0)))
    tl.store(row_scale + row, tl.where(is_finite, scale, float("nan")))
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(x_row + at.to(tl.int64) * x_column_stride, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(codes + row * columns + at, _int8_codes(values * lift, by), mask=at < columns)


@triton.jit
def _rounded_to_e4m3(x):
    """``x``, at most 448 and its rounding in magnitude, to the nearest float of e4m3, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    # Half a unit of the fourth digit, less a little where that digit is even, carries or does not; the rest is cut.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < _SMALLEST_E4M3, (x + _STEPS) - _STEPS, normal.to(tl.float32, bitcast=True))


@triton.jit
def _quantize_blocks_kernel(
    x,
    codes,
    block_scale,
    x_stride,
    x_column_stride,
    columns,
    blocks,
    chunks,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Some blocks of a row as `activations.quantize_blocks` has them, ``codes`` as float16 and without their scale."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(x + row * x_stride + at.to(tl.int64) * x_column_stride, mask=at < columns, other=0.0)
    values = values.to(tl.float32)
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    broken = tl.max((~finite).to(tl.int32), 1) > 0
    largest = tl.max(tl.where(finite, magnitude, 0.0), 1)
    scale = tl.maximum(tl.div_rn(largest, _FP8_LARGEST), _SMALLEST_NORMAL)
    scaled = tl.div_rn(tl.where(finite, values, 0.0), tl.zeros_like(values) + scale[:, None])
    tl.store(codes + row * columns + at, _rounded_to_e4m3(scaled).to(tl.float16), mask=at < columns)
    tl.store(block_scale + row * blocks + block, tl.where(broken, float("nan"), scale), mask=block < blocks)


@triton.jit
def _decoded_e4m3(bits):
    """The floats of e4m3 that ``bits``, uint8, stand for, as float16."""
    wide = bits.to(tl.uint16)
    # Seven bits that lie three below the top make, with float16's bias of 15 for 7, a number that is 2**-8 of it.
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float16, bitcast=True) * 256.0)


@triton.jit
def weight_codes(
    qweight, row, inside, k, width, INT4: tl.constexpr, FP8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The codes ``[BLOCK_N, BLOCK_K]`` of rows of a weight from column ``k`` on, those of e4m3 decoded.

    Rows are of ``width`` bytes. What is past their end, or not ``inside``, is 0. Two codes lie in a byte, so ``k`` is
    even.
    """
    at = (k // 2 if INT4 else k) + tl.arange(0, BLOCK_K // 2 if INT4 else BLOCK_K)
    there = inside[:, None] & (at < width)[None, :]
    codes = tl.load(qweight + row.to(tl.int64)[:, None] * width + at[None, :], mask=there, other=0)
    if INT4:
        codes = tl.join(codes & 15, codes >> 4).reshape(BLOCK_N, BLOCK_K)
    elif FP8:
        codes = _decoded_e4m3(codes)
    return codes


@triton.jit
def zero_points(zero_point, at, inside):
    """The codes of 0 of some groups, int32."""
    if zero_point is None:
        zero = tl.zeros_like(at).to(tl.int32) + INT4_ZERO
    else:
        zero = tl.load(zero_point + at, mask=inside, other=0).to(tl.int32)
    return zero


@triton.jit
def _dequantize_kernel(
    qweight,
    scale,
    zero_point,
    input_order,
    weight,
    rows,
    columns,
    width,
    group_size,
    groups,
    tiles,
    SCALE_ROWS: tl.constexpr,
    INT4: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the weight as `weight.dequantize` has it, rounded to the dtype of ``weight``."""
    row = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) % tiles * BLOCK_K
    column = k + tl.arange(0, BLOCK_K)
    inside, seen = row < rows, column < columns
    both = inside[:, None] & seen[None, :]
    values = weight_codes(qweight, row, inside, k, width, INT4, FP8, BLOCK_N, BLOCK_K)
    at = (row // SCALE_ROWS).to(tl.int64)[:, None] * groups + (column // group_size)[None, :]
    if INT4:
        values = values.to(tl.int32) - zero_points(zero_point, at, both)
    values = values.to(tl.float32) * tl.load(scale + at, mask=both, other=0.0)
    place = column.to(tl.int64)
    if input_order is not None:
        place = tl.load(input_order + column, mask=seen, other=0)
        # Nobody has looked at an order on a GPU, which would wait for it: a wrong one stays within the weight.
        both = both & ((place >= 0) & (place < columns))[None, :]
    target = weight + row.to(tl.int64)[:, None] * columns + place[None, :]
    tl.store(target, values.to(weight.dtype.element_ty), mask=both)


def columns_of_scale(scheme: str, group_size: int, in_features: int) -> int:
    """How many columns of a weight share a scale, or more than there are; 1 at least."""
    if scheme == "fp8_block":
        return FP8_BLOCK
    return max(1, group_size if scheme in INT4_SCHEMES else in_features)


def quantize_rows(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """int8 codes of the rows of ``x`` ``[M, K]``; their scale, and 1 / lift where there is no ``input_scale``,
    float32 ``[M]``."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    unlift = torch.empty_like(row_scale) if input_scale is None else None
    _quantize_rows_kernel[(rows,)](
        x, input_scale, codes, row_scale, unlift, *x.stride(), columns, BLOCK=_ROW_BLOCK, enable_fp_fusion=False
    )
    return codes, row_scale, unlift


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``[M, K]`` in floats of e4m3, float16, and their scales, float32 ``[M, ceil(K / 128)]``."""
    rows, columns = x.shape
    blocks = triton.cdiv(columns, FP8_BLOCK)
    codes = torch.empty(rows, columns, dtype=torch.float16, device=x.device)
    block_scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    chunks = triton.cdiv(blocks, _FP8_BLOCKS)
    if codes.numel() > 0:
        _quantize_blocks_kernel[(rows * chunks,)](
            x,
            codes,
            block_scale,
            *x.stride(),
            columns,
            blocks,
            chunks,
            SIZE=FP8_BLOCK,
            BLOCKS=_FP8_BLOCKS,
            enable_fp_fusion=False,
        )
    return codes, block_scale


def dequantize(
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    input_order: Tensor | None,
    scheme: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weight ``[N, K]`` that codes stand for, in the order of the input features, rounded to ``dtype``."""
    rows = qweight.shape[0]
    weight = torch.empty(rows, in_features, dtype=dtype, device=qweight.device)
    if weight.numel() == 0:
        return weight
    name, (block_rows, block_columns) = SCHEMES[scheme], _DEQUANTIZED
    tiles = triton.cdiv(in_features, block_columns)
    group_size = columns_of_scale(name, group_size, in_features)
    _dequantize_kernel[(triton.cdiv(rows, block_rows) * tiles,)](
        qweight,
        scale,
        zero_point,
        input_order,
        weight,
        rows,
        in_features,
        qweight.shape[1],
        group_size,
        triton.cdiv(in_features, group_size),
        tiles,
        SCALE_ROWS=FP8_BLOCK if name == "fp8_block" else 1,
        INT4=name in INT4_SCHEMES,
        FP8=name == "fp8_block",
        BLOCK_N=block_rows,
        BLOCK_K=block_columns,
    )
    return weight
