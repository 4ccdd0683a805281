"""sdpa_as_window_attention gives what F.scaled_dot_product_attention gives, with the window as a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules import sdpa_as_window_attention
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.usefixtures("one_thread")

SDPA = F.scaled_dot_product_attention
LENGTHS = {"equal": (37, 37), "more-keys": (5, 37), "more-queries": (37, 5), "one-query": (1, 37), "one-key": (37, 1)}


def inputs(queries: int, keys: int, heads: int = 4, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, queries, 8), torch.randn(2, kv_heads, keys, 8), torch.randn(2, kv_heads, keys, 6)


def with_gradients(tensors: tuple[Tensor, ...], call) -> dict[str, Tensor]:
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    out = call(*tensors)
    torch.manual_seed(3)
    (out * torch.randn(out.shape).to(out.dtype)).sum().backward()
    return {"out": out.detach(), **{f"grad {i}": tensor.grad for i, tensor in enumerate(tensors)}}


def compare(tensors: tuple[Tensor, ...], call, oracle=None, window: tuple = (None, None)) -> None:
    """``call`` in the block against ``oracle`` (the same outside, unless told otherwise), gradients too."""
    oracle = call if oracle is None else oracle
    plain = with_gradients(tensors, oracle)
    exact = with_gradients(tuple(tensor.double() for tensor in tensors), oracle)
    with sdpa_as_window_attention(window=window) as swapped:
        result = with_gradients(tensors, call)
    assert swapped.calls == 1
    for name in exact:
        if not exact[name].any():
            # Who sees a single key has no gradient of scores: here two sums of 6 products near 1 cancel, to rounding.
            torch.testing.assert_close(result[name], torch.zeros_like(result[name]), rtol=0, atol=6 * 2**-22)
        else:
            assert_close_to_reference(result[name], exact[name], plain[name], name)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS.values(), ids=LENGTHS)
def test_without_a_window(queries: int, keys: int) -> None:
    compare(inputs(queries, keys), lambda q, k, v: F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("queries", "keys"), LENGTHS.values(), ids=LENGTHS)
def test_is_causal_counts_from_the_first_query_and_key(queries: int, keys: int) -> None:
    compare(inputs(queries, keys), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def seen(queries: int, keys: int, left: int, right: int, offset: int) -> Tensor:
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - offset
    return (distance >= -left) & (distance <= right)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "not-causal"])
def test_window(queries: int, keys: int, is_causal: bool) -> None:
    mask = seen(queries, keys, 6, 0 if is_causal else 3, 0 if is_causal else keys - queries)

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Independent of what torch makes of rows that see nothing.
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        alive = mask.any(-1, keepdim=True)
        return torch.where(alive, torch.where(alive, scores, 0).softmax(-1), 0) @ v

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    compare(inputs(queries, keys), call, oracle, window=(6, 3))


MASK_SHAPES = {"pairs": (5, 37), "keys": (1, 37), "batch": (2, 1, 1, 37), "heads": (4, 5, 37), "all": (2, 4, 5, 37)}


@pytest.mark.parametrize("shape", MASK_SHAPES.values(), ids=MASK_SHAPES)
@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "float"])
def test_attn_mask(shape: tuple[int, ...], boolean: bool) -> None:
    mask = torch.randn(shape)
    if boolean:
        mask = mask > 0
        mask[..., 0] = True

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if boolean else mask.to(q.dtype))

    compare(inputs(5, 37), call)


def test_attn_mask_in_addition_to_the_window() -> None:
    mask = torch.rand(37, 37) > 0.3
    mask |= torch.eye(37, dtype=torch.bool)
    both = mask & seen(37, 37, 6, 2, 0)
    compare(
        inputs(37, 37),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask),
        lambda q, k, v: SDPA(q, k, v, both),
        window=(6, 2),
    )


def test_gradient_of_a_float_mask() -> None:
    mask = torch.randn(2, 1, 5, 37)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    compare((*inputs(5, 37), mask), call)


def test_scale_and_grouped_heads() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=0.9, enable_gqa=True)

    compare(inputs(5, 37, heads=6, kv_heads=2), call)


DIMENSIONS = {
    "two": ((5, 8), (9, 8), (5, 9)),
    "three": ((6, 5, 8), (6, 9, 8), (6, 5, 9)),
    "three-broadcast": ((6, 5, 8), (1, 9, 8), (1, 5, 9)),
    "query-broadcast": ((2, 1, 5, 8), (2, 6, 9, 8), (5, 9)),
    "batch-broadcast": ((1, 6, 5, 8), (2, 6, 9, 8), (2, 1, 5, 9)),
    "five": ((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (3, 1, 5, 9)),
    "no-batch": ((0, 4, 5, 8), (0, 4, 9, 8), (5, 9)),
}


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize(("query", "key", "mask"), DIMENSIONS.values(), ids=DIMENSIONS)
def test_any_number_of_dimensions(query: tuple, key: tuple, mask: tuple, masked: bool) -> None:
    bias = torch.randn(mask)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype) if masked else None)

    # The batches of five dimensions and of broadcast ones are the affair of torch's plain formula.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        compare((torch.randn(query), torch.randn(key), torch.randn(key)), call)


def test_grouped_heads_of_five_dimensions() -> None:
    tensors = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 2, 9, 8), torch.randn(2, 3, 2, 9, 8)
    with sdpa_as_window_attention():
        result = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    for i in range(3):
        expected = F.scaled_dot_product_attention(*(tensor[:, i] for tensor in tensors), enable_gqa=True)
        torch.testing.assert_close(result[:, i], expected)


def test_row_that_sees_nothing_is_zero() -> None:
    q, k, v = inputs(5, 9)
    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[2] = False
    with sdpa_as_window_attention():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert out[:, :, 2].eq(0).all()
    torch.testing.assert_close(out[:, :, 3], F.scaled_dot_product_attention(q, k, v)[:, :, 3])


def test_filter_and_count() -> None:
    q, k, v = inputs(5, 37)
    with sdpa_as_window_attention(window=(0, 0), filter=lambda q, k, v: q.shape[-2] == k.shape[-2]) as swapped:
        crossed = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        assert swapped.calls == 0
        alone = F.scaled_dot_product_attention(k, k, v)
    assert swapped.calls == 1
    assert torch.equal(crossed, F.scaled_dot_product_attention(q, k, v, scale=0.3))
    torch.testing.assert_close(alone, v)
    # Outside the block all is as before.
    assert not torch.equal(F.scaled_dot_product_attention(k, k, v), alone)
    assert swapped.calls == 1


def test_name_bound_before_is_replaced_too() -> None:
    q, k, v = inputs(9, 9)
    with sdpa_as_window_attention(window=(0, 0)):
        torch.testing.assert_close(SDPA(q, k, v), v)


def test_backend_is_handed_on() -> None:
    q, k, v = inputs(9, 9)
    with sdpa_as_window_attention(backend="reference"):
        out = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q.double(), k.double(), v.double()))
    with sdpa_as_window_attention(backend="nonsense"), pytest.raises(ValueError, match="backend"):
        F.scaled_dot_product_attention(q, k, v)


def test_autocast() -> None:
    q, k, v = inputs(9, 9)
    with torch.autocast("cpu", torch.bfloat16), sdpa_as_window_attention():
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16


class SelfAttention(nn.Module):
    """As in many a model: fused projection, causal SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        # Not unflatten, which torch 2.13 cannot trace under any mode.
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(x.shape))


