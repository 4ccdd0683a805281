"""xavier_ draws each projection with its own variance, and names what it does not touch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dsaccel.amp import xavier_
from dsaccel.modules import SlidingWindowLM, WindowAttention, WindowMultiheadAttention

DISTRIBUTIONS = ["normal", "uniform"]


def assert_xavier(part: torch.Tensor, fan_in: int, fan_out: int, distribution: str, gain: float = 1.0) -> None:
    std = gain * (2 / (fan_in + fan_out)) ** 0.5
    # Six standard errors of a variance of that many draws of a normal distribution.
    assert part.var().item() == pytest.approx(std**2, rel=6 * (2 / part.numel()) ** 0.5)
    assert part.mean().item() == pytest.approx(0, abs=6 * std / part.numel() ** 0.5)
    if distribution == "uniform":
        assert part.abs().max() <= 3**0.5 * std
    else:
        assert part.abs().max() > 3**0.5 * std


LAYERS = {
    # A layer, the shapes of the parts of its weight, and the fans of each.
    "linear": (lambda: nn.Linear(200, 100), [(200, 100)]),
    "no-bias": (lambda: nn.Linear(80, 160, bias=False), [(80, 160)]),
    "conv1d": (lambda: nn.Conv1d(40, 30, 7), [(280, 210)]),
    "conv2d": (lambda: nn.Conv2d(20, 30, 3), [(180, 270)]),
    "conv3d": (lambda: nn.Conv3d(8, 16, (1, 2, 3)), [(48, 96)]),
    "grouped": (lambda: nn.Conv2d(40, 80, 3, groups=4), [(90, 180)] * 4),
    "depthwise": (lambda: nn.Conv1d(2, 2, 901, groups=2), [(901, 901)] * 2),
    "transposed": (lambda: nn.ConvTranspose2d(20, 30, 3), [(270, 180)]),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("make", "fans"), LAYERS.values(), ids=LAYERS)
def test_layers(make, fans: list, distribution: str) -> None:
    layer = make()
    report = xavier_(layer, distribution=distribution, gain=1.5)
    assert report.drawn == {"weight": len(fans)}
    assert report.left == {}
    for part, (fan_in, fan_out) in zip(layer.weight.detach().chunk(len(fans)), fans, strict=True):
        assert_xavier(part, fan_in, fan_out, distribution, 1.5)
    if layer.bias is not None:
        assert report.zeroed == ("bias",)
        assert layer.bias.eq(0).all()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("kind", ["grouped-heads", "timm", "multihead", "multihead-kdim", "windowed", "fused", "gate"])
def test_fused_projections(kind: str, distribution: str) -> None:
    fused = None
    if kind == "grouped-heads":
        model = WindowAttention(192, 6, 2)
        weight, rows = model.qkv.weight, [192, 64, 64]
    elif kind == "timm":
        model = nn.ModuleDict({"qkv": nn.Linear(96, 288)})
        weight, rows = model["qkv"].weight, [96] * 3
    elif kind in ("multihead", "windowed"):
        model = (nn.MultiheadAttention if kind == "multihead" else WindowMultiheadAttention)(96, 4)
        weight, rows = model.in_proj_weight, [96] * 3
    elif kind == "multihead-kdim":
        model = nn.MultiheadAttention(96, 4, kdim=50)
        weight, rows = model.k_proj_weight, [96]
    else:
        model = nn.ModuleDict({"qkv" if kind == "fused" else "gate_up": nn.Linear(100, 300)})
        rows = [150, 50, 100]
        fused = {"qkv": rows, "gate_up": rows}
        weight = next(model.parameters())
    report = xavier_(model, distribution=distribution, fused=fused)
    for part, count in zip(weight.detach().split(rows), rows, strict=True):
        assert_xavier(part, weight.shape[1], count, distribution)
    assert len(rows) in report.drawn.values()
    assert report.left == {}
    assert all(x.eq(0).all() for name, x in model.named_parameters() if name.endswith("bias"))


def test_qkv_by_name_alone_is_not_split() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(64, 128)})
    assert xavier_(model).drawn == {"qkv.weight": 1}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_is_left_stays_and_is_named() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(20, 8)
    model.scale = nn.Parameter(torch.tensor([2.0]))
    model.norm = nn.LayerNorm(8)
    model.body = nn.Linear(8, 8)
    model.again = model.body
    model.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    model.rnn = nn.GRU(8, 8)
    model.lazy = nn.LazyLinear(3)
    model.meta = nn.Linear(2, 2, device="meta")
    model.head = nn.Linear(8, 20, bias=False)
    model.empty = nn.Linear(0, 2, bias=False)
    model.head.weight = model.embed.weight
    model.odd = nn.Linear(2, 2, bias=False)
    model.odd.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    model.skipped = nn.Linear(4, 4)
    before = {name: x.clone() for name, x in model.state_dict().items() if "lazy" not in name}
    report = xavier_(model, filter=lambda name, module: name != "skipped")
    drawn = {"body.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert set(report.drawn) == drawn
    assert set(report.zeroed) == {"body.bias", "attention.in_proj_bias", "attention.out_proj.bias"}
    assert report.left == {
        "scale": "it belongs to Module",
        "embed.weight": "it belongs to Embedding",
        "norm.weight": "it belongs to LayerNorm",
        "norm.bias": "it belongs to LayerNorm",
        "attention.bias_k": "it belongs to MultiheadAttention",
        "attention.bias_v": "it belongs to MultiheadAttention",
        **{f"rnn.{kind}_{what}_l0": "it belongs to GRU" for kind in ("weight", "bias") for what in ("ih", "hh")},
        "lazy.weight": "it has no shape yet",
        "lazy.bias": "it has no shape yet",
        "meta.weight": "it is on the meta device",
        "meta.bias": "it is on the meta device",
        "empty.weight": "it is empty",
        "odd.weight": "it is torch.int8",
        "skipped.weight": "the filter says so",
        "skipped.bias": "the filter says so",
    }
    for name in report.left:
        if name in before and not before[name].is_meta:
            assert torch.equal(model.state_dict()[name], before[name]), name
    assert str(report).splitlines()[0] == "3 weights drawn, 3 biases zeroed, 18 left"
    assert "  drew attention.in_proj_weight in 3 parts" in str(report)
    assert "  left norm.bias: it belongs to LayerNorm" in str(report)


def test_head_before_the_embedding_it_is_tied_to() -> None:
    model = nn.ModuleDict({"head": nn.Linear(8, 20, bias=False), "embed": nn.Embedding(20, 8)})
    model["head"].weight = model["embed"].weight
    assert xavier_(model).left == {"head.weight": "it is tied to an embedding"}


def test_parametrised_weight_is_left() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    before = layer.weight.clone()
    report = xavier_(layer)
    assert report.drawn == {}
    assert report.zeroed == ("bias",)
    assert torch.equal(layer.weight, before)


def test_language_model() -> None:
    model = SlidingWindowLM(50, 32, 2, 4)
    before = copy.deepcopy(model.state_dict())
    report = xavier_(model)
    assert report.drawn["blocks.0.attn.qkv.weight"] == 3
    assert set(report.drawn) | set(report.left) == set(before)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in report.left)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_same_generator_same_weights(distribution: str) -> None:
    def draw(seed: int) -> torch.Tensor:
        layer = nn.Linear(5, 5)
        xavier_(layer, distribution=distribution, generator=torch.Generator().manual_seed(seed))
        return layer.weight

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


ERRORS = {
    "distribution": ({"distribution": "he"}, "distribution: expected one of 'normal', 'uniform', got 'he'"),
    "gain": ({"gain": 0}, "gain: expected a positive number, got 0"),
    "gain-nan": ({"gain": float("nan")}, "gain: expected a positive number, got nan"),
    "rows": ({"fused": {"1": (3, 3)}}, r"fused: expected positive rows for 1.weight that add up to 4, got \[3, 3\]"),
    "rows-0": ({"fused": {"1": (4, 0)}}, r"fused: expected positive rows for 1.weight that add up to 4, got \[4, 0\]"),
    "no-rows": ({"fused": {"1": ()}}, r"fused: expected positive rows for 1.weight that add up to 4, got \[\]"),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_leave_the_model_as_it_was(options: dict, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        xavier_(model, **options)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
