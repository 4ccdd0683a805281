"""Swin's attention and blocks compute what rolling, cutting and masking does, and keep nothing between calls."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dskernels as dk
from dsaccel.modules import (
    AxialRope2d,
    ContinuousPositionBias,
    MixedRope2d,
    PatchMerging,
    RelativePositionBias,
    SwinAttention,
    SwinBlock,
)
from dsaccel.modules.swin_block import StochasticDepth

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = (3, 4)


def rolled(module: SwinAttention, x: Tensor) -> Tensor:
    """The attention as it is usually written: pad, roll, partition, mask, softmax, merge, roll back."""
    batch, height, width, dim = x.shape
    (h, w), heads = module.window_size, module.num_heads
    shift = tuple(
        0 if size <= window else s for size, window, s in zip((height, width), (h, w), module.shift, strict=True)
    )
    bottom, right = -height % h, -width % w
    bias = module.qkv.bias
    if bias is not None and module.logit_scale is not None:
        bias = bias * torch.tensor([1.0, 0.0, 1.0], dtype=bias.dtype).repeat_interleave(dim)
    qkv = F.linear(F.pad(x, (0, 0, 0, right, 0, bottom)), module.qkv.weight, bias)
    rows, columns = torch.arange(height + bottom), torch.arange(width + right)
    cells = torch.div(rows - shift[0], h, rounding_mode="floor")[:, None] * 1000
    cells = cells + torch.div(columns - shift[1], w, rounding_mode="floor")
    present = (rows < height)[:, None] & (columns < width) | (module.padding == "attend")
    image = torch.cat((qkv, cells[None, ..., None].expand(batch, -1, -1, 1).to(qkv.dtype)), -1)
    image = torch.cat((image, present[None, ..., None].expand(batch, -1, -1, 1).to(qkv.dtype)), -1)
    image = image.roll((-shift[0], -shift[1]), (1, 2))
    windows = image.unflatten(2, (-1, w)).unflatten(1, (-1, h)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    q, k, v = windows[..., :-2].unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
    cell, there = windows[..., -2], windows[..., -1] > 0
    if module.logit_scale is not None:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scale = module.logit_scale.clamp(max=torch.tensor(100.0).log().item()).exp()[:, None, None]
    else:
        scale = q.shape[-1] ** -0.5
    if module.rope is not None:
        table = module.rope.table()
        turn = torch.complex(table.cos, table.sin).to(torch.complex128 if q.dtype == torch.float64 else torch.complex64)
        q, k = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
        q, k = (torch.cat((x.real, x.imag), -1) for x in (q, k))
    scores = q @ k.mT * scale
    if module.bias is not None:
        scores = scores + module.bias()
    seen = (cell[..., :, None] == cell[..., None, :]) & there[..., None, :]
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    # Rows of padding may see nothing; what they give is cut off.
    out = (scores.softmax(-1).nan_to_num() @ v).transpose(2, 3).flatten(3)
    across = (width + right) // w
    out = out.unflatten(2, (h, w)).unflatten(1, (-1, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return module.proj(out.roll(shift, (1, 2))[:, :height, :width])


def gradients(module: nn.Module, call, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    (out * weights).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


CASES = {
    "plain": {"shift": 0},
    "bias-shift": {"bias": True, "shift": (1, 2)},
    "bias-rows-attend": {"bias": True, "shift": (1, 0), "padding": "attend"},
    "cosine-shift": {"bias": True, "cosine": True, "shift": (2, 3)},
    "cosine-attend": {"bias": True, "cosine": True, "shift": (1, 2), "padding": "attend"},
    "axial": {"rope": AxialRope2d, "shift": (1, 2)},
    "axial-cosine-attend": {"rope": AxialRope2d, "cosine": True, "shift": (1, 2), "padding": "attend"},
    "mixed-frozen": {"rope": MixedRope2d, "shift": (1, 2), "bias": True},
    "no-qkv-bias-attend": {"qkv_bias": False, "shift": (1, 2), "padding": "attend"},
}


def made(case: dict, window: tuple[int, int] = WINDOW) -> SwinAttention:
    options = dict(case)
    if options.pop("bias", False):
        kind = ContinuousPositionBias if options.get("cosine") else RelativePositionBias
        options["bias"] = kind(window, 3)
    if "rope" in options:
        rope = options["rope"]
        options["rope"] = rope(8, window) if rope is AxialRope2d else rope(8, window, 3).requires_grad_(False)
    module = SwinAttention(24, 3, window, **options)
    for p in module.parameters():
        if p is not module.logit_scale:
            nn.init.normal_(p, std=0.3)
    return module


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [(9, 12), (7, 13), (2, 9)], ids=lambda size: "x".join(map(str, size)))
def test_attention_and_gradients_equal_rolled_windows(case: dict, size: tuple[int, int], backend: str) -> None:
    module = made(case)
    x, weights = torch.randn(2, *size, 24), torch.randn(2, *size, 24)
    # The compiled kernels serve whatever they can; the automatic choice never hands them float64.
    chosen = dk.use_backend("reference") if backend == "reference" else contextlib.nullcontext()
    with chosen:
        result = gradients(module, module, x, weights)
    exact_module = copy.deepcopy(module).double()
    exact = gradients(exact_module, lambda x: rolled(exact_module, x), x.double(), weights.double())
    for name in exact:
        if exact[name] is None:
            assert result[name] is None
        else:
            # The op's own tests measure its rounding; here a wrong argument is to show, in float32.
            bound = 1e-4 * float(exact[name].abs().max())
            torch.testing.assert_close(result[name].double(), exact[name], rtol=0, atol=bound, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(exact_module(x.double()), exact["out"], rtol=1e-10, atol=1e-10)


def test_keys_have_no_bias_with_cosine_attention() -> None:
    module = made({"cosine": True})
    x = torch.randn(1, 6, 8, 24)
    before = module(x)
    before.sum().backward()
    assert not module.qkv.bias.grad[24:48].any()
    assert module.qkv.bias.grad[:24].any()
    assert module.qkv.bias.grad[48:].any()
    with torch.no_grad():
        module.qkv.bias[24:48] = 5.0
    assert torch.equal(module(x), before)


@pytest.mark.parametrize("logit_scale", [0.0, 50.0], ids=["1", "beyond-100"])
def test_logit_scale_is_bounded(logit_scale: float) -> None:
    module = made({"cosine": True})
    nn.init.constant_(module.logit_scale, logit_scale)
    x = torch.randn(1, 6, 8, 24)
    torch.testing.assert_close(module(x), rolled(module, x), rtol=1e-4, atol=1e-5)
    module(x).sum().backward()
    assert module.logit_scale.grad.any() == (logit_scale == 0.0)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("position", ["bias", "axial", "mixed", "bias+axial", "bias+mixed"])
@pytest.mark.parametrize("padding", ["mask", "attend"])
def test_nothing_is_kept_between_sizes(version: int, position: str, padding: str) -> None:
    block = SwinBlock(16, 2, 7, shift=3, version=version, position=position, padding=padding)
    fresh = copy.deepcopy(block)
    small, large = torch.randn(1, 7, 7, 16), torch.randn(1, 14, 15, 16)
    block(small)
    assert torch.equal(block(large), fresh(large))
    assert torch.equal(block(small), fresh(small))


@pytest.mark.parametrize("size", [(4, 4), (3, 2), (4, 9), (9, 4)], ids=lambda size: "x".join(map(str, size)))
def test_an_axis_of_one_window_is_not_shifted(size: tuple[int, int]) -> None:
    module = SwinAttention(16, 2, 4, shift=2, bias=RelativePositionBias(4, 2))
    nn.init.normal_(module.bias.table)
    expected = copy.deepcopy(module)
    expected.shift = tuple(0 if n <= 4 else 2 for n in size)
    x = torch.randn(1, *size, 16, requires_grad=True)
    out = module(x)
    assert torch.equal(out, expected(x))
    # Every token of the first window reaches the first one, and no other does where nothing is shifted.
    (grad,) = torch.autograd.grad(out[0, 0, 0].sum(), x)
    reach = [min(n, 4) if n <= 4 else 2 for n in size]
    assert torch.equal(grad[0].any(-1).nonzero(), torch.cartesian_prod(*map(torch.arange, reach)))


@pytest.mark.parametrize("version", [1, 2])
def test_block_equals_its_formula(version: int) -> None:
    block = SwinBlock(16, 2, (3, 4), shift=1, version=version)
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 5, 6, 16)
    if version == 1:
        y = x + rolled(block.attn, block.norm1(x))
        expected = y + block.mlp(block.norm2(y))
    else:
        y = x + block.norm1(rolled(block.attn, x))
        expected = y + block.norm2(block.mlp(y))
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [(4, 6), (5, 3), (1, 1)], ids=str)
def test_merging_joins_four_neighbours(version: int, size: tuple[int, int]) -> None:
    module = PatchMerging(3, version=version)
    nn.init.normal_(module.norm.weight)
    x = torch.randn(2, *size, 3)
    out = module(x)
    height, width = size
    assert out.shape == (2, (height + 1) // 2, (width + 1) // 2, 6)
    for y in range(out.shape[1]):
        for u in range(out.shape[2]):
            places = [(2 * y + dy, 2 * u + du) for du in (0, 1) for dy in (0, 1)]
            joined = torch.cat([x[:, a, b] if a < height and b < width else torch.zeros(2, 3) for a, b in places], 1)
            expected = module.reduction(module.norm(joined)) if version == 1 else module.norm(module.reduction(joined))
            torch.testing.assert_close(out[:, y, u], expected)


def test_stochastic_depth_drops_whole_samples_in_training() -> None:
    drop = StochasticDepth(0.25)
    x = torch.ones(4000, 3, 2)
    kept = drop(x)
    assert torch.equal(kept, kept[:, :1, :1].expand_as(kept))
    assert set(kept.unique().tolist()) <= {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.7 < kept.bool().float().mean() < 0.8
    assert drop.eval()(x) is x
    assert StochasticDepth(0.0)(x) is x
    block = SwinBlock(8, 2, 2, stochastic_depth=0.5)
    x = torch.randn(64, 2, 2, 8)
    unchanged = (block(x) == x).flatten(1).all(1).sum()
    assert 4 <= unchanged <= 32  # both parts of a block drop 16 of 64 on average


def test_starts_as_in_the_papers() -> None:
    block = SwinBlock(192, 6, 7, version=2)
    linears = [block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2]
    for linear in linears:
        assert 0.019 < linear.weight.std() < 0.021
        assert not linear.bias.any()
    assert 0.019 < PatchMerging(96).reduction.weight.std() < 0.021
    torch.testing.assert_close(block.attn.logit_scale.exp(), torch.full((6,), 10.0))
    for norm in (block.norm1, block.norm2):
        assert torch.equal(norm.weight, torch.ones(192))


def keys_of(version: int, position: str) -> list[str]:
    scale = ["attn.logit_scale"] if version == 2 else []
    biases = {
        1: ["attn.bias.table"],
        2: ["attn.bias.hidden_weight", "attn.bias.hidden_bias", "attn.bias.output_weight"],
    }
    bias = biases[version] if "bias" in position else []
    rope = ["attn.rope.frequencies"] if "mixed" in position else []
    names = ["norm1", *scale, *bias, *rope, "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    return [key for name in names for key in ([name] if "." in name and name not in LAYERS else layer(name))]


LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def layer(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("position", ["bias", "axial", "mixed", "bias+axial", "bias+mixed"])
def test_copies_compute_the_same_and_keys_stay(version: int, position: str) -> None:
    """Checkpoints outlive the code: these names stay."""
    block = SwinBlock(16, 2, (3, 2), shift=(1, 1), version=version, position=position)
    assert list(block.state_dict()) == keys_of(version, position)
    with torch.device("meta"):
        loaded = SwinBlock(16, 2, (3, 2), shift=(1, 1), version=version, position=position)
    loaded.to_empty(device="cpu").load_state_dict(block.state_dict(), strict=True)
    x = torch.randn(2, 7, 5, 16)
    for other in (loaded, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(block(x), other(x))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("position", ["bias", "bias+axial", "mixed"])
def test_half_precision_and_autocast_run(version: int, position: str) -> None:
    block = SwinBlock(16, 2, 4, shift=2, version=version, position=position, padding="attend")
    exact = copy.deepcopy(block).double()
    x = torch.randn(2, 9, 10, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=0.05, atol=0.05)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
    half = copy.deepcopy(block).bfloat16()
    out = half(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=0.05, atol=0.05)


COMPILED = {"v1-any-size": (1, "bias", True), "v2": (2, "bias", False), "mixed": (1, "mixed", False)}


@pytest.mark.parametrize(("version", "position", "dynamic"), COMPILED.values(), ids=COMPILED.keys())
def test_block_compiles_whole(version: int, position: str, dynamic: bool) -> None:
    torch.compiler.reset()
    block = SwinBlock(8, 2, 4, shift=2, version=version, position=position, padding="attend")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in ((9, 10), (13, 6)) if dynamic else ((9, 10),):
        x, weights = torch.randn(2, *size, 8), torch.randn(2, *size, 8)
        eager = gradients(block, block, x, weights)
        for name, value in gradients(block, compiled, x, weights).items():
            torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-5, msg=name)


def attention(*args, **options) -> SwinAttention:
    return SwinAttention(*args, **options)


ERRORS = {
    "dim": (lambda: attention(10, 3, 7), ValueError, "dim: expected a multiple of num_heads = 3, got 10"),
    "dim-type": (lambda: attention(9.0, 3, 7), TypeError, "dim: expected an int, got 9.0"),
    "heads": (lambda: attention(9, 0, 7), ValueError, "num_heads: expected a positive number, got 0"),
    "window": (lambda: attention(8, 2, 0), ValueError, "window_size: expected at least 1, got 0"),
    "shift": (lambda: attention(8, 2, (7, 3), shift=3), ValueError, r"shift: expected below window_size = \(7, 3\)"),
    "shift-sign": (lambda: attention(8, 2, 7, shift=-1), ValueError, "shift: expected at least 0, got -1"),
    "padding": (lambda: attention(8, 2, 7, padding="zeros"), ValueError, "padding: expected 'mask' or 'attend'"),
    "bias-type": (
        lambda: attention(8, 2, 7, bias=torch.zeros(2, 49, 49)),
        TypeError,
        "bias: expected a RelativePositionBias, a ContinuousPositionBias or None, got a tensor",
    ),
    "rope-type": (
        lambda: attention(8, 2, 7, rope=dk.rope_table_2d(4, 7, 7)),
        TypeError,
        "rope: expected an AxialRope2d, a MixedRope2d or None",
    ),
    "bias-window": (
        lambda: attention(8, 2, 7, bias=RelativePositionBias(6, 2)),
        ValueError,
        r"bias: expected one for window_size = \(7, 7\), got \(6, 6\)",
    ),
    "bias-heads": (
        lambda: attention(8, 2, 7, bias=RelativePositionBias(7, 4)),
        ValueError,
        "bias: expected one for num_heads = 2, got 4",
    ),
    "rope-dim": (
        lambda: attention(8, 2, 7, rope=AxialRope2d(8, 7)),
        ValueError,
        "rope: expected one for head_dim = 4, got 8",
    ),
    "x": (
        lambda: attention(8, 2, 7)(torch.zeros(1, 49, 8)),
        ValueError,
        r"x: expected shape \[B, H, W, 8\], got shape \[1, 49, 8\]",
    ),
    "x-dim": (lambda: attention(8, 2, 7)(torch.zeros(1, 7, 7, 9)), ValueError, r"x: expected shape \[B, H, W, 8\]"),
    "version": (lambda: SwinBlock(8, 2, 7, version=3), ValueError, "version: expected 1 or 2, got 3"),
    "position": (lambda: SwinBlock(8, 2, 7, position="ape"), ValueError, "position: expected one of bias, axial"),
    "ratio": (lambda: SwinBlock(8, 2, 7, mlp_ratio=0.1), ValueError, "mlp_ratio: expected at least 1 / dim"),
    "ratio-type": (lambda: SwinBlock(8, 2, 7, mlp_ratio="4"), TypeError, "mlp_ratio: expected a number, got '4'"),
    "depth": (
        lambda: SwinBlock(8, 2, 7, stochastic_depth=1.0),
        ValueError,
        "stochastic_depth: expected from 0 to below 1, got 1.0",
    ),
    "depth-type": (lambda: StochasticDepth("0"), TypeError, "p: expected a number, got '0'"),
    "pretrained": (
        lambda: SwinBlock(8, 2, 7, pretrained_window_size=6),
        ValueError,
        "pretrained_window_size: expected None unless version is 2 with a bias, got 6",
    ),
    "pretrained-rope": (
        lambda: SwinBlock(8, 2, 7, version=2, position="axial", pretrained_window_size=6),
        ValueError,
        "pretrained_window_size: expected None unless",
    ),
    "merge": (lambda: PatchMerging(0), ValueError, "dim: expected a positive number, got 0"),
    "merge-version": (lambda: PatchMerging(4, version=0), ValueError, "version: expected 1 or 2, got 0"),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
