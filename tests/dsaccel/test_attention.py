"""The options of WindowAttention, its weights from nn.MultiheadAttention, and activation checkpointing."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dsaccel.modules import RotaryEmbedding, TransformerBlock, WindowAttention
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

LEFT, RIGHT = 5, 2
WINDOW = (LEFT, RIGHT)


def hidden(length: int) -> Tensor:
    """True where a key is outside the window, as nn.MultiheadAttention has it."""
    return ~torch.ones(length, length, dtype=torch.bool).triu(-LEFT).tril(RIGHT)


def with_gradients(module: nn.Module, call, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    (out * weights).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def plain(module: WindowAttention, x: Tensor) -> Tensor:
    """The module without rotation in plain PyTorch, its cap and scale included."""
    rows = [heads * module.head_dim for heads in (module.num_heads, module.num_kv_heads, module.num_kv_heads)]
    q, k, v = (part.unflatten(2, (-1, module.head_dim)).transpose(1, 2) for part in module.qkv(x).split(rows, 2))
    group = module.num_heads // module.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (module.head_dim**-0.5 if module.scale is None else module.scale)
    if module.softcap is not None:
        scores = module.softcap * torch.tanh(scores / module.softcap)
    weights = scores.masked_fill(hidden(x.shape[1]), -torch.inf).softmax(-1)
    return module.proj((weights @ v).transpose(1, 2).flatten(2))


OPTIONS = {
    "head_dim": {"head_dim": 24, "num_kv_heads": 2},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "all": {"head_dim": 5, "num_kv_heads": 1, "scale": 0.9, "softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_plain_pytorch(options: dict) -> None:
    module = WindowAttention(32, 4, window=WINDOW, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, weights = torch.randn(2, 37, 32), torch.randn(2, 37, 32)
    result = with_gradients(module, module, x, weights)
    naive = with_gradients(module, lambda x: plain(module, x), x, weights)
    exact_module = copy.deepcopy(module).double()
    exact = with_gradients(exact_module, lambda x: plain(exact_module, x), x.double(), weights.double())
    for name in exact:
        assert_close_to_reference(result[name], exact[name], naive[name], name)


def test_head_dim_shapes_the_projections() -> None:
    module = WindowAttention(32, 4, 2, head_dim=24)
    assert module.qkv.weight.shape == ((4 + 2 + 2) * 24, 32)
    assert module.proj.weight.shape == (32, 4 * 24)
    assert "head_dim=24" in repr(module)
    # Without a multiple of num_heads, head_dim is all there is.
    assert WindowAttention(30, 4, head_dim=8)(torch.randn(1, 3, 30)).shape == (1, 3, 30)


def test_padded_batch_equals_each_sequence_alone() -> None:
    module = WindowAttention(32, 4, window=(5, 0), rope=RotaryEmbedding(8, 64))
    x = torch.randn(2, 20, 32)
    starts = torch.tensor([0, 7])
    positions = (torch.arange(20) - starts[:, None]).clamp_min(0)
    bias = torch.where(torch.arange(20) < starts[:, None], -torch.inf, 0.0)[:, None, None]
    out = module(x, positions=positions, bias=bias)
    torch.testing.assert_close(out[0], module(x[:1])[0])
    torch.testing.assert_close(out[1, 7:], module(x[1:, 7:])[0])


def test_timm_checkpoint_loads() -> None:
    """timm's vision transformers name these four tensors so, in these shapes and this order of rows."""
    state = {
        "qkv.weight": torch.randn(96, 32) / 6,
        "qkv.bias": torch.randn(96),
        "proj.weight": torch.randn(32, 32) / 6,
        "proj.bias": torch.randn(32),
    }
    module = WindowAttention(32, 4)
    module.load_state_dict(state, strict=True)
    x = torch.randn(2, 9, 32)
    qkv = F.linear(x, state["qkv.weight"], state["qkv.bias"]).reshape(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(2, 9, 32)
    torch.testing.assert_close(module(x), F.linear(mixed, state["proj.weight"], state["proj.bias"]))


def multihead(**options: object) -> nn.MultiheadAttention:
    mha = nn.MultiheadAttention(32, 4, **{"batch_first": True, **options})
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mha


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_from_multihead_attention(bias: bool) -> None:
    mha = multihead(bias=bias)
    mha.out_proj.weight.requires_grad_(False)
    module = WindowAttention.from_multihead_attention(mha.eval(), window=WINDOW)
    assert not module.training
    assert [p.requires_grad for p in module.proj.parameters()] == [p.requires_grad for p in mha.out_proj.parameters()]
    x = torch.randn(2, 37, 32)
    expected = mha(x, x, x, attn_mask=hidden(37), need_weights=False)[0]
    exact = copy.deepcopy(mha).double()(*[x.double()] * 3, attn_mask=hidden(37), need_weights=False)[0]
    assert_close_to_reference(module(x), exact, expected)
    # A copy: training one leaves the other.
    with torch.no_grad():
        module.qkv.weight.zero_()
    assert mha.in_proj_weight.abs().min() > 0


def test_from_multihead_attention_with_rope() -> None:
    rope = RotaryEmbedding(8, 64)
    module = WindowAttention.from_multihead_attention(multihead(), window=WINDOW, rope=rope)
    assert module.rope is rope
    other = WindowAttention(32, 4, window=WINDOW, rope=rope)
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 9, 32)
    assert torch.equal(module(x), other(x))


