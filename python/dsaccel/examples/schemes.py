"""The schemes that the examples compare, and how each gets into a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dsaccel.quant import HistogramObserver, MinMaxObserver, Observer, convert, prepare, prepare_qat, quantize_

# Runs a model over some inputs like those to come.
Calibrate = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Scheme:
    """A way to quantize a model.

    Attributes:
        label: its name in tables.
        scheme, group_size, symmetric, embeddings: as in `dsaccel.quant.quantize_`.
        observer: of the activations, for ``int8_static``.
        spared: for ``int8_static``, a pattern; layers whose whole name it matches become ``int8_dynamic``.
    """

    label: str
    scheme: str
    group_size: int | None = None
    symmetric: bool = True
    embeddings: bool = False
    observer: Callable[[], Observer] = MinMaxObserver
    spared: str | None = None

    def quantized(self, model: nn.Module, calibrate: Calibrate) -> nn.Module:
        """A quantized copy of ``model``, which stays as it is; ``calibrate`` serves ``int8_static`` alone."""
        model = copy.deepcopy(model)
        if self.scheme == "int8_static":
            prepare(model, observer=self.observer, filter=lambda name, _: not self._spares(name))
            calibrate(model)
            convert(model)
            if self.spared is not None:
                quantize_(model, "int8_dynamic", filter=lambda name, _: self._spares(name))
        else:
            quantize_(
                model,
                self.scheme,
                group_size=self.group_size,
                symmetric=self.symmetric,
                embeddings=self.embeddings,
            )
        return model

    def trained(self, model: nn.Module, train: Calibrate) -> nn.Module:
        """A copy of ``model`` that ``train`` has trained through the rounding of this scheme, converted."""
        model = copy.deepcopy(model)
        prepare_qat(model, self.scheme, group_size=self.group_size, symmetric=self.symmetric)
        train(model)
        convert(model)
        return model

    def _spares(self, name: str) -> bool:
        return self.spared is not None and re.fullmatch(self.spared, name) is not None


SCHEMES = (
    Scheme("int8_dynamic", "int8_dynamic"),
    Scheme("int8_static", "int8_static"),
    Scheme("int8_static, histogram", "int8_static", observer=HistogramObserver),
    Scheme("int8_weight_only", "int8_weight_only"),
    Scheme("int4_dynamic g32", "int4_dynamic", 32),
    Scheme("int4_weight_only g128", "int4_weight_only", 128),
    Scheme("int4_weight_only g32", "int4_weight_only", 32),
    Scheme("int4_weight_only g32, asymmetric", "int4_weight_only", 32, symmetric=False),
    Scheme("fp8_block", "fp8_block"),
)
