"""The linear layer over a quantized weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dskernels as dk
from dsaccel.quant.arguments import check_layer
from dsaccel.quant.codes import HoldsCodes
from dskernels.checks import wrong_type


class QuantizedLinear(HoldsCodes):
    """`nn.Linear` with a quantized weight: ``out = dskernels.quantized_matmul(x, weight, bias)``.

    The state dict holds plain tensors in the layout of `dskernels.QuantizedWeight` under the names ``qweight``,
    ``scale``, ``bias`` and, where the scheme has them, ``zero_point``, ``input_scale`` and ``input_order``. Codes and
    scales keep their dtypes whatever the model around them is cast to; ``bias`` follows, as it does in `nn.Linear`.

    The gradients of the input and of ``bias`` are those of `dskernels.quantized_matmul`; the weight has none.

    Args:
        weight: as made by `dskernels.quantize_weight`; its tensors are kept, not copied.
        bias: ``[out_features]``, any floating point dtype. It becomes a parameter that is not trained unless
            ``layer.bias.requires_grad_()`` says so. Default: none.

    Attributes:
        scheme, in_features, out_features, group_size: those of ``weight``.
        bias: the parameter, or None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the fields of ``weight`` or ``bias`` do not fit each other.
    """

    qweight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    input_scale: Tensor | None
    input_order: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(weight, dk.QuantizedWeight):
            raise wrong_type("weight", "a QuantizedWeight", weight)
        # Checks all fields against each other, and computes nothing.
        dk.explain("quantized_matmul", torch.empty(0, weight.in_features, device=weight.qweight.device), weight, bias)
        self.scheme = weight.scheme
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.group_size = weight.group_size
        for name in ("qweight", "scale", "zero_point", "input_scale", "input_order"):
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: str,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        input_scale: Tensor | float | None = None,
    ) -> QuantizedLinear:
        """The layer that computes what ``linear`` computes, up to rounding.

        Args:
            linear: stays as it is; its bias is copied.
            scheme, group_size, symmetric, input_scale: as in `dskernels.quantize_weight`.

        Raises:
            TypeError: ``linear`` is no `nn.Linear`.
            ValueError: it is of a subclass with a forward of its own.
            TypeError, ValueError: what `dskernels.quantize_weight` raises.
        """
        check_layer("linear", linear, nn.Linear)
        weight = dk.quantize_weight(
            linear.weight, scheme, group_size=group_size, symmetric=symmetric, input_scale=input_scale
        )
        layer = cls(weight, None if linear.bias is None else linear.bias.detach().clone())
        return layer.train(linear.training)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        scheme: str,
        *,
        group_size: int | None = None,
        symmetric: bool = True,
        bias: bool = True,
        input_order: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedLinear:
        """A layer of zeros with the tensors of a scheme, to load a state dict into.

        Args:
            in_features, out_features: sizes of the weight.
            scheme, group_size, symmetric: as in `dskernels.quantize_weight`.
            bias: whether there is one. Default: True.
            input_order: whether the columns of the weight are permuted; the state dict brings the permutation, until
                then they are not. Default: False.
            device: of all tensors, ``"meta"`` included. Default: torch's default device.
            dtype: of the bias. Default: torch's default dtype.

        Raises:
            TypeError, ValueError: what `dskernels.quantize_weight` raises.
        """
        place = torch.get_default_device() if device is None else device
        step = 1.0 if scheme == "int8_static" else None
        shapes = dk.quantize_weight(
            torch.empty(out_features, in_features, device="meta"),
            scheme,
            group_size=group_size,
            symmetric=symmetric,
            input_scale=step,
        )
        fields: dict[str, Any] = {
            name: torch.zeros_like(value, device=place) if isinstance(value, Tensor) else value
            for name, value in shapes._asdict().items()
        }
        if input_order:
            fields["input_order"] = torch.arange(in_features, device=place)
        zeros = torch.zeros(out_features, device=place, dtype=dtype) if bias else None
        return cls(dk.QuantizedWeight(**fields), zeros)

    @property
    def weight(self) -> dk.QuantizedWeight:
        """The weight, over the layer's own tensors."""
        buffers: dict[str, Any] = self._buffers
        return dk.QuantizedWeight(
            self.scheme,
            buffers["qweight"],
            buffers["scale"],
            self.in_features,
            self.group_size,
            buffers["zero_point"],
            buffers["input_scale"],
            buffers["input_order"],
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of ``x``."""
        return dk.quantized_matmul(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}, out_features={self.out_features}", f"scheme={self.scheme}"]
        if self.scheme.startswith("int4"):
            parts.append(f"group_size={self.group_size}, symmetric={self.zero_point is None}")
        return ", ".join([*parts, f"bias={self.bias is not None}"])
