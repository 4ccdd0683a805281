"""Low-rank adapters over frozen quantized weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.quant.arguments import Filter, check_filter
from dsaccel.quant.linear import QuantizedLinear
from dsaccel.quant.report import QuantizationReport
from dsaccel.quant.survey import Layer, sort_out
from dskernels.checks import is_integer, is_number, wrong_type, wrong_value

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LoRALinear(nn.Module):
    """A frozen `QuantizedLinear` with a low-rank update beside it that is trained::

        out = base(x) + alpha / rank * (dropout(x) @ lora_A.T @ lora_B.T)

    ``lora_A``, ``[rank, in_features]``, starts out as `nn.Linear`'s weight does, ``lora_B``, ``[out_features, rank]``,
    as zeros: at first the layer computes what ``base`` does. Both are cast to the dtype of ``x`` for the product.

    Args:
        base: its bias is frozen with it.
        rank: at least 1.
        alpha: weighs the update. Default: ``rank``, a factor of 1.
        dropout: probability, of the update's input only. Default: 0.
        dtype: of ``lora_A`` and ``lora_B``. Default: float32.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``rank``, ``dropout`` or ``dtype`` is out of range.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, equation 3.
    """

    def __init__(
        self,
        base: QuantizedLinear,
        rank: int,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not isinstance(base, QuantizedLinear):
            raise wrong_type("base", "a QuantizedLinear", base)
        self.scaling = checked_scaling(rank, alpha, dropout, dtype)
        self.rank = rank
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.base = base.requires_grad_(False)
        self.dropout = dropout
        device = base.qweight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device, dtype=dtype))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))
        if self.lora_A.numel():
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.dropout(x, self.dropout, self.training) if self.dropout else x
        update = F.linear(F.linear(inside, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        out: Tensor = self.base(x)
        return out + update * self.scaling

    def merged(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """A layer in floating point with the weight ``base.weight + alpha / rank * lora_B @ lora_A``, in ``dtype``.

        It is not quantized again: rounding would lose what was learned wherever it is below half a step. Whoever wants
        that all the same calls ``QuantizedLinear.from_linear`` with it.
        """
        base = self.base
        linear = nn.Linear(self.in_features, self.out_features, base.bias is not None, base.qweight.device, dtype)
        with torch.no_grad():
            update = self.lora_B.float() @ self.lora_A.float()
            linear.weight.copy_(base.weight.dequantize() + self.scaling * update)
            if base.bias is not None:
                linear.bias.copy_(base.bias)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling}, dropout={self.dropout}"


def add_lora_(
    model: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    filter: Filter | None = None,
    freeze: bool = True,
) -> QuantizationReport:
    """Puts a `LoRALinear` in the place of each `QuantizedLinear` in ``model``::

        quantize_(model, "int4_weight_only")
        print(add_lora_(model, rank=8, alpha=16))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    Args:
        model: any module; other layers stay, and are listed with the reason.
        rank, alpha, dropout, dtype: as in `LoRALinear`.
        filter: ``filter(name, module)`` says whether a layer gets an update. Default: all.
        freeze: train nothing but the updates: ``requires_grad`` of all other parameters is set to False. Default: True.

    Returns:
        What became of each layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``rank``, ``dropout`` or ``dtype`` is out of range, or there is nothing to adapt.
    """
    checked_scaling(rank, alpha, dropout, dtype)
    check_filter(filter)
    if not isinstance(freeze, bool):
        raise wrong_type("freeze", "True or False", freeze)
    adapted = {id(module.base) for module in model.modules() if isinstance(module, LoRALinear)}

    def why(layer: Layer) -> str | None:
        if isinstance(layer.module, LoRALinear):
            return "it is the update itself"
        if not isinstance(layer.module, QuantizedLinear):
            return "it is not a QuantizedLinear"
        if id(layer.module) in adapted:
            return "it has an update already"
        if not layer.places:
            return "it is the model itself, which has no parent; see LoRALinear"
        refused = [name for name in layer.names if filter is not None and not filter(name, layer.module)]
        return f"the filter says so of {refused[0]}" if refused else None

    chosen, recorder = sort_out(model, why)
    if not chosen:
        raise wrong_value("model", "a QuantizedLinear that can be adapted (see quantize_)", recorder.report())
    for layer in chosen:
        base: Any = layer.module
        new = LoRALinear(base, rank, alpha=alpha, dropout=dropout, dtype=dtype)
        recorder.replace(layer, new, f"{base.scheme} + rank {rank}")
    if freeze:
        _freeze_all_but_updates(model)
    return recorder.report()


def _freeze_all_but_updates(model: nn.Module) -> None:
    updates = {id(p) for m in model.modules() if isinstance(m, LoRALinear) for p in (m.lora_A, m.lora_B)}
    for parameter in model.parameters():
        if id(parameter) not in updates:
            parameter.requires_grad = False


def checked_scaling(rank: int, alpha: float | None, dropout: float, dtype: torch.dtype) -> float:
    """``alpha / rank``, of arguments that are as they should be.

    Raises:
        TypeError, ValueError: one is not.
    """
    if not is_integer(rank):
        raise wrong_type("rank", "an int", rank)
    if rank < 1:
        raise wrong_value("rank", "an int of at least 1", rank)
    if alpha is not None and not is_number(alpha):
        raise wrong_type("alpha", "a number or None", alpha)
    if not is_number(dropout):
        raise wrong_type("dropout", "a number", dropout)
    if not 0 <= dropout < 1:
        raise wrong_value("dropout", "a number from 0 to below 1", dropout)
    if not isinstance(dtype, torch.dtype):
        raise wrong_type("dtype", "a torch.dtype", dtype)
    if dtype not in _DTYPES:
        raise wrong_value("dtype", "float32, bfloat16, float16 or float64", dtype)
    return (rank if alpha is None else alpha) / rank
