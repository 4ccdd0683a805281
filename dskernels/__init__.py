"""Fused kernels for windowed, mixed-precision and quantized transformers, as drop-in PyTorch operators."""

from dskernels._library import build_info, kept_ops, load_compiled
from dskernels._registry import explain, use_backend
from dskernels.clip_and_scale import GradNorm, clip_and_scale_, grad_norm
from dskernels.quantized_matmul import QuantizedWeight, quantize_weight, quantized_matmul, round_activations
from dskernels.rope import RopeTable, rope_table, rope_table_2d
from dskernels.swin_attention import swin_attention
from dskernels.window_attention import window_attention, window_attention_decode, window_attention_varlen

__version__ = "0.1.0"

__all__ = [
    "GradNorm",
    "QuantizedWeight",
    "RopeTable",
    "__version__",
    "build_info",
    "clip_and_scale_",
    "explain",
    "grad_norm",
    "kept_ops",
    "quantize_weight",
    "quantized_matmul",
    "rope_table",
    "rope_table_2d",
    "round_activations",
    "swin_attention",
    "use_backend",
    "window_attention",
    "window_attention_decode",
    "window_attention_varlen",
]

# After the imports above: the kernels join operators that are defined already.
load_compiled()
