"""keep_fp32 keeps norms and softmaxes in float32, whatever the model around them is turned into."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsaccel.amp import keep_fp32
from dsaccel.modules import SlidingWindowLM
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = [torch.float16, torch.bfloat16]


class TinyRMSNorm(nn.Module):
    """A norm of a model's own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, *, gate: Tensor | None = None) -> tuple[Tensor, dict[str, int]]:
        assert x.dtype == self.weight.dtype
        y = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight
        return y if gate is None else y * gate, {"calls": 1}


# A module, the shape of its input, and how many of its parameters and buffers are floating point.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(6), (3, 6)),
    "LayerNorm-no-bias": (lambda: nn.LayerNorm(6, bias=False), (3, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (3, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (3, 6, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), (5, 6, 3, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6), (5, 6, 3, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(6, affine=True), (2, 6, 9)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, track_running_stats=True), (2, 6, 3, 4)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(6), (2, 6, 3, 4, 2)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), (2, 6, 9)),
    "Softmax": (lambda: nn.Softmax(-1), (2, 6)),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), (2, 6)),
    "Softmin": (lambda: nn.Softmin(-1), (2, 6)),
    "Softmax2d": (lambda: nn.Softmax2d(), (2, 6, 3, 3)),
}


def randomise(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return model


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES)
def test_computes_in_float32_and_answers_in_half(make, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = randomise(nn.Sequential(make()))
    plain = copy.deepcopy(model)
    assert keep_fp32(model).kept == ("0",)
    model.to(dtype)
    x = (torch.randn(shape) * 3).to(dtype)
    x_kept, x_plain = x.clone().requires_grad_(), x.float().requires_grad_()
    out, expected = model(x_kept), plain(x_plain)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    upstream = torch.randn(shape).to(dtype)
    out.backward(upstream)
    expected.backward(upstream.float())
    assert torch.equal(x_kept.grad, x_plain.grad.to(dtype))
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad), name
    for (name, b), (_, c) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(b, c), name
        assert b.dtype == c.dtype


def mixed() -> nn.Module:
    return randomise(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), nn.Softmax(-1)))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: x.dtype for name, x in model.state_dict().items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to(torch.zeros((), dtype=torch.float16)),
        lambda m: m.half().bfloat16().to(torch.float16),
        lambda m: m.double().half(),
    ],
    ids=["half", "bfloat16", "to", "to-device", "to-tensor", "again", "from-double"],
)
def test_values_survive_later_changes(change) -> None:
    model = mixed()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    keep_fp32(model)
    change(model)
    assert list(model.state_dict()) == list(before)
    for name, x in model.state_dict().items():
        if name.startswith("0."):
            assert x.dtype in HALF
        else:
            assert torch.equal(x, before[name]), name
            assert x.dtype == before[name].dtype
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_follows_double_and_the_device() -> None:
    model = mixed()
    keep_fp32(model)
    assert {d for d in dtypes(model.double()).values() if d.is_floating_point} == {torch.float64}
    x = torch.randn(5, 6).double()
    assert model(x).dtype == torch.float64
    assert all(x.is_meta for x in model.to("meta", torch.float16).state_dict().values())
    assert dtypes(model)["1.weight"] == torch.float32
    assert dtypes(model.to_empty(device="cpu"))["1.weight"] == torch.float32


def test_twice_is_once() -> None:
    model = mixed()
    first = keep_fp32(model)
    classes = [type(m) for m in model.modules()]
    second = keep_fp32(model, filter=lambda name, module: False)
    assert first == second
    assert [type(m) for m in model.modules()] == classes
    assert isinstance(model[1], nn.LayerNorm)


