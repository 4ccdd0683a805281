"""Training with quantized products: what is trained is what will be computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import dskernels as dk
from dsaccel.quant.arguments import Filter, check_filter, check_layer, check_options
from dsaccel.quant.observers import LARGEST_CODE, MovingAverageObserver, checked_decay
from dsaccel.quant.report import QuantizationReport
from dsaccel.quant.survey import replace_linears
from dskernels.checks import is_readable


class QATLinear(nn.Linear):
    """`nn.Linear` that computes the quantized product, for training::

        Q(W) = dskernels.quantize_weight(W, scheme, ...)
        out  = dskernels.quantized_matmul(x, Q(W), bias)

    so that `QuantizedLinear` over ``Q(W)`` gives the same bits in every dtype, under autocast too. Rounding has the
    gradient 1 (straight-through); with ``W'`` what ``Q(W)`` stands for, and ``x'`` the activations as their codes stand
    for them::

        grad_x    = (grad @ W') * [|x| <= 127.5 * step]     the mask for int8_static alone
        grad_W    = grad.T @ x'                             summed in float32, float64 for float64
        grad_bias = the sum of grad over rows

    The mask is that of what is clipped. No other scheme clips: their scales follow from the largest magnitudes, also
    those of all weights.

    For ``int8_static`` the step of the activations follows from `MovingAverageObserver`, which takes in each batch in
    training, and nothing in inference. Batches that are not finite, as float16 has some, leave it as it is.

    Args:
        linear: its parameters are kept, the same objects.
        scheme, group_size, symmetric: as in `dskernels.quantize_weight`.
        decay: of the moving average. Default: 0.99.
        name: how errors call the layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such scheme, an argument does not fit it, or ``linear`` is of a subclass with a forward
            of its own.

    Sources: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, section 3; Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for
    Conditional Computation", 2013, section 4.
    """

    def __init__(
        self,
        linear: nn.Linear,
        scheme: str,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        decay: float = 0.99,
        name: str = "",
    ) -> None:
        check_layer("linear", linear, nn.Linear)
        check_options(scheme, group_size, symmetric)
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.scheme = scheme
        self.group_size = group_size
        self.symmetric = symmetric
        self.name = name
        self.observer = None
        if scheme == "int8_static":
            self.observer = MovingAverageObserver(decay).to(linear.weight.device)

    def quantized_weight(self) -> dk.QuantizedWeight:
        """What the layer computes with now.

        Raises:
            ValueError: a weight is not finite, or the step of ``int8_static`` has seen no batch; named by the layer.
        """
        step = None if self.observer is None else self.observer.step()
        if step is not None and is_readable(step) and bool(step.isnan()):
            raise ValueError(f"{self.name or 'QATLinear'}: it has seen no batch in training, so it has no step yet")
        try:
            return dk.quantize_weight(
                self.weight, self.scheme, group_size=self.group_size, symmetric=self.symmetric, input_scale=step
            )
        except ValueError as error:
            raise ValueError(f"{self.name or 'QATLinear'}: {error}") from error

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``input``.

        Raises:
            ValueError: as `quantized_weight`.
        """
        if self.observer is not None and self.training and input.numel():
            with torch.no_grad():
                self.observer.update(input.detach())
        weight = self.quantized_weight()
        if weight.input_scale is not None:
            input = _PassWithin.apply(input, weight.input_scale)
        out = dk.quantized_matmul(input, weight, self.bias)
        if self.weight.requires_grad and torch.is_grad_enabled():
            # Under autocast the input has been cast to the dtype of the output.
            out = _WithWeightGradient.apply(
                out, self.weight, input.detach().to(out.dtype), self.scheme, weight.input_scale
            )
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme}"


def prepare_qat(
    model: nn.Module,
    scheme: str,
    *,
    filter: Filter | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    decay: float = 0.99,
) -> QuantizationReport:
    """Puts a `QATLinear` in the place of each `nn.Linear` in ``model``, in place, until `convert`::

        prepare_qat(model, "int4_weight_only", group_size=64)
        train(model)
        print(convert(model))

    The model computes what the converted one will, bit for bit in inference, and is trained through the rounding. Its
    parameters stay the same objects under the same names, so that an optimizer may be made before or after. Which
    layers are kept, and what else is to be known, is as with `quantize_`. An embedding that is tied to a head is looked
    up in floating point, and goes on being trained by both.

    Args:
        model: any module.
        scheme, group_size, symmetric: as in `dskernels.quantize_weight`.
        filter: as in `quantize_`.
        decay: of the moving average that the step of ``int8_static`` follows from. Default: 0.99.

    Returns:
        What became of each layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such scheme, or an argument does not fit it.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, section 3.
    """
    check_options(scheme, group_size, symmetric)
    check_filter(filter)
    checked_decay(decay)

    def trained(linear: nn.Linear, name: str) -> nn.Module:
        return QATLinear(linear, scheme, group_size=group_size, symmetric=symmetric, decay=decay, name=name)

    return replace_linears(model, trained, f"{scheme} in training", filter)


class _PassWithin(torch.autograd.Function):
    # The identity, with no gradient where codes are clipped.

    @staticmethod
    def forward(x: Tensor, step: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, step = inputs
        ctx.save_for_backward(x.abs().float() <= (LARGEST_CODE + 0.5) * step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (within,) = ctx.saved_tensors
        return grad.masked_fill(~within, 0), None


class _WithWeightGradient(torch.autograd.Function):
    # The identity of a product with a quantized weight, and the gradient of the weight that was quantized.

    @staticmethod
    def forward(out: Tensor, weight: Tensor, x: Tensor, scheme: str, step: Tensor | None) -> Tensor:
        # A copy: what comes after may write into it, which a view forbids.
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, x, scheme, step = inputs
        ctx.save_for_backward(x, step)
        ctx.scheme, ctx.dtype = scheme, weight.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, step = ctx.saved_tensors
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(grad.device.type, enabled=False):
            seen = dk.round_activations(x, ctx.scheme, input_scale=step)
            rows, grad_rows = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (seen, grad))
            grad_weight = grad_rows.to(wide).T @ rows.to(wide)
        return grad, grad_weight.to(ctx.dtype), None, None, None