def test_model_in_a_block_compiled_and_not() -> None:
    model, x = SelfAttention(), torch.randn(2, 37, 32)
    with sdpa_as_window_attention(window=(5, None)):
        out = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, out)
    torch.testing.assert_close(out[:, -1], model(x[:, -6:])[:, -1])


q, k, v = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8)
ERRORS = {
    "dropout": ((q, q, q), {"dropout_p": 0.1}, "dropout_p: expected 0 .*, got 0.1"),
    "both": ((q, q, q, torch.ones(3, 3)), {"is_causal": True}, "attn_mask: expected None with is_causal, got a tensor"),
    "heads": ((q, k, v), {}, "expected batches and, without enable_gqa, heads that broadcast, got .*2, 4, 3, 8"),
    "batch": ((q, k[:0], v[:0]), {"enable_gqa": True}, "query, key, value: expected batches that broadcast, got"),
    "dimensions": ((q, k[0, 0, 0], v), {}, r"key: expected at least 2 dimensions, got shape \[8\]"),
    "group-dimensions": ((q[0, 0], k, v), {"enable_gqa": True}, "query: expected at least 3 dimensions"),
    "group": ((q[:, :3], k, v), {"enable_gqa": True}, "k: expected a number of heads that divides the 3 of q, got 2"),
}


@pytest.mark.parametrize(("tensors", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(tensors: tuple, options: dict, message: str) -> None:
    with sdpa_as_window_attention(), pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("mode", ["train", "eval", "encoder"])
def test_multihead_attention_is_out_of_reach(mode: str) -> None:
    """Its call of SDPA, or its fused path, is not seen; that must not pass in silence."""
    x = torch.randn(2, 5, 32)
    module = nn.MultiheadAttention(32, 4, batch_first=True).train(mode == "train")
    if mode == "encoder":
        module = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    with torch.no_grad(), sdpa_as_window_attention(), pytest.raises(RuntimeError, match="replace_attention"):
        module(x) if mode == "encoder" else module(x, x, x, need_weights=False)
