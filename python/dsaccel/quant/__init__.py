"""Quantized layers, and the ways to get them; each can be used alone."""

from dsaccel.quant.linear import QuantizedLinear

__all__ = ["QuantizedLinear"]
