"""Swin Transformers of torchvision and timm: their layout, and their weights under the names used here.

A checkpoint is read in three steps: its keys are renamed (`swin_names`), its sizes are inferred from its shapes, and
the windows are taken from the model, from tables that tell their size, or from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dsaccel.modules._sizes import Pair, Windows, checked_pair, checked_windows
from dsaccel.modules.swin_bias import resized_bias_table
from dsaccel.modules.swin_names import Names
from dskernels.checks import wrong_type, wrong_value

_Model = TypeVar("_Model", bound=nn.Module)


class Source(NamedTuple):
    """What a model or a state dict says of itself.

    Attributes:
        state: tensors under the names used here.
        names: those they had, by the new ones.
        windows: of each stage; None for what is not known.
        pretrained: by which version 2 measures offsets, of each stage; None for what is not known.
        image_size: for which the model was built, if it has one.
        eps: of the norms.
        training: whether it is in training mode.
    """

    state: dict[str, Tensor]
    names: dict[str, str]
    windows: list[tuple[int, int] | None]
    pretrained: list[tuple[int, int] | None]
    image_size: tuple[int, int] | None = None
    eps: float = 1e-5
    training: bool = True


def read_source(source: nn.Module | Mapping[str, Any], names: Names) -> Source:
    """Reads a model, or its state dict, of the library that ``names`` belongs to.

    Raises:
        TypeError: ``source`` is neither.
        ValueError: it is of another kind, or has what cannot be had here.
    """
    model: Any = source if isinstance(source, nn.Module) else None
    if model is not None:
        _check_model(model, names)
        tensors: Mapping[str, Any] = model.state_dict()
    elif isinstance(source, Mapping):
        tensors = source
        for wrapper in ("model", "state_dict"):
            inner = tensors.get(wrapper)
            tensors = inner if isinstance(inner, Mapping) else tensors
    else:
        raise wrong_type("source", f"a model of {names.library} or its state dict", source)
    renamed, old_names, coordinates = names.rename(tensors)
    depths = _depths(renamed)
    if "patch_embed.proj.weight" not in renamed or not depths:
        found = ", ".join(list(tensors)[:3]) or "no keys"
        raise wrong_value("source", f"the state dict of a Swin Transformer of {names.library}", f"{found}, ...")
    windows: list[tuple[int, int] | None]
    pretrained: list[tuple[int, int] | None] = [None] * len(depths)
    if model is None:
        windows = [coordinates.get(stage) or _square_window(renamed, stage) for stage in range(len(depths))]
        return Source(renamed, old_names, windows, pretrained)
    blocks = names.first_blocks(model)
    windows = [checked_pair("window_size", names.window_of(block)) for block in blocks]
    for stage, block in enumerate(blocks):
        measure = getattr(block.attn, "pretrained_window_size", None)
        if measure is not None and min(measure) > 0:
            pretrained[stage] = (measure[0], measure[1])
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    image_size = None if size is None else (size[0], size[1])
    return Source(renamed, old_names, windows, pretrained, image_size, model.norm.eps, model.training)


def options_of(
    source: Source,
    window_size: Windows | None,
    pretrained_window_size: Windows | None,
    image_size: Pair | None,
) -> dict[str, Any]:
    """The arguments with which a `SwinTransformer` fits ``source``; the bias tables in it are resized where needed."""
    state = source.state
    depths, version = _depths(state), 2 if "stages.0.blocks.0.attn.logit_scale" in state else 1
    stages = len(depths)
    heads_of = "attn.logit_scale" if version == 2 else "attn.bias.table"
    heads = [state[f"stages.{stage}.blocks.0.{heads_of}"].shape[-1] for stage in range(stages)]
    embed_dim, image_channels, *patch_size = state["patch_embed.proj.weight"].shape
    found, pretrained = source.windows, source.pretrained
    if pretrained_window_size is not None:
        pretrained = [*checked_windows("pretrained_window_size", pretrained_window_size, stages)]
        if version == 1:
            found = pretrained
    windows = found
    if window_size is not None:
        windows = [*checked_windows("window_size", window_size, stages)]
    if image_size is not None:
        windows = _shrunk(windows, checked_pair("image_size", image_size), (patch_size[0], patch_size[1]))
    if any(window is None for window in windows):
        raise wrong_value("window_size", "that of the model, which the state dict does not tell", window_size)
    options: dict[str, Any] = {"window_size": windows}
    if version == 1:
        _resize_tables(state, found, windows)
    else:
        options["pretrained_window_size"] = [
            measure or own or window for measure, own, window in zip(pretrained, found, windows, strict=True)
        ]
    hidden_dim = state["stages.0.blocks.0.mlp.fc1.weight"].shape[0]
    mlp_ratio = hidden_dim / embed_dim
    if int(embed_dim * mlp_ratio) < hidden_dim:
        # The quotient was rounded down, and with it what a block makes of it.
        mlp_ratio = math.nextafter(mlp_ratio, math.inf)
    return {
        **options,
        "image_channels": image_channels,
        "patch_size": tuple(patch_size),
        "embed_dim": embed_dim,
        "depths": depths,
        "num_heads": heads,
        "num_classes": state["head.weight"].shape[0] if "head.weight" in state else 0,
        "version": version,
        "mlp_ratio": mlp_ratio,
        "qkv_bias": "stages.0.blocks.0.attn.qkv.bias" in state,
        "eps": source.eps,
    }


def build(cls: type[_Model], source: Source, options: dict[str, Any]) -> _Model:
    """The model with a copy of the weights, on their device and in their dtype.

    Raises:
        ValueError: a tensor is missing or left over, or has another shape.
    """
    with torch.device("meta"):
        model = cls(**options)
    expected = model.state_dict()
    left = [source.names[name] for name in source.state if name not in expected]
    missing = [name for name in expected if name not in source.state]
    if left or missing:
        raise wrong_value("source", "the tensors of a Swin Transformer", f"left over {left}, missing {missing}")
    for name, tensor in source.state.items():
        if tensor.shape != expected[name].shape:
            shapes = f"shape {list(expected[name].shape)}", f"{list(tensor.shape)}"
            raise wrong_value(source.names[name], *shapes)
    weight = source.state["patch_embed.proj.weight"]
    model.to_empty(device=weight.device).to(weight.dtype)
    model.load_state_dict(source.state)
    return model.train(source.training)


def _check_model(model: nn.Module, names: Names) -> None:
    if not any((kind.__module__, kind.__name__) in names.classes for kind in type(model).__mro__):
        expected = f"a Swin Transformer of {names.library}"
        raise wrong_value("source", expected, f"{type(model).__module__}.{type(model).__name__}")
    instead = "load its state dict instead to go without"
    for name, module in model.named_modules():
        rates = [getattr(module, rate, 0.0) for rate in ("attention_dropout", "dropout")]
        rates += [module.p] if isinstance(module, nn.Dropout) else []
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise wrong_value("source", f"a model without dropout ({instead})", f"{max(rates)} in {name}")
        if getattr(module, "always_partition", False):
            raise wrong_value("source", "a model without always_partition", f"True in {name}")
    if getattr(model, "global_pool", "avg") != "avg":
        raise wrong_value("source", "a model with average pooling", repr(model.global_pool))


def _depths(state: Mapping[str, Tensor]) -> list[int]:
    """The blocks of each stage."""
    depths: list[int] = []
    while True:
        depth = 0
        while f"stages.{len(depths)}.blocks.{depth}.norm1.weight" in state:
            depth += 1
        if depth == 0:
            return depths
        depths.append(depth)


def _square_window(state: Mapping[str, Tensor], stage: int) -> tuple[int, int] | None:
    """The window of a table of biases, if it is square."""
    table = state.get(f"stages.{stage}.blocks.0.attn.bias.table")
    if table is None:
        return None
    side = round(table.shape[0] ** 0.5)
    window = (side + 1) // 2
    return (window, window) if (2 * window - 1) ** 2 == table.shape[0] else None


def _shrunk(
    windows: list[tuple[int, int] | None], image_size: tuple[int, int], patch_size: tuple[int, int]
) -> list[tuple[int, int] | None]:
    """The windows, none larger than the tokens of its stage."""
    height, width = image_size[0] // patch_size[0], image_size[1] // patch_size[1]
    shrunk: list[tuple[int, int] | None] = []
    for window in windows:
        shrunk.append(None if window is None else (max(min(window[0], height), 1), max(min(window[1], width), 1)))
        height, width = (height + 1) // 2, (width + 1) // 2
    return shrunk


def _resize_tables(
    state: dict[str, Tensor], found: list[tuple[int, int] | None], windows: list[tuple[int, int] | None]
) -> None:
    for name, table in state.items():
        if not name.endswith("attn.bias.table"):
            continue
        stage = int(name.split(".")[1])
        old, new = found[stage], windows[stage]
        if old is None or (2 * old[0] - 1) * (2 * old[1] - 1) != table.shape[0]:
            expected = f"that of the table of {table.shape[0]} offsets in stage {stage}"
            raise wrong_value("pretrained_window_size", expected, old)
        if new is not None:
            state[name] = resized_bias_table(table, old, new)
