"""Modules around the operators of `dskernels`; each can be used alone."""

from dsaccel.modules.attention import WindowAttention
from dsaccel.modules.block import GeluMLP, SwiGLU, TransformerBlock
from dsaccel.modules.cache import WindowCache
from dsaccel.modules.language_model import SlidingWindowLM
from dsaccel.modules.multihead import WindowMultiheadAttention
from dsaccel.modules.replace import ReplacedAttention, replace_attention
from dsaccel.modules.rotary import RotaryEmbedding
from dsaccel.modules.sdpa import sdpa_as_window_attention

__all__ = [
    "GeluMLP",
    "ReplacedAttention",
    "RotaryEmbedding",
    "SlidingWindowLM",
    "SwiGLU",
    "TransformerBlock",
    "WindowAttention",
    "WindowCache",
    "WindowMultiheadAttention",
    "replace_attention",
    "sdpa_as_window_attention",
]
