"""Quantized layers, and the ways to get them; each can be used alone."""

from dsaccel.quant.calibration import ObservedLinear, prepare
from dsaccel.quant.convert import convert
from dsaccel.quant.embedding import QuantizedEmbedding
from dsaccel.quant.histograms import HistogramObserver, PercentileObserver
from dsaccel.quant.linear import QuantizedLinear
from dsaccel.quant.lora import LoRALinear, add_lora_
from dsaccel.quant.model import quantize_
from dsaccel.quant.observers import (
    MinMaxObserver,
    MovingAverageObserver,
    Observer,
    PerChannelMinMaxObserver,
    PerChannelMovingAverageObserver,
)
from dsaccel.quant.qat import QATLinear, prepare_qat
from dsaccel.quant.report import LayerReport, QuantizationReport

__all__ = [
    "HistogramObserver",
    "LayerReport",
    "LoRALinear",
    "MinMaxObserver",
    "MovingAverageObserver",
    "ObservedLinear",
    "Observer",
    "PerChannelMinMaxObserver",
    "PerChannelMovingAverageObserver",
    "PercentileObserver",
    "QATLinear",
    "QuantizationReport",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "add_lora_",
    "convert",
    "prepare",
    "prepare_qat",
    "quantize_",
]
