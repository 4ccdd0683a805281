"""Models of torchvision load with all their tensors, and give the same outputs and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from installed import require
from torch import Tensor, nn

from dsaccel.modules import SwinTransformer
from dsaccel.modules.swin_bias import resized_bias_table

torchvision = require("torchvision")

from torchvision.models import swin_transformer as theirs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def small(version: int, **options: object) -> nn.Module:
    """A model of torchvision's own class, its weights large enough for every one to matter."""
    parts = {"block": theirs.SwinTransformerBlockV2, "downsample_layer": theirs.PatchMergingV2} if version == 2 else {}
    settings = {"patch_size": [4, 4], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": [3, 3]}
    model = theirs.SwinTransformer(**{**settings, "num_classes": 5, "stochastic_depth_prob": 0.0, **parts, **options})
    return drawn(model)


def drawn(model: nn.Module) -> nn.Module:
    for name, p in model.named_parameters():
        if not name.endswith("logit_scale"):
            nn.init.normal_(p, std=0.3)
        if name.endswith("attn.qkv.bias") and isinstance(model.features[1][0], theirs.SwinTransformerBlockV2):
            p.data[p.shape[0] // 3 : 2 * p.shape[0] // 3] = 0
    return model


def gradients(model: nn.Module, images: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    images = images.clone().requires_grad_()
    out = model(images)
    (out * weights).sum().backward()
    return out.detach(), images.grad, {name: p.grad for name, p in model.named_parameters()}


CASES = {"v1": (1, [3, 3]), "v1-oblong": (1, [4, 3]), "v2": (2, [4, 4]), "v2-oblong": (2, [3, 5])}
cases = pytest.mark.parametrize(("version", "window"), CASES.values(), ids=CASES.keys())


@cases
@pytest.mark.parametrize("size", [(64, 64), (72, 56), (9, 100)], ids=lambda size: "x".join(map(str, size)))
def test_outputs_and_gradients_equal_theirs(version: int, window: list[int], size: tuple[int, int]) -> None:
    model = small(version, window_size=window).double()
    own = SwinTransformer.from_torchvision(model)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    weights = torch.randn(2, 5, dtype=torch.float64)
    out, grad, grads = gradients(model, images, weights)
    own_out, own_grad, own_grads = gradients(own, images, weights)
    # Version 2 measures offsets in float32, in them as here.
    rounding = {"rtol": 1e-5, "atol": 1e-6} if version == 2 else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(own_out, out, **rounding)
    torch.testing.assert_close(own_grad, grad, **rounding)
    # Their gradients under the names used here: by way of a model that has them for weights.
    as_weights = copy.deepcopy(model)
    as_weights.load_state_dict({**model.state_dict(), **grads})
    expected = SwinTransformer.from_torchvision(as_weights).state_dict()
    assert own_grads.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(own_grads[name], value, **rounding, msg=lambda m, name=name: f"{name}: {m}")
    if version == 2:
        assert not own_grads["stages.0.blocks.0.attn.qkv.bias"][12:24].any()


@cases
def test_masked_padding_differs_only_where_there_is_padding(version: int, window: list[int]) -> None:
    model = small(version, window_size=window).double()
    own = SwinTransformer.from_torchvision(model, padding="mask")
    even = torch.randn(1, 3, 8 * window[0], 8 * window[1], dtype=torch.float64)
    torch.testing.assert_close(own(even), model(even), rtol=1e-5, atol=1e-6)
    odd = torch.randn(1, 3, 8 * window[0] + 4, 8 * window[1] + 4, dtype=torch.float64)
    assert (own(odd) - model(odd)).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"])
def test_every_tensor_of_the_named_models_has_its_place(name: str) -> None:
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    own = SwinTransformer.from_torchvision(model)
    sized = getattr(SwinTransformer, {"t": "tiny", "s": "small", "b": "base"}[name[-1]])
    with torch.device("meta"):
        expected = sized(version=2 if "v2" in name else 1)
    assert {k: v.shape for k, v in own.state_dict().items()} == {k: v.shape for k, v in expected.state_dict().items()}
    assert sum(p.numel() for p in own.parameters()) == sum(p.numel() for p in model.parameters())
    windows = [stage.blocks[1].attn.window_size for stage in own.stages]
    assert windows == [tuple(model.features[1][0].attn.window_size)] * 4
    of_state = SwinTransformer.from_torchvision(model.state_dict())
    assert [stage.blocks[1].attn.window_size for stage in of_state.stages] == windows


def test_swin_t_equals_theirs_in_float32() -> None:
    model = torchvision.models.swin_t().eval()
    own = SwinTransformer.from_torchvision(model)
    images = torch.randn(1, 3, 96, 80)
    assert not own.training
    with torch.no_grad():
        torch.testing.assert_close(own(images), model(images), rtol=1e-4, atol=1e-5)


@cases
def test_state_dicts_load_like_models(version: int, window: list[int]) -> None:
    model = small(version, window_size=window).eval()
    known = version == 2 or window[0] == window[1]
    given = {} if known else {"pretrained_window_size": tuple(window)}
    own = SwinTransformer.from_torchvision(model.state_dict(), **given).eval()
    images = torch.randn(1, 3, 40, 36)
    assert torch.equal(own(images), SwinTransformer.from_torchvision(model)(images))
    wrapped = SwinTransformer.from_torchvision({"model": model.state_dict(), "epoch": 3}, **given).eval()
    assert torch.equal(own(images), wrapped(images))


def test_the_model_is_a_copy() -> None:
    model = small(1).to(torch.bfloat16)
    own = SwinTransformer.from_torchvision(model, stochastic_depth=0.3)
    assert own.norm.weight.dtype == torch.bfloat16
    assert own.training
    assert own.stages[1].blocks[1].stochastic_depth.p == pytest.approx(0.3)
    before = own.norm.weight.clone()
    nn.init.zeros_(model.norm.weight)
    assert torch.equal(own.norm.weight, before)
    assert all(p.requires_grad for p in own.parameters())


def test_eps_and_ratio_are_theirs() -> None:
    model = small(1, norm_layer=lambda dim: nn.LayerNorm(dim, eps=1e-2), mlp_ratio=2.6).double()
    own = SwinTransformer.from_torchvision(model)
    assert own.stages[0].merge is None
    assert own.stages[1].merge.norm.eps == 1e-2
    images = torch.randn(1, 3, 24, 24, dtype=torch.float64)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(SwinTransformer.from_torchvision(model.state_dict())(images), model(images))
    torch.testing.assert_close(own(images), model(images))


@pytest.mark.parametrize("window", [5, (2, 4), ((4, 4), (2, 3))], ids=str)
def test_another_window_interpolates_the_tables(window: int | tuple) -> None:
    model = small(1)
    own = SwinTransformer.from_torchvision(model, window_size=window)
    windows = window if isinstance(window, tuple) and isinstance(window[0], tuple) else (window, window)
    for index, stage in enumerate(own.stages):
        for place, block in enumerate(stage.blocks):
            table = model.features[2 * index + 1][place].attn.relative_position_bias_table
            assert torch.equal(block.attn.bias.table, resized_bias_table(table, 3, windows[index]))
    own(torch.randn(1, 3, 40, 24)).sum().backward()
    same = SwinTransformer.from_torchvision(model, window_size=3).state_dict()
    for name, value in SwinTransformer.from_torchvision(model).state_dict().items():
        assert torch.equal(same[name], value)


def test_another_window_of_version_2_keeps_the_network_and_its_measure() -> None:
    model = small(2, window_size=[4, 4])
    own = SwinTransformer.from_torchvision(model, window_size=7)
    bias = own.stages[1].blocks[1].attn.bias
    assert bias.window_size == (7, 7)
    assert bias.pretrained_window_size == (4, 4)
    assert torch.equal(bias.output_weight, model.features[3][1].attn.cpb_mlp[2].weight)
    # The offsets that both windows have get the same bias.
    smaller = SwinTransformer.from_torchvision(model).stages[1].blocks[1].attn.bias()
    inside = torch.arange(49).view(7, 7)[:4, :4].flatten()
    torch.testing.assert_close(bias()[:, inside][:, :, inside], smaller)
    other = SwinTransformer.from_torchvision(model.state_dict(), window_size=7, pretrained_window_size=5)
    assert other.stages[0].blocks[0].attn.bias.pretrained_window_size == (5, 5)


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


ERRORS = {
    "type": (lambda: 3, {}, TypeError, r"source: expected a model of torchvision or its state dict, got 3"),
    "model": (lambda: nn.Linear(2, 2), {}, ValueError, "source: expected a Swin Transformer of torchvision, got torch"),
    "state": (
        lambda: nn.Linear(2, 2).state_dict(),
        {},
        ValueError,
        "source: expected the state dict of a Swin Transformer of torchvision, got weight, bias, ...",
    ),
    "empty": (dict, {}, ValueError, "source: expected the state dict .* got no keys"),
    "missing": (
        lambda: without(small(1).state_dict(), "norm.bias"),
        {},
        ValueError,
        r"left over \[\], missing \['norm.bias'\]",
    ),
    "left": (
        lambda: {**small(1).state_dict(), "features.1.0.attn.gate": torch.zeros(1)},
        {},
        ValueError,
        r"left over \['features.1.0.attn.gate'\], missing \[\]",
    ),
    "shape": (
        lambda: {**small(1).state_dict(), "features.3.0.mlp.0.bias": torch.zeros(3)},
        {},
        ValueError,
        r"features.3.0.mlp.0.bias: expected shape \[96\], got \[3\]",
    ),
    "dropout": (lambda: small(1, dropout=0.1), {}, ValueError, "source: expected a model without dropout .*, got 0.1"),
    "attention-dropout": (lambda: small(2, attention_dropout=0.2), {}, ValueError, "got 0.2 in features.1.0.attn"),
    "oblong": (
        lambda: small(1, window_size=[3, 4]).state_dict(),
        {},
        ValueError,
        "window_size: expected that of the model, which the state dict does not tell, got None",
    ),
    "oblong-new": (
        lambda: small(1, window_size=[3, 4]).state_dict(),
        {"window_size": 7},
        ValueError,
        "pretrained_window_size: expected that of the table of 35 offsets in stage 0, got None",
    ),
    "wrong": (
        lambda: small(1).state_dict(),
        {"pretrained_window_size": 4},
        ValueError,
        r"pretrained_window_size: expected that of the table of 25 offsets in stage 0, got \(4, 4\)",
    ),
    "windows": (
        lambda: small(1),
        {"window_size": ((3, 3),)},
        ValueError,
        "window_size: expected one window, or a pair",
    ),
    "padding": (lambda: small(1), {"padding": "roll"}, ValueError, "padding: expected 'mask' or 'attend', got 'roll'"),
}


@pytest.mark.parametrize(("source", "options", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(source, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SwinTransformer.from_torchvision(source(), **options)
