"""Products with quantized weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dskernels._autograd import invoke
from dskernels._library import autocast_disabled, why_not_unasked
from dskernels._registry import Backend, Operator, register
from dskernels.quantized_matmul.activations import round_activations
from dskernels.quantized_matmul.arguments import QuantizedMatmulCall, prepare, why_not_cpu, why_not_cuda, why_not_triton
from dskernels.quantized_matmul.cuda_schema import cuda_forward_op
from dskernels.quantized_matmul.reference import quantized_matmul_reference
from dskernels.quantized_matmul.schema import forward_op
from dskernels.quantized_matmul.triton_schema import triton_forward_op
from dskernels.quantized_matmul.weight import SCHEMES, QuantizedWeight, dequantize, quantize_weight

__all__ = ["QuantizedWeight", "quantize_weight", "quantized_matmul", "round_activations"]


def quantized_matmul(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """``x @ W.T + bias`` for a weight in int8, int4 or fp8: `torch.nn.functional.linear` on a `QuantizedWeight`.

    By scheme, with ``W`` as `QuantizedWeight` defines it::

        *_weight_only:              out = x @ W.T + bias                         x as it is, in float32
        int8_dynamic, int8_static:  out = (codes(x) @ qweight.T) * sx * scale + bias
        int4_dynamic:               out = (codes(x) @ W.T) * sx + bias
        fp8_block:                  out = (e4m3(x / sx) * sx) @ W.T + bias       a scale sx per 128 columns of a row

    ``codes(x) = clamp(round(x / sx), -127, 127)``, where ``sx`` is the largest magnitude of the row over 127
    (dynamic), or ``weight.input_scale`` (static). Integer products are exact for any ``K``; scales and bias are
    applied in float32, and the result is rounded once. A row of zeros gives exactly the bias; a row with a NaN or an
    infinity is not finite and touches no other. A row of a batch has the same bits as the same row alone, but for sums
    of floats in the reference, whose order is torch's.

    The gradient of ``x`` is ``grad @ W``, straight through the rounding of ``x``; that of ``bias`` the sum over rows.
    The weight has none.

    Args:
        x: shape ``[..., K]``, float32, bfloat16 or float16 (float64 with the reference); any strides, no rows allowed.
        weight: of `quantize_weight`, on the device of ``x``.
        bias: shape ``[N]``, any of these four dtypes. Default: none.
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; an explicit choice never falls back.
            Default: `use_backend`, then ``DSKERNELS_BACKEND``, then the first that serves the call.

    Returns:
        shape ``[..., N]``, dtype of ``x``, contiguous.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not fit each other.
        RuntimeError: the backend that was asked for cannot serve the call.

    Backends: ``cpu``, ``cuda`` and ``triton`` (float32, bfloat16, float16), ``reference`` (everything, any device;
    differentiable any number of times). ``cuda`` and ``triton`` serve CUDA tensors; where it is asked for, ``triton``
    also serves those on the CPU in its interpreter (``TRITON_INTERPRET=1``). For the gradient of x both round W to the
    dtype of that gradient, as tensor cores take it. With ``cuda`` a row has the same bits in all batches where x is in
    int8; in the other schemes in all of up to 128 rows, and in fp8_block in all of more. More rows than that of
    int8_weight_only and int4_weight_only are multiplied by torch, with W and bias rounded to the dtype of x. ``triton``
    splits sums as the number of rows suggests, so that with it a row has the same bits in every batch in int8_dynamic
    and int8_static alone. To look at ``weight.input_order`` would mean to wait for the GPU: with ``cuda`` an index that
    is out of range reaches no other memory, but the result means nothing. Under autocast x is cast to the autocast
    dtype.

    Sources: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, section 2; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    call = prepare(x, weight, bias)
    (out,) = _operator.choose(call, backend).run(call)
    result: Tensor = out
    return result


def _by_reference(call: QuantizedMatmulCall) -> tuple[Tensor]:
    x, qweight, scale, zero_point, _, input_order, bias, scheme, group_size = call
    if SCHEMES[scheme].endswith("weight_only") or not torch.is_grad_enabled():
        return (quantized_matmul_reference(*call),)
    # The product of codes is a constant; its slope comes with a second product, which is 0. A Function of autograd
    # would say the same, but Dynamo traces none that has a forward mode.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    fixed = x.detach().to(wide)
    weight = dequantize(qweight, scale, zero_point, input_order, scheme, group_size, x.shape[-1], wide)
    out = quantized_matmul_reference(*call._replace(x=fixed, bias=None))
    with autocast_disabled(x.device.type):
        out = out + torch.nn.functional.linear(x.to(wide) - fixed, weight)
    if bias is not None:
        out = out + bias.to(wide)
    return (out.to(x.dtype),)


def _gpu_unasked(call: QuantizedMatmulCall) -> str | None:
    return why_not_unasked(call.x.device)


def _example() -> tuple[list[Tensor], dict[str, Any]]:
    weight = quantize_weight(torch.randn(67, 150), "int4_dynamic", group_size=32, symmetric=False)
    return [torch.randn(2, 5, 150)], {"weight": weight, "bias": torch.randn(67)}


_operator = register(
    Operator(
        name="quantized_matmul",
        prepare=prepare,
        backends=(
            Backend("cpu", why_not_cpu, lambda call: (invoke(forward_op, *call),)),
            Backend("cuda", why_not_cuda, lambda call: (cuda_forward_op(*call),), _gpu_unasked),
            Backend("triton", why_not_triton, lambda call: (triton_forward_op(*call),), _gpu_unasked),
            Backend("reference", lambda call: None, _by_reference),
        ),
        example=_example,
    )
)
