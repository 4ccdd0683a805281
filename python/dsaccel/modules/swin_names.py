"""The names of tensors in the Swin Transformers of torchvision and timm, and those they have here."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_DERIVED = ("attn.relative_position_index", "attn.relative_coords_table", "attn_mask")

# Inside a block; what is not listed has the same name.
_BLOCK_NAMES = {
    "attn.relative_position_bias_table": "attn.bias.table",
    "attn.cpb_mlp.0.weight": "attn.bias.hidden_weight",
    "attn.cpb_mlp.0.bias": "attn.bias.hidden_bias",
    "attn.cpb_mlp.2.weight": "attn.bias.output_weight",
    "mlp.0.weight": "mlp.fc1.weight",
    "mlp.0.bias": "mlp.fc1.bias",
    "mlp.3.weight": "mlp.fc2.weight",
    "mlp.3.bias": "mlp.fc2.bias",
}


class Names(ABC):
    """What there is to know of a library's Swin Transformers.

    Attributes:
        library: its name.
        classes: module and name of its classes.
    """

    library: str
    classes: tuple[tuple[str, str], ...]

    @abstractmethod
    def first_blocks(self, model: Any) -> list[Any]:
        """The first block of each stage."""

    @abstractmethod
    def window_of(self, block: Any) -> tuple[int, int]:
        """The window of a block."""

    @abstractmethod
    def outside(self, name: str, merges_at_end: bool) -> str:
        """The new name of a tensor outside the blocks, and the new beginning of one inside."""

    def rename(
        self, tensors: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, str], dict[int, tuple[int, int]]]:
        """The tensors under new names, the old names by the new ones, and windows that tables of coordinates show."""
        merges_at_end = "layers.0.downsample.reduction.weight" in tensors
        renamed: dict[str, Tensor] = {}
        old_names: dict[str, str] = {}
        windows: dict[int, tuple[int, int]] = {}
        for old, tensor in tensors.items():
            new = self.outside(old, merges_at_end)
            block = re.fullmatch(r"(stages\.(\d+)\.blocks\.\d+\.)(.+)", new)
            if block is not None:
                if block[3] == "attn.relative_coords_table":
                    windows[int(block[2])] = ((tensor.shape[1] + 1) // 2, (tensor.shape[2] + 1) // 2)
                if block[3] in _DERIVED:
                    continue
                new = block[1] + _BLOCK_NAMES.get(block[3], block[3])
            renamed[new], old_names[new] = tensor, old
        for name in [name for name in renamed if name.endswith("attn.logit_scale")]:
            renamed[name] = renamed[name].flatten()
        for name in [name for name in renamed if name.endswith("attn.q_bias")]:
            _join_bias(renamed, old_names, name.removesuffix("q_bias"))
        return renamed, old_names, windows


class TorchvisionNames(Names):
    """``features`` holds patches, stages and mergings in turns."""

    library = "torchvision"
    classes = (("torchvision.models.swin_transformer", "SwinTransformer"),)

    def first_blocks(self, model: Any) -> list[Any]:
        return [stage[0] for stage in model.features[1::2]]

    def window_of(self, block: Any) -> tuple[int, int]:
        height, width = block.attn.window_size
        return height, width

    def outside(self, name: str, merges_at_end: bool) -> str:
        part = re.fullmatch(r"features\.(\d+)\.(.+)", name)
        if part is None:
            return name
        index, rest = int(part[1]), part[2]
        if index == 0:
            return re.sub(r"^0\.", "patch_embed.proj.", re.sub(r"^2\.", "patch_embed.norm.", rest))
        return f"stages.{index // 2}.blocks.{rest}" if index % 2 else f"stages.{index // 2}.merge.{rest}"


class TimmNames(Names):
    """``layers`` holds stages that begin with a merging; in the papers' own checkpoints they end with it."""

    library = "timm"
    classes = (
        ("timm.models.swin_transformer", "SwinTransformer"),
        ("timm.models.swin_transformer_v2", "SwinTransformerV2"),
    )

    def first_blocks(self, model: Any) -> list[Any]:
        return [stage.blocks[0] for stage in model.layers]

    def window_of(self, block: Any) -> tuple[int, int]:
        height, width = block.window_size
        return height, width

    def outside(self, name: str, merges_at_end: bool) -> str:
        part = re.fullmatch(r"layers\.(\d+)\.(downsample|blocks)\.(.+)", name)
        if part is None:
            return re.sub(r"^head\.fc\.", "head.", name)
        index, kind, rest = int(part[1]), part[2], part[3]
        if kind == "blocks":
            return f"stages.{index}.blocks.{rest}"
        return f"stages.{index + merges_at_end}.merge.{rest}"


def _join_bias(renamed: dict[str, Tensor], old_names: dict[str, str], start: str) -> None:
    """Biases of queries and values, between which the keys have none, as one."""
    if start + "v_bias" not in renamed:
        return
    of_queries, of_values = renamed.pop(start + "q_bias"), renamed.pop(start + "v_bias")
    renamed[start + "qkv.bias"] = torch.cat((of_queries, torch.zeros_like(of_queries), of_values))
    old_names[start + "qkv.bias"] = old_names[start + "q_bias"]
