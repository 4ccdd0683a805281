"""WindowMultiheadAttention is nn.MultiheadAttention with the equivalent mask, alone and inside torch's transformers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dsaccel.modules import RotaryEmbedding, WindowAttention, WindowMultiheadAttention, replace_attention
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = (5, 2)
LENGTH = 37


def hidden(left: int = WINDOW[0], right: int = WINDOW[1], length: int = LENGTH) -> Tensor:
    """True where a key is outside the window."""
    return ~torch.ones(length, length, dtype=torch.bool).triu(-left).tril(right)


def multihead(**options: object) -> nn.MultiheadAttention:
    mha = nn.MultiheadAttention(32, 4, **{"batch_first": True, **options})
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mha


def gradients(module: nn.Module, x: Tensor, weights: Tensor, kept: Tensor | None = None, **masks: object) -> dict:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x, x, x, need_weights=False, **masks)[0]
    out = out if kept is None else out[kept]
    (out * weights).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def padding(floating: bool = False) -> Tensor:
    """The second sequence ends early, the third begins late; every query still sees a token, or torch gives NaN."""
    mask = torch.zeros(3, LENGTH, dtype=torch.bool)
    mask[1, 33:] = True
    mask[2, :2] = True
    return torch.zeros(3, LENGTH).masked_fill(mask, -torch.inf) if floating else mask


def each_head() -> Tensor:
    """A mask for each sequence and head, which lets every query see itself."""
    return (torch.rand(12, LENGTH, LENGTH) > 0.7) & ~torch.eye(LENGTH, dtype=torch.bool)


# What the call gets, and what nn.MultiheadAttention gets in addition to the window.
MASKS = {
    "none": lambda: ({}, {"attn_mask": hidden()}),
    "padding": lambda: ({"key_padding_mask": padding()}, {"attn_mask": hidden(), "key_padding_mask": padding()}),
    "added-padding": lambda: (
        {"key_padding_mask": padding(floating=True)},
        {"attn_mask": hidden(), "key_padding_mask": padding()},
    ),
    "mask": lambda: ({"attn_mask": hidden(9, 0)}, {"attn_mask": hidden(5, 0)}),
    "each-head": lambda: (lambda mask: ({"attn_mask": mask}, {"attn_mask": mask | hidden()}))(each_head()),
    "added-mask": lambda: (lambda mask: ({"attn_mask": mask}, {"attn_mask": mask.masked_fill(hidden(), -torch.inf)}))(
        torch.randn(LENGTH, LENGTH)
    ),
    "mask-and-padding": lambda: (
        {"attn_mask": hidden(9, 0), "key_padding_mask": padding()},
        {"attn_mask": hidden(5, 0), "key_padding_mask": padding()},
    ),
    "causal": lambda: ({"is_causal": True}, {"attn_mask": hidden(5, 0)}),
    "causal-with-its-mask": lambda: (
        {"is_causal": True, "attn_mask": hidden(LENGTH, 0)},
        {"attn_mask": hidden(5, 0)},
    ),
}


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_equals_multihead_attention(make, batch_first: bool) -> None:
    mha = multihead(batch_first=batch_first)
    module = WindowMultiheadAttention.from_multihead_attention(copy.deepcopy(mha), window=WINDOW)
    given, equivalent = make()
    kept = ~padding() if "key_padding_mask" in given else torch.ones(3, LENGTH, dtype=torch.bool)
    x = torch.randn(3, LENGTH, 32)
    if not batch_first:
        x, kept = x.transpose(0, 1), kept.T
    weights = torch.randn(int(kept.sum()), 32)
    result = gradients(module, x, weights, kept, **given)
    naive = gradients(mha, x, weights, kept, **equivalent)
    equivalent = {name: m.double() if m.is_floating_point() else m for name, m in equivalent.items()}
    exact = gradients(copy.deepcopy(mha).double(), x.double(), weights.double(), kept, **equivalent)
    for name in exact:
        assert_close_to_reference(result[name], exact[name], naive[name], name)


def test_value_of_its_own() -> None:
    """As in DETR, where positions are added to queries and keys alone."""
    mha = multihead()
    module = WindowMultiheadAttention.from_multihead_attention(mha, window=WINDOW)
    x, value = torch.randn(3, LENGTH, 32), torch.randn(3, LENGTH, 32)
    expected = mha(x, x, value, attn_mask=hidden(), need_weights=False)[0]
    torch.testing.assert_close(module(x, x, value)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
def test_single_sequence(batch_first: bool) -> None:
    mha = multihead(batch_first=batch_first)
    module = WindowMultiheadAttention.from_multihead_attention(mha, window=WINDOW)
    x, mask = torch.randn(LENGTH, 32), padding()[1]
    expected = mha(x, x, x, key_padding_mask=mask, attn_mask=hidden(), need_weights=False)[0]
    result, weights = module(x, x, x, key_padding_mask=mask)
    assert weights is None
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_rope_equals_window_attention() -> None:
    mha, rope = multihead(), RotaryEmbedding(8, 64)
    module = WindowMultiheadAttention.from_multihead_attention(mha, window=WINDOW, rope=rope)
    other = WindowAttention.from_multihead_attention(mha, window=WINDOW, rope=rope)
    x = torch.randn(3, LENGTH, 32)
    assert torch.equal(module(x, x, x)[0], other(x))


def test_query_that_sees_nothing() -> None:
    module = WindowMultiheadAttention.from_multihead_attention(multihead(), window=(0, 0))
    x = torch.randn(1, 4, 32)
    out = module(x, x, x, key_padding_mask=torch.tensor([[False, True, False, False]]))[0]
    assert torch.equal(out[0, 1], module.out_proj.bias)


def test_parameters_are_those_of_multihead_attention() -> None:
    mha = multihead().eval()
    module = WindowMultiheadAttention.from_multihead_attention(mha, window=WINDOW)
    assert not module.training
    pairs = zip(mha.named_parameters(), module.named_parameters(), strict=True)
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    fresh = WindowMultiheadAttention(32, 4, window=WINDOW, batch_first=True)
    fresh.load_state_dict(mha.state_dict(), strict=True)
    x = torch.randn(1, 9, 32)
    assert torch.equal(fresh(x, x, x)[0], module(x, x, x)[0])
    for one in (module, other := multihead()):
        torch.manual_seed(1)
        one._reset_parameters()
    assert torch.equal(module.in_proj_weight, other.in_proj_weight)
    assert module.in_proj_bias.eq(0).all()


def test_dtype_and_device_of_new_parameters() -> None:
    module = WindowMultiheadAttention(32, 4, bias=False, device="meta", dtype=torch.bfloat16)
    assert module.in_proj_weight.is_meta
    assert module.in_proj_weight.dtype == torch.bfloat16
    assert module.in_proj_bias is None


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state_dict"])
def test_copies_compute_the_same(copied: str) -> None:
    rope = RotaryEmbedding(8, 64)
    module = WindowMultiheadAttention(32, 4, window=WINDOW, rope=rope)
    if copied == "deepcopy":
        other = copy.deepcopy(module)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        other = WindowMultiheadAttention(32, 4, window=WINDOW, rope=rope)
        other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = torch.randn(9, 2, 32)
    assert torch.equal(module(x, x, x)[0], other(x, x, x)[0])


def test_compiles_whole_and_checkpoints() -> None:
    module = WindowMultiheadAttention(32, 4, window=WINDOW)
    x, weights = torch.randn(9, 2, 32), torch.randn(9, 2, 32)
    expected = gradients(module, x, weights)
    compiled = gradients(torch.compile(module, fullgraph=True, backend="aot_eager"), x, weights)
    module.zero_grad()
    y = x.clone().requires_grad_()
    (checkpoint(lambda x: module(x, x, x)[0], y, use_reentrant=False) * weights).sum().backward()
    assert torch.equal(y.grad, expected["x"])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name])
        torch.testing.assert_close(compiled["_orig_mod." + name], expected[name])


x, y = torch.zeros(2, 3, 32), torch.zeros(2, 3, 32)
ERRORS = {
    "cross": ((x, y, y), {}, r"key: expected query itself .*, got another tensor \(cross-attention\)"),
    "value": ((x, x, y[:, :2]), {}, r"value: expected the shape of query, \[2, 3, 32\], got \[2, 2, 32\]"),
    "weights": ((x, x, x), {"need_weights": True}, "need_weights: expected False .*, got True"),
    "width": ((y[..., :8],) * 3, {}, r"query: expected two or three dimensions, the last of 32, got \[2, 3, 8\]"),
    "padding": (
        (x, x, x),
        {"key_padding_mask": torch.zeros(3, 2).bool()},
        r"key_padding_mask: expected shape \[B, N\] = \[2, 3\], got \[3, 2\]",
    ),
    "mask": (
        (x, x, x),
        {"attn_mask": torch.zeros(2, 3, 3).bool()},
        r"attn_mask: expected shape \[N, N\] or \[B \* H, N, N\], \[3, 3\] or \[8, 3, 3\], got \[2, 3, 3\]",
    ),
    "mask-dtype": (
        (x, x, x),
        {"attn_mask": torch.zeros(3, 3).int()},
        "attn_mask: expected dtype bool or a floating point one, got torch.int32",
    ),
    "nested": ((torch.nested.nested_tensor([x[0], x[1, :2]]),) * 3, {}, "query: expected a dense tensor, got a nested"),
}


@pytest.mark.parametrize(("tensors", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(tensors: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowMultiheadAttention(32, 4, batch_first=True)(*tensors, **options)


def test_rope_for_other_heads_is_an_error() -> None:
    with pytest.raises(ValueError, match="rope: expected one for heads of 8 components, got 16"):
        WindowMultiheadAttention(32, 4, rope=RotaryEmbedding(16, 8))


LAYERS = {
    "plain": {},
    "norm-first": {"norm_first": True},
    "no-bias": {"bias": False},
    "length-first": {"batch_first": False},
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("mode", ["train", "eval", "eval-no-grad", "inference"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_transformer_encoder(options: dict, mode: str) -> None:
    """torch's layers have a fused path for inference that would take the weights past the module."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, **{"batch_first": True, **options})
    plain = nn.TransformerEncoder(layer, 2).train(mode == "train")
    model = copy.deepcopy(plain)
    report = replace_attention(model, window=WINDOW)
    assert report.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert report.kept == {}
    x = torch.randn(3, LENGTH, 32)
    x = x if options.get("batch_first", True) else x.transpose(0, 1)
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode in ("train", "eval")):
        for kept in (torch.ones(3, LENGTH).bool(), ~padding()):
            masks = {} if kept.all() else {"src_key_padding_mask": ~kept}
            result, expected = model(x, **masks), plain(x, mask=hidden(), **masks)
            kept = kept if options.get("batch_first", True) else kept.T
            torch.testing.assert_close(result[kept], expected[kept], rtol=1e-5, atol=1e-5)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for flags in ({"mask": causal}, {"mask": causal, "is_causal": True}):
            torch.testing.assert_close(model(x, **flags), plain(x, mask=hidden(5, 0)), rtol=1e-5, atol=1e-5)


