"""The Swin Transformer is its parts in order, takes images of any size, and behaves as modules do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from dsaccel.modules import SwinTransformer
from dsaccel.modules.swin_attention import QKVLinear
from dsaccel.quant import QuantizedLinear, quantize_

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "patch_size": 2,
    "embed_dim": 8,
    "depths": (2, 1),
    "num_heads": (2, 4),
    "window_size": (3, 4),
    "num_classes": 5,
}
CASES = {
    "v1": {},
    "v2": {"version": 2},
    "v1-axial": {"position": "bias+axial", "padding": "attend", "embed_dim": 16},
    "v2-mixed": {"position": "mixed", "version": 2, "embed_dim": 16},
    "v2-windows": {"version": 2, "window_size": ((4, 4), (2, 3)), "pretrained_window_size": ((5, 5), (3, 3))},
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def made(case: dict) -> SwinTransformer:
    return SwinTransformer(**{**SMALL, **case})


@cases
@pytest.mark.parametrize("size", [(16, 24), (19, 13), (2, 3)], ids=lambda size: "x".join(map(str, size)))
def test_model_is_its_parts_in_order(case: dict, size: tuple[int, int]) -> None:
    model = made(case)
    images = torch.randn(2, 3, *size)
    x = model.patch_embed.norm(model.patch_embed.proj(images).permute(0, 2, 3, 1))
    assert x.shape[1:3] == (size[0] // 2, size[1] // 2)
    for block in model.stages[0].blocks:
        x = block(x)
    x = model.stages[1].blocks[0](model.stages[1].merge(x))
    features = model.norm(x)
    assert torch.equal(model.features(images), features)
    assert features.shape == (2, -(-(size[0] // 2) // 2), -(-(size[1] // 2) // 2), model.num_features)
    torch.testing.assert_close(model(images), model.head(features.flatten(1, 2).mean(1)))
    without = SwinTransformer(**{**SMALL, **case, "num_classes": 0})
    without.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head.")}, strict=True)
    torch.testing.assert_close(without(images), features.flatten(1, 2).mean(1))


def test_every_second_grid_is_shifted_by_half_a_window() -> None:
    model = SwinTransformer(**{**SMALL, "depths": (3, 2), "window_size": ((3, 4), (7, 1))})
    shifts = [[block.attn.shift for block in stage.blocks] for stage in model.stages]
    assert shifts == [[(0, 0), (1, 2), (0, 0)], [(0, 0), (3, 0)]]
    windows = [[block.attn.window_size for block in stage.blocks] for stage in model.stages]
    assert windows == [[(3, 4)] * 3, [(7, 1)] * 2]


def test_stochastic_depth_grows_from_zero() -> None:
    model = SwinTransformer(**{**SMALL, "depths": (2, 3)}, stochastic_depth=0.4)
    depths = [block.stochastic_depth.p for stage in model.stages for block in stage.blocks]
    assert depths == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    alone = SwinTransformer(**{**SMALL, "depths": (1,), "num_heads": (2,)}, stochastic_depth=0.4)
    assert alone.stages[0].blocks[0].stochastic_depth.p == 0.0


@pytest.mark.parametrize("version", [1, 2])
def test_nothing_is_kept_between_sizes(version: int) -> None:
    model = SwinTransformer(**{**SMALL, "window_size": 7, "patch_size": 1}, version=version)
    fresh = copy.deepcopy(model)
    small, large = torch.randn(1, 3, 7, 7), torch.randn(1, 3, 14, 14)
    model(small)
    assert torch.equal(model(large), fresh(large))
    assert torch.equal(model(small), fresh(small))


# What torchvision's documentation says its models have.
PARAMETERS = {
    ("tiny", 1): 28288354,
    ("small", 1): 49606258,
    ("base", 1): 87768224,
    ("tiny", 2): 28351570,
    ("small", 2): 49737442,
    ("base", 2): 87930848,
}


@pytest.mark.parametrize(("name", "version"), PARAMETERS, ids=lambda value: str(value))
def test_sizes_of_the_papers(name: str, version: int) -> None:
    with torch.device("meta"):
        model = getattr(SwinTransformer, name)(version=version)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name, version]
    assert model.stages[0].blocks[0].attn.window_size == ((7, 7) if version == 1 else (8, 8))
    with torch.device("meta"):
        other = getattr(SwinTransformer, name)(10, version=version, window_size=4, image_channels=1)
    assert other.head.out_features == 10
    assert other.stages[3].blocks[1].attn.window_size == (4, 4)
    assert other.patch_embed.proj.in_channels == 1


@cases
def test_copies_compute_the_same(case: dict) -> None:
    model = made(case)
    images = torch.randn(2, 3, 14, 22)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        loaded = made(case)
    loaded.to_empty(device="cpu").load_state_dict(torch.load(file, weights_only=True), strict=True)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images), model(images))


def test_state_dict_keys() -> None:
    """Checkpoints outlive the code: these names stay."""
    keys = list(SwinTransformer(**{**SMALL, "depths": (1, 1)}).state_dict())
    pairs = {key.rsplit(".", 1)[0] for key in keys}
    block = ("norm1", "attn.bias", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    blocks = {f"stages.{stage}.blocks.0.{name}" for stage in (0, 1) for name in block}
    outside = {"patch_embed.proj", "patch_embed.norm", "stages.1.merge.norm", "stages.1.merge.reduction"}
    assert pairs == blocks | outside | {"norm", "head"}
    assert "stages.1.merge.reduction.bias" not in keys
    assert "stages.0.blocks.0.attn.bias.table" in keys


@cases
def test_autocast_to_bfloat16_trains(case: dict) -> None:
    model = SwinTransformer(**{**SMALL, **case}, stochastic_depth=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = torch.randn(10, 3, 12, 12), torch.arange(10) % 5
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.9 * losses[0]


def test_model_compiles_whole() -> None:
    torch.compiler.reset()
    model = SwinTransformer(**{**SMALL, "depths": (1, 1)}, padding="attend").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 14, 22)
    torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize(("version", "kept"), [(1, 0), (2, 3)])
def test_model_can_be_quantized_but_for_projections_without_bias_of_keys(version: int, kept: int) -> None:
    model = made({"version": version, "embed_dim": 32, "padding": "attend"}).eval()
    images = torch.randn(2, 3, 14, 22)
    before = model(images)
    quantize_(model, "int8_dynamic")
    assert sum(isinstance(module, QKVLinear) for module in model.modules()) == kept
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14 - kept
    assert 0 < (model(images) - before).abs().max() < 0.1 * before.abs().max()


def call(images: Tensor) -> Tensor:
    return SwinTransformer(**SMALL)(images)


ERRORS = {
    "embed-dim": ({"embed_dim": 0}, ValueError, "embed_dim: expected a positive number, got 0"),
    "classes": ({"num_classes": -1}, ValueError, "num_classes: expected a positive number, got -1"),
    "classes-type": ({"num_classes": None}, TypeError, "num_classes: expected an int, got None"),
    "depths": ({"depths": 2}, ValueError, "depths: expected a sequence of one number for each stage, got 2"),
    "depths-empty": ({"depths": ()}, ValueError, "depths: expected a sequence of one number for each stage"),
    "depths-zero": ({"depths": (2, 0)}, ValueError, "depths: expected a positive number, got 0"),
    "heads": ({"num_heads": (2, 4, 8)}, ValueError, "num_heads: expected one for each of 2 stages"),
    "heads-type": ({"num_heads": (2, 4.0)}, TypeError, "num_heads: expected an int, got 4.0"),
    "heads-dim": ({"num_heads": (3, 4)}, ValueError, "dim: expected a multiple of num_heads = 3, got 8"),
    "window": ({"window_size": ((7, 7),)}, ValueError, "window_size: expected one window, or a pair"),
    "window-zero": ({"window_size": 0}, ValueError, "window_size: expected at least 1, got 0"),
    "window-type": ({"window_size": ((7, 7), "7")}, TypeError, "window_size: expected an int or a pair of ints"),
    "pretrained": (
        {"pretrained_window_size": 3},
        ValueError,
        "pretrained_window_size: expected None unless version is 2 with a bias",
    ),
    "patch": ({"patch_size": (2, 0)}, ValueError, "patch_size: expected at least 1"),
    "channels": ({"image_channels": 0}, ValueError, "image_channels: expected a positive number, got 0"),
    "version": ({"version": 3}, ValueError, "version: expected 1 or 2, got 3"),
    "position": ({"position": "none"}, ValueError, "position: expected one of bias, axial, mixed"),
    "padding": ({"padding": "zeros"}, ValueError, "padding: expected 'mask' or 'attend', got 'zeros'"),
    "depth": ({"stochastic_depth": -0.1}, ValueError, "stochastic_depth: expected from 0 to below 1, got -0.1"),
}


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(changed: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SwinTransformer(**{**SMALL, **changed})


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8), (1, 3, 1, 8), (1, 3, 8, 1)], ids=str)
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images: expected shape \[B, 3, H, W\] of at least 2 x 2, got shape"):
        call(torch.zeros(shape))
