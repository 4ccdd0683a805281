"""The modules compute what the same thing in plain PyTorch does, and behave as modules do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules import GeluMLP, RotaryEmbedding, SlidingWindowLM, SwiGLU, TransformerBlock, WindowAttention
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_attention(module: WindowAttention, x: Tensor) -> Tensor:
    """The module in plain PyTorch: separate projections, rotation by complex numbers, SDPA with a mask."""
    batch, length, dim = x.shape
    rows = [heads * module.head_dim for heads in (module.num_heads, module.num_kv_heads, module.num_kv_heads)]
    biases = (None,) * 3 if module.qkv.bias is None else module.qkv.bias.split(rows)
    q, k, v = (
        F.linear(x, weight, bias).view(batch, length, -1, module.head_dim).transpose(1, 2)
        for weight, bias in zip(module.qkv.weight.split(rows), biases, strict=True)
    )
    if module.rope is not None:
        turn = torch.complex(module.rope.cos[:length], module.rope.sin[:length])
        q, k = rotate(q, turn), rotate(k, turn)
    group = module.num_heads // module.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    position = torch.arange(length)
    distance = position - position[:, None]
    left, right = (length if bound is None else bound for bound in module.window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= -left) & (distance <= right))
    return module.proj(out.transpose(1, 2).reshape(batch, length, dim))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    turned = torch.complex(a, b) * turn.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    return torch.cat((turned.real, turned.imag), -1)


def gradients(function: nn.Module, call, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    function.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    (out * weights).sum().backward()
    grads = {name: p.grad for name, p in function.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


CASES = {
    "causal-rope": {"num_heads": 4, "window": (15, 0), "rope": True},
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "window": (7, 9), "rope": True},
    "one-kv-head": {"num_heads": 4, "num_kv_heads": 1, "window": (None, 0)},
    "full-no-bias": {"num_heads": 3, "qkv_bias": False, "proj_bias": False, "rope": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("length", [1, 65])
def test_attention_and_gradients_equal_plain_pytorch(case: dict, length: int) -> None:
    dim = 24 * case["num_heads"]
    rope = RotaryEmbedding(24, 128) if case.get("rope") else None
    module = WindowAttention(dim, **{**case, "rope": rope})
    for p in module.parameters():
        nn.init.normal_(p, std=0.2)
    x, weights = torch.randn(2, length, dim), torch.randn(2, length, dim)
    result = gradients(module, module, x, weights)
    plain = gradients(module, lambda x: plain_attention(module, x), x, weights)
    exact_module = copy.deepcopy(module).double()
    exact = gradients(exact_module, lambda x: plain_attention(exact_module, x), x.double(), weights.double())
    for name in exact:
        assert_close_to_reference(result[name], exact[name], plain[name], name)


def test_attention_reads_views_of_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    module = WindowAttention(32, 4, 2)
    seen = []
    monkeypatch.setattr(module, "attend", lambda *qkv: seen.extend(qkv) or WindowAttention.attend(module, *qkv))
    out = module(torch.randn(2, 10, 32))
    assert len({t.untyped_storage().data_ptr() for t in seen}) == 1
    assert out.is_contiguous()


def test_block_and_mlps_equal_their_formulas() -> None:
    x = torch.randn(2, 9, 32)
    block = TransformerBlock(32, 4, window=(3, 0), mlp="gelu", bias=True)
    y = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), y + block.mlp(block.norm2(y)))
    gelu, swiglu = GeluMLP(32), SwiGLU(32)
    torch.testing.assert_close(gelu(x), gelu.fc2(F.gelu(gelu.fc1(x))))
    torch.testing.assert_close(swiglu(x), swiglu.down_proj(F.silu(swiglu.gate_proj(x)) * swiglu.up_proj(x)))
    assert SwiGLU(32).gate_proj.out_features == 96
    assert SwiGLU(128).gate_proj.out_features == 352


ATTENTION_KEYS = ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
BLOCK_KEYS = ["norm1.weight", "attn.qkv.weight", "attn.proj.weight", "norm2.weight"]
SWIGLU_KEYS = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]


def test_state_dict_keys() -> None:
    """Checkpoints outlive the code: these names stay."""
    rope = RotaryEmbedding(8, 16)
    assert list(rope.state_dict()) == []
    assert list(WindowAttention(32, 4, rope=rope).state_dict()) == ATTENTION_KEYS
    assert list(TransformerBlock(32, 4, rope=rope).state_dict()) == BLOCK_KEYS + SWIGLU_KEYS
    gelu = [f"mlp.{name}.{kind}" for name in ("fc1", "fc2") for kind in ("weight", "bias")]
    assert list(TransformerBlock(32, 4, mlp="gelu", bias=True).state_dict())[-4:] == gelu
    keys = [f"blocks.{i}.{key}" for i in range(2) for key in BLOCK_KEYS + SWIGLU_KEYS]
    assert list(SlidingWindowLM(50, 32, 2, 4).state_dict()) == ["embed.weight", *keys, "norm.weight"]


def test_qkv_rows_are_queries_then_keys_then_values() -> None:
    module = WindowAttention(16, 4, 2)
    assert module.qkv.weight.shape == (16 + 8 + 8, 16)
    # With window (0, 0) a token attends itself alone: what comes out is its value, of the key head of each query head.
    module.window = (0, 0)
    x = torch.randn(1, 5, 16)
    value = F.linear(x, module.qkv.weight[24:], module.qkv.bias[24:]).unflatten(2, (2, 4))
    torch.testing.assert_close(module(x), module.proj(value.repeat_interleave(2, 2).flatten(2)))


def test_weights_start_as_xavier_for_each_projection() -> None:
    module = WindowAttention(256, 4, 1)
    for part, rows in zip(module.qkv.weight.split([256, 64, 64]), (256, 64, 64), strict=True):
        assert part.std().item() == pytest.approx((2 / (256 + rows)) ** 0.5, rel=0.03)
    assert module.qkv.bias.eq(0).all()


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state_dict"])
def test_copies_compute_the_same(copied: str) -> None:
    model = SlidingWindowLM(50, 32, 2, 4, window=5)
    tokens = torch.randint(50, (2, 20))
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = SlidingWindowLM(50, 32, 2, 4, window=5)
        other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(model(tokens), other(tokens))
    assert other.blocks[0].attn.rope is other.blocks[1].attn.rope


def test_table_stays_float32_and_follows_the_device() -> None:
    model = SlidingWindowLM(50, 32, 2, 4, window=5)
    rope = model.blocks[0].attn.rope
    table = rope()
    for changed in (model.to(torch.bfloat16), model.half(), model.double(), model.float()):
        assert changed.embed.weight.dtype != table.cos.dtype or changed.embed.weight.dtype == torch.float32
        assert torch.equal(rope.cos, table.cos)
        assert rope.cos.dtype == torch.float32
    assert model.to(torch.bfloat16)(torch.zeros(1, 7, dtype=torch.long)).dtype == torch.bfloat16
    model.to("meta")
    assert rope.cos.is_meta
    assert "cos" in dict(rope.named_buffers())


def test_model_made_on_the_meta_device_gets_its_table() -> None:
    plain = SlidingWindowLM(50, 32, 2, 4, window=5)
    with torch.device("meta"):
        model = SlidingWindowLM(50, 32, 2, 4, window=5)
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(50, (1, 9))
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_attention_compiles_whole(compiler: str) -> None:
    module = WindowAttention(32, 4, 2, (5, 0), RotaryEmbedding(8, 64))
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    for length in (9, 17):
        x, weights = torch.randn(2, length, 32), torch.randn(2, length, 32)
        eager = gradients(module, module, x, weights)
        for name, value in gradients(module, compiled, x, weights).items():
            torch.testing.assert_close(value, eager[name], msg=name)


def test_language_model_compiles_whole() -> None:
    model = SlidingWindowLM(50, 16, 2, 2, window=5)
    tokens = torch.randint(50, (2, 12))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_language_model_sees_its_reach_and_no_further() -> None:
    model = SlidingWindowLM(50, 32, 3, 4, window=4).double()
    assert model.reach == 10
    table = model.embed.weight.detach()
    embedded = table[torch.randint(50, (1, 24))].requires_grad_()
    model.embed.forward = lambda tokens: embedded
    model(torch.zeros(1, 24, dtype=torch.long))[0, 20].sum().backward()
    touched = embedded.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert touched == list(range(11, 21))


def test_generate_needs_only_the_reach() -> None:
    model = SlidingWindowLM(50, 32, 2, 4, window=6, max_positions=64)
    tokens = torch.randint(50, (2, 40))
    torch.testing.assert_close(model(tokens)[:, -1], model(tokens[:, -model.reach :])[:, -1])
    out = model.generate(tokens, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(out[:, :40], tokens)
    assert out.shape == (2, 80)
    assert torch.equal(out, model.generate(tokens, 40, generator=torch.Generator().manual_seed(1)))
    likeliest = model.generate(tokens, 3, temperature=0)
    assert torch.equal(likeliest[:, 40], model(tokens)[:, -1].argmax(-1))
    assert torch.equal(likeliest, model.generate(tokens, 3, temperature=0))


def test_autocast_to_bfloat16_trains() -> None:
    model = SlidingWindowLM(50, 32, 2, 4, window=5)
    tokens = torch.randint(50, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


ERRORS = {
    "dim": (lambda: WindowAttention(30, 4), "dim: expected a positive multiple of num_heads = 4, got 30"),
    "kv-heads": (lambda: WindowAttention(32, 4, 3), "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
    "rope": (
        lambda: WindowAttention(32, 4, rope=RotaryEmbedding(16, 8)),
        "rope: expected one for heads of 8 components, got 16",
    ),
    "x": (lambda: WindowAttention(32, 4)(torch.zeros(3, 32)), r"x: expected shape \[B, N, 32\], got \[3, 32\]"),
    "mlp": (lambda: TransformerBlock(32, 4, mlp="relu"), "mlp: expected one of swiglu, gelu, got 'relu'"),
    "window": (lambda: SlidingWindowLM(9, 32, 1, 4, window=0), "window: expected a positive number, got 0"),
    "layers": (lambda: SlidingWindowLM(9, 32, 0, 4), "num_layers: expected a positive number, got 0"),
    "heads": (lambda: SlidingWindowLM(9, 32, 1, 0), "num_heads: expected a positive number, got 0"),
    "temperature": (
        lambda: SlidingWindowLM(9, 32, 1, 4).generate(torch.zeros(1, 1).long(), 1, temperature=-1),
        "temperature: expected a number not below 0, got -1",
    ),
    "no-token": (
        lambda: SlidingWindowLM(9, 32, 1, 4).generate(torch.zeros(1, 0).long(), 1),
        r"tokens: expected shape \[B, N\] with N at least 1, got \[1, 0\]",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_positions_beyond_the_table_are_an_index_error() -> None:
    with pytest.raises(IndexError, match="rope"):
        SlidingWindowLM(9, 32, 1, 4, max_positions=8)(torch.zeros(1, 9).long())