def test_transformer_encoder_is_not_bypassed() -> None:
    """One layer alone, where only it decides on the fused path, and an encoder made of a replaced layer."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True).eval()
    report = replace_attention(layer, window=(0, 0))
    assert report.replaced == ("self_attn",)
    x = torch.randn(1, 5, 32)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        encoder = nn.TransformerEncoder(layer, 1).eval()
    with torch.no_grad():
        for model in (layer, encoder):
            # A token that sees itself alone does not notice that others are gone.
            torch.testing.assert_close(model(x)[:, 2:3], model(x[:, 2:3]))
        encoder(x, src_key_padding_mask=torch.tensor([[False] * 4 + [True]]))


def test_transformer_encoder_gets_no_nested_tensors() -> None:
    """An encoder makes them in inference, of sequences that end early, by what it saw when it was made."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).eval()
    model = copy.deepcopy(plain)
    assert model.use_nested_tensor
    replace_attention(model, window=WINDOW)
    x = torch.randn(2, LENGTH, 32)
    mask = padding()[:2]
    with torch.no_grad():
        result, expected = model(x, src_key_padding_mask=mask), plain(x, hidden(), mask)
    torch.testing.assert_close(result[~mask], expected[~mask], rtol=1e-5, atol=1e-5)


def test_transformer_decoder_keeps_its_cross_attention() -> None:
    layer = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    plain = nn.TransformerDecoder(layer, 2)
    model = copy.deepcopy(plain)
    report = replace_attention(model, window=(5, 0))
    assert report.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert report.kept == {f"layers.{i}.multihead_attn": "it is cross-attention" for i in range(2)}
    x, memory = torch.randn(2, LENGTH, 32), torch.randn(2, 11, 32)
    expected = plain(x, memory, tgt_mask=hidden(5, 0))
    torch.testing.assert_close(model(x, memory), expected, rtol=1e-5, atol=1e-5)


