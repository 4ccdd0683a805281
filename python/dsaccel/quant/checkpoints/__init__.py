"""Quantized checkpoints of others: loading them, and saving as compressed-tensors."""

from dsaccel.quant.checkpoints.awq import from_awq
from dsaccel.quant.checkpoints.compressed import from_compressed_tensors, to_compressed_tensors
from dsaccel.quant.checkpoints.compressed_scheme import CompressedScheme
from dsaccel.quant.checkpoints.fp8 import from_fp8_block
from dsaccel.quant.checkpoints.gptq import from_gptq
from dsaccel.quant.checkpoints.load import LoadProgress, load_quantized_, print_progress
from dsaccel.quant.checkpoints.save import save_compressed_tensors

__all__ = [
    "CompressedScheme",
    "LoadProgress",
    "from_awq",
    "from_compressed_tensors",
    "from_fp8_block",
    "from_gptq",
    "load_quantized_",
    "print_progress",
    "save_compressed_tensors",
    "to_compressed_tensors",
]