def test_model_that_is_half_already_is_widened() -> None:
    model = mixed().bfloat16()
    report = keep_fp32(model)
    assert report.widened == ("1", "2")
    assert dtypes(model)["2.running_var"] == torch.float32
    assert dtypes(model)["0.weight"] == torch.bfloat16
    assert str(report).splitlines() == [
        "3 kept in float32, 0 left",
        "  kept 1: was in half precision",
        "  kept 2: was in half precision",
        "  kept 3",
    ]


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_half_checkpoint_loads(assign: bool) -> None:
    model = mixed()
    checkpoint = {name: x.half() if x.is_floating_point() else x for name, x in mixed().state_dict().items()}
    keep_fp32(model)
    model.half()
    model.load_state_dict(checkpoint, strict=True, assign=assign)
    for name, x in model.state_dict().items():
        assert torch.equal(x.half(), checkpoint[name].half())
    assert dtypes(model)["1.weight"] == dtypes(model)["2.running_mean"] == torch.float32
    assert model(torch.randn(5, 6).half()).dtype == torch.float16


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "pickle-0", "torch.save"])
def test_copies_are_kept_too(copied: str) -> None:
    model = mixed()
    keep_fp32(model)
    model.half().eval()
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    elif copied.startswith("pickle"):
        other = pickle.loads(pickle.dumps(model, protocol=0 if copied == "pickle-0" else None))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other] == [type(m) for m in model]
    x = torch.randn(5, 6)
    assert torch.equal(other(x.half()), model(x.half()))
    assert dtypes(other.bfloat16())["1.weight"] == torch.float32
    assert other[1].weight is not model[1].weight