class Mixed(nn.Module):
    """A module of each kind that can turn up."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = multihead()
        self.shared = nn.ModuleList([self.plain])
        self.random = multihead(dropout=0.1)
        self.zero = multihead(add_zero_attn=True)
        self.hooked = multihead()
        self.hooked.register_forward_hook(lambda *_: None)
        self.quantizable = type("Quantizable", (nn.MultiheadAttention,), {})(32, 4)
        self.windowed = WindowMultiheadAttention(32, 4)
        self.unwanted = multihead()


def test_report_names_every_module() -> None:
    model = Mixed()
    parameters = dict(model.named_parameters())
    report = replace_attention(model, window=WINDOW, filter=lambda name, module: name != "unwanted")
    assert report.replaced == ("plain", "shared.0")
    assert report.kept == {
        "random": "dropout: expected 0 (ignore_dropout=True leaves it out), got 0.1",
        "zero": "add_zero_attn: expected False, got True",
        "hooked": "it has hooks, which would be lost",
        "quantizable": "it is a Quantizable, which may compute something else",
        "windowed": "it is windowed already",
        "unwanted": "the filter says so",
    }
    assert str(report).splitlines()[:3] == ["2 replaced, 6 kept", "  replaced plain", "  replaced shared.0"]
    assert "  kept hooked: it has hooks, which would be lost" in str(report)
    assert type(model.plain) is WindowMultiheadAttention
    assert model.plain is model.shared[0]
    assert type(model.zero) is nn.MultiheadAttention
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())


def test_ignore_dropout() -> None:
    model = Mixed()
    assert "random" in replace_attention(model, window=WINDOW, ignore_dropout=True).replaced
    x = torch.randn(1, 9, 32)
    assert torch.equal(model.random(x, x, x)[0], model.random(x, x, x)[0])


def test_model_that_is_an_attention_itself() -> None:
    report = replace_attention(multihead(), window=WINDOW)
    assert report.replaced == ()
    assert "it has no parent" in report.kept[""]
    assert "kept (the model itself)" in str(report)
    assert str(replace_attention(nn.Linear(2, 2), window=WINDOW)) == "0 replaced, 0 kept"


def test_error_leaves_the_model_as_it_was() -> None:
    model = nn.ModuleList([multihead(), nn.MultiheadAttention(64, 4)])
    with pytest.raises(ValueError, match="rope: expected one for heads of 16 components, got 8"):
        replace_attention(model, window=WINDOW, rope=RotaryEmbedding(8, 16))
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2


def test_replaced_model_trains_with_the_optimizer_it_had() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replace_attention(model, window=WINDOW, rope=RotaryEmbedding(8, 64))
    data, target = torch.randn(4, 9, 32), torch.randn(4, 9, 32)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(F.mse_loss(model(data), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
