"""Quantized weights: what they hold, how they are made, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dskernels.checks import is_integer, is_number, is_readable, shape_of, wrong_type, wrong_value

SCHEMES = (
    "int8_dynamic",
    "int8_static",
    "int8_weight_only",
    "int4_dynamic",
    "int4_weight_only",
    "fp8_block",
)
INT4_SCHEMES = ("int4_dynamic", "int4_weight_only")

# Sides of the square blocks of a weight, and length of the blocks of an activation, that share a scale.
FP8_BLOCK = 128
FP8_LARGEST = 448.0
INT8_LARGEST = 127.0
# The code of 0 where groups are symmetric, and half the steps of their range.
INT4_ZERO = 8
_INT4_HALF_RANGE = 7.5
_INT4_SYMMETRIC_RANGE = 7.0
_DEFAULT_GROUP = 128
_SMALLEST_NORMAL = 2.0**-126
# Weights that are rounded at a time: what stands in between is of float64, several times over.
_PART = 2**22


class QuantizedWeight(NamedTuple):
    """A weight ``[N, K]`` (``[out_features, in_features]``) in few bits, as plain tensors in one canonical layout.

    It stands for, by scheme::

        int8_*:     W[n, k] = scale[n] * qweight[n, k]
        int4_*:     W[n, k] = scale[n, k // group_size] * (code[n, k] - zero_point[n, k // group_size])
        fp8_block:  W[n, k] = scale[n // 128, k // 128] * e4m3(qweight[n, k])

    ``code[n, k]`` is the low half of the byte ``qweight[n, k // 2]`` for even ``k``, the high half for odd ones. With
    ``input_order``, column ``k`` belongs to input feature ``input_order[k]``.

    Attributes:
        scheme: one of ``int8_dynamic``, ``int8_static``, ``int8_weight_only``, ``int4_dynamic``, ``int4_weight_only``,
            ``fp8_block``; see `quantized_matmul`.
        qweight: the codes, contiguous: int8 ``[N, K]``; uint8 ``[N, ceil(K / 2)]`` for int4; uint8 ``[N, K]``, the bits
            of float8_e4m3fn, for fp8 (a float8 tensor would be cast by ``model.half()`` and cannot be pickled).
        scale: float32, contiguous: ``[N]``; ``[N, ceil(K / group_size)]`` for int4;
            ``[ceil(N / 128), ceil(K / 128)]`` for fp8.
        in_features: ``K``.
        group_size: columns that share a scale: a multiple of 16 or ``K`` for int4, 128 for fp8, ``K`` for int8.
        zero_point: uint8, shape of ``scale``: the code of 0, for asymmetric int4. Default: 8 everywhere.
        input_scale: float32 ``[]``, for ``int8_static``: the step of the activations.
        input_order: int64 ``[K]``, a permutation, for weights whose columns were sorted (GPTQ's act-order).
    """

    scheme: str
    qweight: Tensor
    scale: Tensor
    in_features: int
    group_size: int
    zero_point: Tensor | None = None
    input_scale: Tensor | None = None
    input_order: Tensor | None = None

    @property
    def out_features(self) -> int:
        """``N``."""
        return self.qweight.shape[0]

    def to(self, device: torch.device | str | int) -> QuantizedWeight:
        """The same weight on another device."""
        there: dict[str, Any] = {
            name: part.to(device) for name, part in self._asdict().items() if isinstance(part, Tensor)
        }
        return self._replace(**there)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]`` that it stands for, in the order of the input features: computed in float32 and rounded
        to ``dtype``; exact for float64."""
        return dequantize(
            self.qweight,
            self.scale,
            self.zero_point,
            self.input_order,
            SCHEMES.index(self.scheme),
            self.group_size,
            self.in_features,
            torch.float64 if dtype == torch.float64 else torch.float32,
        ).to(dtype)


def quantize_weight(
    weight: Tensor,
    scheme: str,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    input_scale: Tensor | float | None = None,
) -> QuantizedWeight:
    """Rounds a weight to the nearest codes of a scheme, for `quantized_matmul`.

    With ``a`` the largest magnitude of what shares a scale::

        int8_*:     scale = a / 127                      code = clamp(round(W / scale), -127, 127)
        int4_*:     scale = a / 7.5 or a / 7             code = clamp(round(W / scale) + 8, 0, 15)
        asymmetric: scale = (max(W, 0) - min(W, 0)) / 15  code = clamp(round(W / scale) + zero_point, 0, 15)
        fp8_block:  scale = a / 448                      code = e4m3(W / scale)

    so that a weight is off by at most half a step of its scale (fp8: half a unit in the last place of e4m3). Of the two
    scales of symmetric int4 a group gets the one that leaves the smaller sum of squared errors. Rounding is to nearest,
    ties to even. Where ``a`` is 0, codes stand for exactly 0.

    Args:
        weight: ``[N, K]``, float32, bfloat16, float16 or float64; any strides. Not differentiated.
        scheme: see `QuantizedWeight`.
        group_size: int4 only: columns that share a scale, a multiple of 16 from 16 to 1024, or -1 for all of a row; the
            last group may be shorter. Default: 128.
        symmetric: int4 only, where False gives each group a zero point of its own; the other schemes are symmetric.
            Default: True.
        input_scale: the step of the activations, for ``int8_static``, which needs it, and no other: positive, a number
            or a tensor of one element. Default: none.

    Returns:
        The quantized weight, on the device of ``weight``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such scheme, an argument does not fit it, or a weight on the CPU is not finite.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, equation 1; blocks as in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    _check_weight(weight)
    if scheme not in SCHEMES:
        raise wrong_value("scheme", f"one of {', '.join(SCHEMES)}", repr(scheme))
    if not isinstance(symmetric, bool):
        raise wrong_type("symmetric", "True or False", symmetric)
    if not symmetric and scheme not in INT4_SCHEMES:
        raise wrong_value("symmetric", f"True for {scheme}", symmetric)
    columns = weight.shape[1]
    group = _checked_group_size(group_size, scheme, columns)
    step = checked_input_scale(input_scale, scheme, weight.device)
    with torch.no_grad():
        wide = _finite_float32(weight)
        qweights, scales, zero_points = zip(
            *(_quantize(part, scheme, group, symmetric) for part in _parts_of(wide)), strict=True
        )
    zeros = [zeros for zeros in zero_points if zeros is not None]
    return QuantizedWeight(
        scheme, _joined(qweights), _joined(scales), columns, group, _joined(zeros) if zeros else None, step
    )


def dequantize(
    qweight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    input_order: Tensor | None,
    scheme: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight ``[N, K]`` that codes stand for, each rounded once to float32; exact in float64."""
    rows = qweight.shape[0]
    if SCHEMES[scheme] in INT4_SCHEMES:
        codes = unpack_int4(qweight, in_features).to(dtype)
        groups = scale.to(dtype).repeat_interleave(group_size, 1)[:, :in_features]
        if zero_point is None:
            codes = codes - INT4_ZERO
        else:
            codes = codes - zero_point.to(dtype).repeat_interleave(group_size, 1)[:, :in_features]
        result = codes * groups
    elif SCHEMES[scheme] == "fp8_block":
        blocks = scale.to(dtype).repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)
        result = qweight.view(torch.float8_e4m3fn).to(dtype) * blocks[:, :in_features]
    else:
        result = qweight.to(dtype) * scale.to(dtype)[:, None]
    if input_order is None:
        return result
    return torch.empty_like(result).index_copy_(1, input_order, result)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0 to 15, ``[N, K]``, two in a byte: uint8 ``[N, ceil(K / 2)]``, even columns in the low halves."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[1] % 2))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_int4(qweight: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_int4`: uint8 codes ``[N, columns]``."""
    return torch.stack((qweight & 15, qweight >> 4), -1).flatten(1)[:, :columns]


def divided(values: Tensor, divisor: float) -> Tensor:
    """``values / divisor``, rounded once; by a number itself torch does not divide on CUDA, but multiplies."""
    return values / torch.full_like(values, divisor)


def _rounded(weight: Tensor, scale: Tensor) -> Tensor:
    # In float64, where no quotient overflows; what has no scale has no codes but 0.
    quotient = weight.double() / scale.double()
    return torch.where(scale > 0, quotient, 0.0).round_()


def _parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    # Whole blocks of rows, so that a part has the codes that it has in the whole. A compiler needs no parts: it fuses
    # what stands in between.
    rows = max(_PART // max(weight.shape[1], 1) // FP8_BLOCK, 1) * FP8_BLOCK
    return (weight,) if torch.compiler.is_compiling() else weight.split(rows)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _quantize(weight: Tensor, scheme: str, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    if scheme in INT4_SCHEMES:
        return _quantize_int4(weight, group, symmetric)
    return (*(_quantize_fp8(weight) if scheme == "fp8_block" else _quantize_int8(weight)), None)


def _quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = divided(_largest(weight, 1), INT8_LARGEST)
    codes = _rounded(weight, scale[:, None]).clamp_(-INT8_LARGEST, INT8_LARGEST)
    return codes.to(torch.int8), scale


def _quantize_int4(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, columns = weight.shape
    if columns == 0:
        empty = weight.new_empty((rows, 0))
        return empty.to(torch.uint8), empty, None if symmetric else empty.to(torch.uint8)
    padded = torch.nn.functional.pad(weight, (0, -columns % group)).view(rows, -(-columns // group), group)
    if symmetric:
        codes, scale = _symmetric_int4(padded)
        zero_point = None
    else:
        low, high = padded.amin(2).clamp_(max=0.0), padded.amax(2).clamp_(min=0.0)
        # Halved first: the width of a group may be beyond float32's range.
        scale = divided(high / 2 - low / 2, _INT4_HALF_RANGE)
        shift = _rounded(-low, scale)
        zero_point = shift.to(torch.uint8)
        codes = (_rounded(padded, scale[..., None]) + shift[..., None]).clamp_(0, 15)
    return pack_int4(codes.flatten(1)[:, :columns]), scale, zero_point


def _symmetric_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    # Sixteen codes have no middle: steps of a / 7.5 use all of them and clip one end by half a step, those of a / 7
    # are wider and reach both ends, which serves groups of few values better.
    codes, scale, error = _rounded_by(groups, divided(_largest(groups, 2), _INT4_HALF_RANGE))
    wider_codes, wider_scale, wider_error = _rounded_by(groups, divided(_largest(groups, 2), _INT4_SYMMETRIC_RANGE))
    better = wider_error < error
    return torch.where(better[..., None], wider_codes, codes), torch.where(better, wider_scale, scale)


def _rounded_by(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = (_rounded(groups, scale[..., None]) + INT4_ZERO).clamp_(0, 15)
    return codes, scale, ((codes - INT4_ZERO) * scale[..., None] - groups).square_().sum(2)


def _quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    scale = divided(_largest(blocks, (1, 3)), FP8_LARGEST).clamp_(min=_SMALLEST_NORMAL)
    codes = (blocks / scale[:, None, :, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).view(padded.shape)[:rows, :columns].contiguous(), scale


def _largest(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    dims = (dims,) if isinstance(dims, int) else dims
    if any(values.shape[dim] == 0 for dim in dims):
        return values.abs().sum(dims)
    return values.abs().amax(dims)


def _check_weight(weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise wrong_type("weight", "a tensor", weight)
    if weight.dim() != 2:
        raise wrong_value("weight", "shape [N, K]", shape_of(weight))
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise wrong_value("weight", "float32, bfloat16, float16 or float64", weight.dtype)


def _finite_float32(weight: Tensor) -> Tensor:
    # Contiguous, because codes are laid out in memory as what they were computed from.
    wide = weight.detach().to(torch.float32).contiguous()
    if is_readable(wide) and not bool(wide.isfinite().all()):
        raise wrong_value("weight", "finite values in float32", f"{int((~wide.isfinite()).sum())} that are not")
    return wide


def _checked_group_size(group_size: int | None, scheme: str, columns: int) -> int:
    if group_size is None:
        if scheme == "fp8_block":
            return FP8_BLOCK
        return _DEFAULT_GROUP if scheme in INT4_SCHEMES else columns
    if not is_integer(group_size):
        raise wrong_type("group_size", "an int or None", group_size)
    if scheme not in INT4_SCHEMES:
        raise wrong_value("group_size", f"None for {scheme}", group_size)
    if group_size == -1:
        return columns
    if not 16 <= group_size <= 1024 or group_size % 16 != 0:
        raise wrong_value("group_size", "a multiple of 16 from 16 to 1024, or -1", group_size)
    return group_size


def checked_input_scale(input_scale: Tensor | float | None, scheme: str, device: torch.device) -> Tensor | None:
    if scheme != "int8_static":
        if input_scale is not None:
            raise wrong_value("input_scale", f"None for {scheme}", input_scale)
        return None
    if input_scale is None:
        raise wrong_value("input_scale", "the step of the activations for int8_static", "None")
    if not is_number(input_scale) and not (isinstance(input_scale, Tensor) and input_scale.numel() == 1):
        raise wrong_type("input_scale", "a number or a tensor of one element", input_scale)
    scale = torch.as_tensor(input_scale).detach().to(torch.float32).reshape(())
    if is_readable(scale) and not _SMALLEST_NORMAL <= float(scale) < float("inf"):
        raise wrong_value("input_scale", "a positive, finite number of at least 2**-126", float(scale))
    return scale.to(device)
