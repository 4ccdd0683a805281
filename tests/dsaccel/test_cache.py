"""WindowCache: what comes out of it is what one full call gives, whatever came in and in which portions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import dskernels as dk
from dsaccel.modules import RotaryEmbedding, SlidingWindowLM, TransformerBlock, WindowAttention, WindowCache

HEADS, KEY_HEADS, DIM, LENGTH = 4, 2, 16, 60
TABLE = dk.rope_table(DIM, LENGTH)


def sequence(batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(batch, h, LENGTH, DIM) for h in (HEADS, KEY_HEADS, KEY_HEADS))


def full(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int], rope: dk.RopeTable | None = TABLE) -> Tensor:
    return dk.window_attention(q, k, v, window=window, rope=rope)


@pytest.mark.parametrize("rope", [None, TABLE], ids=["plain", "rope"])
@pytest.mark.parametrize("window", [(9, 0), (0, 0), (None, 0), (30, -2), (-2, -1)], ids=str)
def test_portions_equal_one_full_call(window: tuple[int | None, int], rope: dk.RopeTable | None) -> None:
    q, k, v = sequence()
    right = full(q, k, v, window, rope)
    cache = WindowCache(3, KEY_HEADS, DIM, window=window, max_tokens=LENGTH, new_tokens=4, rope=rope)
    begin = 0
    for portion in (1, 3, 4, 2, 4, 4, 1, 1, 4, 3, 4, 4, 4, 4, 4, 4, 4, 4, 1):
        tokens = slice(begin, begin + portion)
        cache.append(k[:, :, tokens], v[:, :, tokens])
        torch.testing.assert_close(cache.attend(q[:, :, tokens]), right[:, :, tokens], rtol=1e-5, atol=1e-5)
        begin += portion
    assert begin == LENGTH
    assert cache.lengths.tolist() == [LENGTH] * 3


@pytest.mark.parametrize("prompt", [1, 9, 10, 11, 37])
def test_long_prompts_leave_the_last_tokens(prompt: int) -> None:
    q, k, v = sequence()
    cache = WindowCache(3, KEY_HEADS, DIM, window=(9, 0), rope=TABLE)
    assert cache.slots == 10
    cache.append(k[:, :, :prompt], v[:, :, :prompt])
    out = cache.attend(q[:, :, prompt - 1 : prompt])
    torch.testing.assert_close(out, full(q, k, v, (9, 0))[:, :, prompt - 1 : prompt], rtol=1e-5, atol=1e-5)


def test_sequences_of_different_lengths() -> None:
    q, k, v = sequence()
    right, counts = full(q, k, v, (9, 0)), torch.tensor([0, 12, 25])
    cache = WindowCache(3, KEY_HEADS, DIM, window=(9, 0), max_tokens=30, rope=TABLE)
    # NaN is what padding may hold.
    padding = (torch.arange(25) >= counts[:, None])[:, None, :, None]
    cache.append(*(x[:, :, :25].masked_fill(padding, torch.nan) for x in (k, v)), counts)
    for step in range(5):
        rows, places = torch.arange(3), counts + step
        new_q, new_k, new_v = (x[rows, :, places].unsqueeze(2) for x in (q, k, v))
        cache.append(new_k, new_v)
        expected = right[rows, :, places].unsqueeze(2)
        torch.testing.assert_close(cache.attend(new_q), expected, rtol=1e-5, atol=1e-5)
    # The longest is full; the others may go on without it.
    with pytest.raises(IndexError, match="k: expected sequences of up to 30 tokens, got 31"):
        cache.append(new_k, new_v)
    cache.append(new_k, new_v, torch.tensor([1, 1, 0]))
    assert cache.lengths.tolist() == [6, 18, 30]


def test_reset_forgets() -> None:
    q, k, v = sequence()
    cache = WindowCache(3, KEY_HEADS, DIM, window=(9, 0), rope=TABLE)
    cache.append(k[:, :, :20] + 5, v[:, :, :20] + 5)
    cache.reset()
    assert cache.is_empty
    cache.append(k[:, :, :5], v[:, :, :5])
    cache.reset(torch.tensor([1]))
    assert cache.lengths.tolist() == [5, 0, 5]
    cache.append(k[:, :, 5:6], v[:, :, 5:6])
    out = cache.attend(q[:, :, 5:6])
    torch.testing.assert_close(out[::2], full(q, k, v, (9, 0))[::2, :, 5:6], rtol=1e-5, atol=1e-5)
    # The new sequence consists of this one token.
    torch.testing.assert_close(out[1, :, 0], v[1, :, 5].repeat_interleave(2, 0), rtol=1e-5, atol=1e-5)


def test_reorder_copies_sequences() -> None:
    q, k, v = sequence()
    cache = WindowCache(3, KEY_HEADS, DIM, window=(9, 0), rope=TABLE)
    cache.append(k[:, :, :20], v[:, :, :20], torch.tensor([20, 18, 3]))
    beams = torch.tensor([1, 1, 0, 2])
    cache.reorder(beams)
    assert cache.lengths.tolist() == [18, 18, 20, 3]
    places = cache.lengths
    new = (x[beams, :, places].unsqueeze(2) for x in (k, v))
    cache.append(*new)
    out = cache.attend(q[beams, :, places].unsqueeze(2))
    expected = full(q, k, v, (9, 0))[beams, :, places].unsqueeze(2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_cache_under_float32_queries(dtype: torch.dtype) -> None:
    q, k, v = sequence()
    caches = [WindowCache(3, KEY_HEADS, DIM, window=(9, 0), rope=TABLE, dtype=x) for x in (torch.float32, dtype)]
    assert caches[0].nbytes == 2 * caches[1].nbytes
    for cache in caches:
        cache.append(k[:, :, :30], v[:, :, :30])
    one, other = (cache.attend(q[:, :, 29:30]) for cache in caches)
    assert other.dtype == torch.float32
    # Keys and values are rounded to half a unit in the last place; a score sums 16 of such errors.
    torch.testing.assert_close(other, one, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert not torch.equal(one, other)


def test_deepcopy_is_independent() -> None:
    q, k, v = sequence()
    cache = WindowCache(3, KEY_HEADS, DIM, window=(9, 0), rope=TABLE)
    cache.append(k[:, :, :7], v[:, :, :7])
    other = copy.deepcopy(cache)
    other.append(k[:, :, 7:8], v[:, :, 7:8])
    assert cache.lengths.tolist() == [7, 7, 7]
    torch.testing.assert_close(cache.attend(q[:, :, 6:7]), full(q, k, v, (9, 0))[:, :, 6:7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rope", [False, True])
def test_modules_with_cache_equal_those_without(rope: bool) -> None:
    embedding = RotaryEmbedding(8, 50) if rope else None
    block = TransformerBlock(32, 4, 2, (6, 0), embedding)
    x = torch.randn(2, 40, 32)
    with torch.no_grad():
        right = block(x)
        cache = block.attn.new_cache(2, new_tokens=3)
        parts = [block(x[:, begin:end], cache) for begin, end in ((0, 15), (15, 16), (16, 19), (19, 20), (20, 22))]
    torch.testing.assert_close(torch.cat(parts, 1), right[:, :22], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_positions", [12, 20, 64])
def test_generation_equals_computing_all_anew(max_positions: int) -> None:
    """Also beyond the table, where the caches start again."""
    torch.manual_seed(3)
    model = SlidingWindowLM(50, 32, 2, 4, 2, window=5, max_positions=max_positions).double()
    tokens = torch.randint(50, (2, 7))
    with dk.use_backend("reference"):
        out = model.generate(tokens, 40, temperature=0)
        for end in range(7, 47):
            logits = model(out[:, max(0, end - model.reach) : end])[:, -1]
            assert torch.equal(logits.argmax(-1), out[:, end])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads: expected a positive number, got 0"),
        ({"head_dim": 0}, "head_dim: expected a positive number, got 0"),
        ({"value_dim": -1}, "value_dim: expected a positive number, got -1"),
        ({"new_tokens": 0}, "new_tokens: expected a positive number, got 0"),
        ({"max_tokens": 0}, "max_tokens: expected a positive number, got 0"),
        ({"window": (3, 1)}, "window: expected a causal one"),
        ({"window": (3, None)}, "window: expected a causal one"),
        ({"window": (None, 0)}, "max_tokens: expected a number where neither window nor rope has an end, got None"),
        ({"batch": -1}, "batch: expected a number not below 0, got -1"),
        ({"dtype": torch.int8}, "dtype: expected float32, bfloat16, float16 or float64, got torch.int8"),
        ({"rope": TABLE}, "rope: expected rotary_dim up to head_dim = 8, got 16"),
    ],
    ids=str,
)
def test_wrong_sizes(options: dict, message: str) -> None:
    arguments = {"batch": 2, "num_kv_heads": 2, "head_dim": 8, "window": (3, 0), **options}
    with pytest.raises(ValueError, match=message):
        WindowCache(**arguments)


def test_wrong_tensors() -> None:
    cache = WindowCache(2, 3, 8, window=(4, 0), value_dim=6, new_tokens=2, rope=dk.rope_table(8, 9))
    k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 6)
    for arguments, message in (
        ((k[0], v), r"k: expected floating point of shape \[2, 3, 0, 8\], got torch.float32 of \[3, 4, 8\]"),
        ((k[:, :2], v), r"k: expected floating point of shape \[2, 3, 4, 8\], got torch.float32 of \[2, 2, 4, 8\]"),
        ((k, v[:, :, :3]), r"v: expected floating point of shape \[2, 3, 4, 6\], got torch.float32 of \[2, 3, 3, 6\]"),
        ((k.long(), v), "k: expected floating point of shape .* got torch.int64"),
        ((k, None), "v: expected floating point of shape .* got None"),
        ((k, v, torch.ones(2)), r"counts: expected int64 of shape \[2\], got torch.float32 of \[2\]"),
        ((k, v, [1, 2]), r"counts: expected int64 of shape \[2\], got \[1, 2\]"),
        ((k, v, torch.tensor([5, 0])), r"counts: expected 0 to 4, the number of tokens that came, got \[5, 0\]"),
        ((k, v, torch.tensor([-1, 0])), r"counts: expected 0 to 4, the number of tokens that came, got \[-1, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(*arguments)
    cache.append(k, v)
    with pytest.raises(ValueError, match="q: expected up to new_tokens = 2 queries, got 3"):
        cache.attend(torch.randn(2, 6, 3, 8))
    cache.append(k, v)
    with pytest.raises(IndexError, match="k: expected sequences of up to 9 tokens, got 12"):
        cache.append(k, v)
    assert cache.lengths.tolist() == [8, 8]
    for rows in (torch.tensor([True, False]), torch.tensor([[0]]), [0]):
        with pytest.raises(ValueError, match=r"rows: expected int64 of shape \[n\]"):
            cache.reset(rows)
        with pytest.raises(ValueError, match=r"rows: expected int64 of shape \[n\]"):
            cache.reorder(rows)


def test_a_window_that_looks_ahead_has_no_cache() -> None:
    with pytest.raises(ValueError, match="window: expected a causal one"):
        WindowAttention(32, 4, window=(3, 3)).new_cache(2)


@pytest.mark.parametrize("argument", ["positions", "bias"])
def test_a_cache_has_positions_of_its_own(argument: str) -> None:
    module = WindowAttention(32, 4, window=(3, 0))
    with pytest.raises(ValueError, match=f"{argument}: expected None with a cache"):
        module(torch.randn(1, 2, 32), module.new_cache(1), **{argument: torch.arange(2)})


def test_scale_and_softcap_of_the_module_hold_with_a_cache() -> None:
    module = WindowAttention(32, 4, window=(3, 0), scale=2.0, softcap=1.5)
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        cache = module.new_cache(1)
        steps = [module(x[:, i : i + 1], cache) for i in range(9)]
        torch.testing.assert_close(torch.cat(steps, 1), module(x), rtol=1e-5, atol=1e-5)


def test_too_many_tokens_leave_a_cache_as_it_was() -> None:
    model = SlidingWindowLM(9, 32, 2, 4, window=4)
    caches = model.new_caches(2)
    model(torch.zeros(2, 6).long(), caches)
    for _ in range(2):
        with pytest.raises(ValueError, match="x: expected up to new_tokens = 1 after the first, got 3"):
            model(torch.zeros(2, 3).long(), caches)
        assert [cache.lengths.tolist() for cache in caches] == [[6, 6], [6, 6]]


@pytest.mark.parametrize("forget", ["all", "rows", "counts"])
def test_an_empty_cache_takes_a_prompt_of_any_length(forget: str) -> None:
    module = WindowAttention(32, 4, window=(3, 0))
    cache, x = module.new_cache(2), torch.randn(2, 7, 32)
    if forget == "counts":
        cache.append(*(torch.randn(2, 4, 3, 8) for _ in range(2)), torch.tensor([0, 0]))
    else:
        with torch.no_grad():
            module(x + 1, cache)
        cache.reset(None if forget == "all" else torch.tensor([1, 0]))
    assert cache.is_empty
    with torch.no_grad():
        torch.testing.assert_close(module(x, cache), module(x))


def test_the_table_is_the_end_where_nothing_else_is() -> None:
    cache = WindowCache(1, 2, DIM, window=(None, 0), rope=dk.rope_table(DIM, 10))
    assert (cache.slots, cache.max_tokens) == (10, 10)
    assert WindowCache(1, 2, DIM, window=(None, 0), max_tokens=50, rope=dk.rope_table(DIM, 10)).slots == 10


def test_caches_are_one_for_each_layer() -> None:
    model = SlidingWindowLM(9, 32, 2, 4, window=4)
    for caches in (model.new_caches(1)[:1], []):
        with pytest.raises(ValueError, match=f"caches: expected one for each of 2 layers, got {len(caches)}"):
            model(torch.zeros(1, 2).long(), caches)
    with pytest.raises(ValueError, match="count: expected a number not below 0, got -1"):
        model.generate(torch.zeros(1, 2).long(), -1)
