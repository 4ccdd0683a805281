"""Models of timm load with all their tensors, and give the same outputs and gradients."""

from __future__ import annotations

import re

import pytest
import torch
from installed import require
from torch import Tensor, nn

from dsaccel.modules import SwinTransformer
from dsaccel.modules.swin_bias import resized_bias_table

timm = require("timm")

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {1: "swin_tiny_patch4_window7_224", 2: "swinv2_tiny_window8_256"}


def small(version: int, **options: object) -> nn.Module:
    """A model of timm's own class, its weights large enough for every one to matter."""
    settings = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 64}
    model = timm.create_model(NAMES[version], **{**settings, "num_classes": 5, "drop_path_rate": 0.0, **options})
    for name, p in model.named_parameters():
        if not name.endswith("logit_scale"):
            nn.init.normal_(p, std=0.3)
    return model


def windows_of(model: SwinTransformer) -> list[tuple[int, int]]:
    return [stage.blocks[0].attn.window_size for stage in model.stages]


def gradients(model: nn.Module, images: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    images = images.clone().requires_grad_()
    out = model(images)
    (out * weights).sum().backward()
    return out.detach(), images.grad, {name: p.grad for name, p in model.named_parameters()}


# Where tokens are no multiple of the window and there are several windows, timm fills up after it rolled.
CASES = {
    "v1": (1, {}),
    "v1-oblong": (1, {"img_size": (96, 64), "window_size": (3, 4)}),
    "v1-shrunk": (1, {"img_size": (40, 64), "window_size": 16}),
    "v2": (2, {}),
    "v2-stages": (2, {"window_size": ((8, 4), (2, 8))}),
    "v2-shrunk": (2, {"window_size": 16, "img_size": (64, 128)}),
    "v2-pretrained": (2, {"pretrained_window_sizes": (3, 2)}),
}
WINDOWS = {
    "v1": [(4, 4)] * 2,
    "v1-oblong": [(3, 4)] * 2,
    "v1-shrunk": [(10, 16), (5, 8)],
    "v2": [(4, 4)] * 2,
    "v2-stages": [(8, 4), (2, 8)],
    "v2-shrunk": [(16, 16), (8, 16)],
    "v2-pretrained": [(4, 4)] * 2,
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_theirs(case: str) -> None:
    version, options = CASES[case]
    model = small(version, **options).double()
    own = SwinTransformer.from_timm(model)
    assert windows_of(own) == WINDOWS[case]
    images = torch.randn(2, 3, *model.patch_embed.img_size, dtype=torch.float64)
    weights = torch.randn(2, 5, dtype=torch.float64)
    out, grad, grads = gradients(model, images, weights)
    own_out, own_grad, own_grads = gradients(own, images, weights)
    # Version 2 measures offsets in float32, in them as here.
    rounding = {"rtol": 1e-5, "atol": 1e-6} if version == 2 else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(own_out, out, **rounding)
    torch.testing.assert_close(own_grad, grad, **rounding)
    # Their gradients under the names used here: by way of a model that has them for weights.
    model.load_state_dict({**model.state_dict(), **grads})
    expected = SwinTransformer.from_timm(model).state_dict()
    assert own_grads.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(own_grads[name], value, **rounding, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("version", [1, 2])
def test_the_named_model_equals_theirs_in_float32(version: int) -> None:
    model = timm.create_model(NAMES[version]).eval()
    if version == 2:
        # They start as the identity, and would hide the blocks.
        for stage in model.layers:
            for block in stage.blocks:
                nn.init.ones_(block.norm1.weight)
                nn.init.ones_(block.norm2.weight)
    own = SwinTransformer.from_timm(model)
    expected = {k: v.shape for k, v in SwinTransformer.tiny(version=version).state_dict().items()}
    assert {k: v.shape for k, v in own.state_dict().items()} == expected
    images = torch.randn(1, 3, *model.patch_embed.img_size)
    with torch.no_grad():
        torch.testing.assert_close(own(images), model(images), rtol=1e-4, atol=1e-4)


NAMED = (
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window12_384",
    "swin_s3_tiny_224",
    "swinv2_base_window8_256",
    "swinv2_small_window16_256",
    "swinv2_base_window12to24_192to384",
)


@pytest.mark.parametrize("name", NAMED)
def test_every_tensor_of_the_named_models_has_its_place(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    own = SwinTransformer.from_timm(model)
    assert sum(p.numel() for p in own.parameters()) == sum(p.numel() for p in model.parameters()) + sum(
        block.attn.q_bias.numel() for stage in model.layers for block in stage.blocks if hasattr(block.attn, "q_bias")
    )
    for stage, theirs in zip(own.stages, model.layers, strict=True):
        for block, other in zip(stage.blocks, theirs.blocks, strict=True):
            assert block.attn.window_size == tuple(other.window_size)
            assert block.attn.shift == tuple(other.shift_size) or other.input_resolution == tuple(other.window_size)
            measure = getattr(other.attn, "pretrained_window_size", None)
            if measure is not None:
                expected = tuple(measure) if measure[0] else tuple(other.window_size)
                assert block.attn.bias.pretrained_window_size == expected


@pytest.mark.parametrize("case", ["v1", "v1-shrunk-later", "v2", "v2-shrunk"])
def test_state_dicts_load_like_models(case: str) -> None:
    version, options = CASES.get(case, CASES["v1"])
    model = small(version, **options).eval()
    size = model.patch_embed.img_size
    given = {"window_size": options.get("window_size", 4), "image_size": size} if version == 2 else {}
    if case == "v1-shrunk-later":
        given = {"window_size": 20, "image_size": (36, 200)}
    own = SwinTransformer.from_timm(model.state_dict(), **given).eval()
    if case == "v1-shrunk-later":
        assert windows_of(own) == [(9, 20), (5, 20)]
        return
    images = torch.randn(1, 3, *size)
    assert torch.equal(own(images), SwinTransformer.from_timm(model)(images))


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_of_the_authors_load(version: int) -> None:
    """They merge at the end of a stage, name the head otherwise, and save buffers."""
    model = small(version).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        name = re.sub(r"^layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        state[name.replace("head.fc.", "head.")] = tensor
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    state["layers.0.blocks.1.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    if version == 2:
        for stage in (0, 1):
            for block in (0, 1):
                state[f"layers.{stage}.blocks.{block}.attn.relative_coords_table"] = torch.zeros(1, 7, 7, 2)
    own = SwinTransformer.from_timm({"model": state}).eval()
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(own(images), model(images), rtol=1e-4, atol=1e-4)


def test_a_model_without_head_or_bias_gives_the_same_features() -> None:
    model = small(1, num_classes=0, qkv_bias=False).double().eval()
    own = SwinTransformer.from_timm(model).eval()
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    assert own.head is None
    assert own.stages[0].blocks[0].attn.qkv.bias is None
    torch.testing.assert_close(own(images), model(images))
    torch.testing.assert_close(own.features(images), model.forward_features(images))


def test_another_window_interpolates_shrinks_and_keeps_the_measure() -> None:
    model = small(1)
    own = SwinTransformer.from_timm(model, window_size=12)
    # The second stage has 8 x 8 tokens.
    assert windows_of(own) == [(12, 12), (8, 8)]
    for stage, theirs, window in zip(own.stages, model.layers, (12, 8), strict=True):
        table = theirs.blocks[1].attn.relative_position_bias_table
        assert torch.equal(stage.blocks[1].attn.bias.table, resized_bias_table(table, 4, window))
    larger = SwinTransformer.from_timm(model, window_size=12, image_size=96)
    assert windows_of(larger) == [(12, 12), (12, 12)]
    network = SwinTransformer.from_timm(small(2), window_size=8).stages[1].blocks[0].attn.bias
    assert network.window_size == (8, 8)
    assert network.pretrained_window_size == (4, 4)


def test_another_image_size_equals_a_model_that_timm_resized() -> None:
    model = small(1, img_size=32, window_size=4).double().eval()
    own = SwinTransformer.from_timm(model)
    assert windows_of(own) == [(4, 4), (4, 4)]
    model.set_input_size(img_size=(64, 128), window_size=4)
    images = torch.randn(1, 3, 64, 128, dtype=torch.float64)
    torch.testing.assert_close(own(images), model(images))


ERRORS = {
    "type": (lambda: None, {}, TypeError, "source: expected a model of timm or its state dict, got None"),
    "model": (lambda: timm.create_model("resnet10t"), {}, ValueError, "source: expected a Swin Transformer of timm"),
    "state": (
        lambda: nn.Linear(2, 2).state_dict(),
        {},
        ValueError,
        "source: expected the state dict of a Swin Transformer of timm, got weight, bias, ...",
    ),
    "window": (
        lambda: small(2).state_dict(),
        {},
        ValueError,
        "window_size: expected that of the model, which the state dict does not tell, got None",
    ),
    "missing": (
        lambda: {k: v for k, v in small(2).state_dict().items() if k != "layers.1.blocks.0.attn.v_bias"},
        {"window_size": 4},
        ValueError,
        r"left over \['layers.1.blocks.0.attn.q_bias'\], missing \['stages.1.blocks.0.attn.qkv.bias'\]",
    ),
    "position": (
        lambda: {**small(1).state_dict(), "absolute_pos_embed": torch.zeros(1, 256, 12)},
        {},
        ValueError,
        r"left over \['absolute_pos_embed'\]",
    ),
    "dropout": (lambda: small(1, proj_drop_rate=0.1), {}, ValueError, "source: expected a model without dropout"),
    "partition": (
        lambda: small(1, always_partition=True),
        {},
        ValueError,
        "source: expected a model without always_partition, got True in layers.0.blocks.0",
    ),
    "pool": (
        lambda: small(1, global_pool="max"),
        {},
        ValueError,
        "source: expected a model with average pooling, got 'max'",
    ),
    "head-dim": (
        lambda: small(1, head_dim=8),
        {},
        ValueError,
        r"layers.0.blocks.0.attn.qkv.weight: expected shape \[36, 12\], got \[48, 12\]",
    ),
    "image": (lambda: small(1), {"image_size": 0}, ValueError, "image_size: expected at least 1, got 0"),
}


@pytest.mark.parametrize(("source", "options", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(source, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SwinTransformer.from_timm(source(), **options)
