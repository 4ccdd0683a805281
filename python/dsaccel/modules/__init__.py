"""Modules around the operators of `dskernels`; each can be used alone."""

from dsaccel.modules.attention import WindowAttention
from dsaccel.modules.block import GeluMLP, SwiGLU, TransformerBlock
from dsaccel.modules.cache import WindowCache
from dsaccel.modules.language_model import SlidingWindowLM
from dsaccel.modules.multihead import WindowMultiheadAttention
from dsaccel.modules.replace import ReplacedAttention, replace_attention
from dsaccel.modules.rotary import RotaryEmbedding
from dsaccel.modules.sdpa import sdpa_as_window_attention
from dsaccel.modules.sharing import SharedBlocks, share_blocks, shared_modules, unique_parameter_count
from dsaccel.modules.swin_attention import SwinAttention
from dsaccel.modules.swin_bias import ContinuousPositionBias, RelativePositionBias
from dsaccel.modules.swin_block import SwinBlock
from dsaccel.modules.swin_rope import AxialRope2d, MixedRope2d
from dsaccel.modules.swin_transformer import PatchMerging, SwinTransformer

__all__ = [
    "AxialRope2d",
    "ContinuousPositionBias",
    "GeluMLP",
    "MixedRope2d",
    "PatchMerging",
    "RelativePositionBias",
    "ReplacedAttention",
    "RotaryEmbedding",
    "SharedBlocks",
    "SlidingWindowLM",
    "SwiGLU",
    "SwinAttention",
    "SwinBlock",
    "SwinTransformer",
    "TransformerBlock",
    "WindowAttention",
    "WindowCache",
    "WindowMultiheadAttention",
    "replace_attention",
    "sdpa_as_window_attention",
    "share_blocks",
    "shared_modules",
    "unique_parameter_count",
]