def test_class_with_its_own_way_of_copying() -> None:
    class Own(nn.LayerNorm):
        def __reduce__(self):
            return nn.LayerNorm, (6,)

    model = Own(6)
    keep_fp32(model)
    assert type(copy.deepcopy(model)) is nn.LayerNorm


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole(compiler: str) -> None:
    model = nn.Sequential(*mixed(), TinyRMSNorm(6)).eval()
    keep_fp32(model)
    model.bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    exact = copy.deepcopy(model).double()
    x = torch.randn(5, 6).bfloat16()
    assert_close_to_reference(compiled(x)[0], exact(x.double())[0], model(x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = compiled(x)[0], model(x)[0]
    # Where the product before the norms is rounded decides the error.
    assert_close_to_reference(out.bfloat16(), exact(x.double())[0], plain.bfloat16())
    assert out.dtype == torch.float32


def test_exports() -> None:
    model = mixed().eval()
    keep_fp32(model)
    x = torch.randn(5, 6).half()
    program = torch.export.export(model.half(), (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_under_autocast_the_output_stays_float32() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Bilinear(6, 6, 6))
    keep_fp32(model, also=(nn.Linear,))
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = model[0](x.bfloat16())
        assert model[1](out.bfloat16()).dtype == torch.float32
    # The product itself was not computed in bfloat16 either.
    expected = nn.functional.linear(x.bfloat16().float(), model[0].weight, model[0].bias)
    assert torch.equal(out, expected)


def test_norms_of_models_are_known_by_name() -> None:
    model = nn.ModuleDict({"norm": randomise(TinyRMSNorm(6)), "block": nn.Sequential(nn.LayerNorm(6))})
    model["block"].__class__ = type("LayerNormBlock", (nn.Sequential,), {})
    plain = copy.deepcopy(model["norm"])
    assert keep_fp32(model).kept == ("norm", "block.0")
    model.half()
    x, gate = torch.randn(5, 6).half(), torch.randn(5, 6).half()
    out, other = model["norm"](x, gate=gate)
    assert torch.equal(out, plain(x.float(), gate=gate.float())[0].half())
    assert other == {"calls": 1}


def test_nested_arguments_are_cast() -> None:
    class ListLayerNorm(nn.Module):
        def forward(self, count: int, pair, *, more):
            assert pair[0].dtype == pair[1].dtype == more["x"][0].dtype == torch.float32
            assert more["ids"].dtype == torch.int64
            return [pair[0] + 1, count, (more["x"][0], more["ids"])]

    model = ListLayerNorm()
    keep_fp32(model)
    x = torch.zeros(2).bfloat16()
    ids = torch.zeros(2, dtype=torch.int64)
    out, count, (other, same) = model(3, (x, x.half()), more={"x": [x], "ids": ids})
    assert (out.dtype, count, other.dtype) == (torch.bfloat16, 3, torch.bfloat16)
    assert same is ids
    assert model(3, (torch.zeros(2),) * 2, more={"x": [torch.zeros(2)], "ids": ids})[0].dtype == torch.float32


def test_also_and_filter() -> None:
    model = mixed()
    report = keep_fp32(model, also=(nn.Linear,), filter=lambda name, module: name != "2")
    assert report.kept == ("0", "1", "3")
    assert report.left == {"2": "the filter says so"}
    assert "  left 2: the filter says so" in str(report)
    model.half()
    assert dtypes(model)["0.weight"] == torch.float32
    assert dtypes(model)["2.weight"] == torch.float16


def test_also_keeps_what_is_inside() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x)

    model = nn.Sequential(Router(), nn.Linear(2, 2))
    keep_fp32(model, also=(Router,))
    model.half()
    assert model[0].gate[1].weight.dtype == torch.float32
    assert model(torch.randn(3, 6).half()).dtype == torch.float16


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
def test_what_cannot_be_kept_is_named() -> None:
    model = nn.Sequential(
        nn.LazyBatchNorm1d(), torch.jit.trace(nn.LayerNorm(4), torch.randn(2, 4)), nn.LayerNorm(4), nn.LayerNorm(4)
    )
    model[2].forward = lambda x: x
    report = keep_fp32(model)
    assert report.kept == ("3",)
    assert report.left == {
        "0": "it is lazy and will change its class; call the model once first",
        "1": "it is a ScriptModule, whose class is fixed",
        "2": "its forward was replaced by another function",
    }


@pytest.mark.parametrize("also", [[nn.Linear], (nn.Linear, int), (nn.Linear(2, 2),), nn.Linear], ids=str)
def test_also_must_be_classes_of_modules(also) -> None:
    model = nn.Sequential(nn.LayerNorm(2))
    with pytest.raises(TypeError, match=r"also: expected a tuple of subclasses of nn.Module, got"):
        keep_fp32(model, also=also)
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["train", "eval", "no-grad"])
def test_transformer_encoder_in_half_precision(monkeypatch, mode: str, padded: bool) -> None:
    """torch's fused layer for inference takes the norms' weights past the norms, and wants one dtype."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).train(mode == "train")
    model = copy.deepcopy(plain)
    assert len(keep_fp32(model).kept) == 4
    model.bfloat16()
    fused: list[bool] = []
    run = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: fused.append(True) or run(*args))
    x = torch.randn(3, 7, 16)
    mask = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None] if padded else None
    with torch.set_grad_enabled(mode != "no-grad"):
        out = model(x.bfloat16(), src_key_padding_mask=mask)
        assert not fused
        assert not model.use_nested_tensor
        expected = plain(x, src_key_padding_mask=mask)
        assert bool(fused) == (mode == "no-grad")
    seen = slice(None) if mask is None else ~mask
    assert out.dtype == torch.bfloat16
    # Two layers of bfloat16 products on values of about 1.
    torch.testing.assert_close(out[seen].float(), expected[seen], rtol=0, atol=0.1)


def test_language_model_trains_in_bfloat16() -> None:
    model = SlidingWindowLM(50, 32, 2, 4, window=5)
    assert len(keep_fp32(model).kept) == 5
    model.bfloat16()
    logits = model(torch.randint(50, (2, 12)))
    logits.float().logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert p.grad.isfinite().all()


def test_nothing_to_keep() -> None:
    report = keep_fp32(nn.Linear(2, 2))
    assert str(report) == "0 kept in float32, 0 left"
    norm = nn.LayerNorm(2)
    assert str(keep_fp32(norm)).splitlines()[1] == "  kept (the model itself)"