def test_from_multihead_attention_in_three_parts() -> None:
    mha = multihead()
    parts = [nn.Parameter(part.clone()) for part in mha.in_proj_weight.detach().chunk(3)]
    whole = WindowAttention.from_multihead_attention(mha, window=WINDOW)
    mha.in_proj_weight = None
    mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight = parts
    module = WindowAttention.from_multihead_attention(mha, window=WINDOW)
    x = torch.randn(2, 9, 32)
    assert torch.equal(module(x), whole(x))


def test_from_multihead_attention_without_its_dropout() -> None:
    mha = multihead(dropout=0.1)
    module = WindowAttention.from_multihead_attention(mha, window=(None, None), ignore_dropout=True)
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(module(x), mha.eval()(x, x, x, need_weights=False)[0])


UNFIT = {
    "bias_k": ({"add_bias_kv": True}, "add_bias_kv: expected False, got True"),
    "zero": ({"add_zero_attn": True}, "add_zero_attn: expected False, got True"),
    "kdim": ({"kdim": 16}, "kdim: expected embed_dim = 32, got 16"),
    "vdim": ({"vdim": 16}, "vdim: expected embed_dim = 32, got 16"),
    "dropout": ({"dropout": 0.1}, "dropout: expected 0 .*, got 0.1"),
    "batch_first": ({"batch_first": False}, "batch_first: expected True, .*, got False"),
}


@pytest.mark.parametrize(("options", "message"), UNFIT.values(), ids=UNFIT)
def test_from_multihead_attention_names_the_option(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowAttention.from_multihead_attention(multihead(**options), window=WINDOW)


ERRORS = {
    "head_dim": (lambda: WindowAttention(32, 4, head_dim=0), "head_dim: expected a positive number, got 0"),
    "rope": (
        lambda: WindowAttention(32, 4, head_dim=16, rope=RotaryEmbedding(8, 8)),
        "rope: expected one for heads of 16 components, got 8",
    ),
    "positions": (
        lambda: WindowAttention(32, 4)(torch.zeros(1, 3, 32), positions=torch.arange(3)),
        "positions: expected None without rope",
    ),
    "softcap": (
        lambda: WindowAttention(32, 4, softcap=-1.0)(torch.zeros(1, 3, 32)),
        "softcap: expected a number from 1e-30 to 1e30, or None, got -1.0",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state_dict"])
def test_copies_compute_the_same(copied: str) -> None:
    options = {"head_dim": 8, "scale": 0.3, "softcap": 2.0, "window": WINDOW, "rope": RotaryEmbedding(8, 64)}
    module = WindowAttention(30, 4, 2, **options)
    if copied == "deepcopy":
        other = copy.deepcopy(module)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        other = WindowAttention(30, 4, 2, **options)
        other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = torch.randn(2, 9, 30)
    assert torch.equal(module(x), other(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_activation_checkpointing_gives_the_same_bits(dtype: torch.dtype) -> None:
    block = TransformerBlock(32, 4, 2, WINDOW, RotaryEmbedding(8, 64)).to(dtype)
    x, weights = torch.randn(2, 37, 32, dtype=dtype), torch.randn(2, 37, 32, dtype=dtype)
    expected = with_gradients(block, block, x, weights)
    result = with_gradients(block, lambda x: checkpoint(block, x, use_reentrant=False), x, weights)
    for name in expected:
        assert torch.equal(result[name], expected[name]), name
