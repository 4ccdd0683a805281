"""window_attention_decode: from a cache, the rows that one full call would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from window_attention_oracle import Options, Rope, exact, plain, plain_for, rotated

import dskernels as dk
from dskernels.testing import assert_close_to_reference, random_tensor
from dskernels.window_attention.decode_schema import decode_op


class Case(NamedTuple):
    lengths: tuple[int, ...]
    slots: int
    queries: int = 1
    heads: int = 4
    key_heads: int = 2
    dim: int = 32
    value_dim: int = 16
    window: tuple[int | None, int | None] = (9, 0)
    rope: Rope | None = None
    softcap: float | None = None
    keys_rotated: bool = False

    @property
    def options(self) -> Options:
        return Options(window=self.window, rope=self.rope, softcap=self.softcap)

    def table(self) -> dk.RopeTable | None:
        if self.rope is None:
            return None
        theta, rotary_dim, interleaved = self.rope
        rows = max(self.lengths)
        return dk.rope_table(self.dim, rows, theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)


class Inputs(NamedTuple):
    q: Tensor  # the last queries
    keys: list[Tensor]  # of each whole sequence, [1, H, L, D]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    sink: Tensor


def draw(case: Case, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Inputs:
    """Sequences, and a cache whose slots hold the last tokens of each and NaN where there is none."""
    cache_dtype = cache_dtype or dtype
    batch = len(case.lengths)
    keys = [torch.randn(1, case.key_heads, n, case.dim).to(cache_dtype) for n in case.lengths]
    values = [torch.randn(1, case.key_heads, n, case.value_dim).to(cache_dtype) for n in case.lengths]
    k_cache = torch.full((batch, case.key_heads, case.slots, case.dim), torch.nan, dtype=cache_dtype)
    v_cache = torch.full((batch, case.key_heads, case.slots, case.value_dim), torch.nan, dtype=cache_dtype)
    for b, length in enumerate(case.lengths):
        stored = rotated(keys[b], 0, case.rope).to(cache_dtype) if case.keys_rotated else keys[b]
        for j in range(length):
            k_cache[b, :, j % case.slots] = stored[0, :, j]
            v_cache[b, :, j % case.slots] = values[b][0, :, j]
    q = torch.randn(batch, case.heads, case.queries, case.dim).to(dtype)
    return Inputs(
        q, keys, values, k_cache, v_cache, torch.tensor(case.lengths, dtype=torch.int64), torch.randn(case.heads)
    )


def decode(case: Case, x: Inputs, backend: str | None = None) -> list[Tensor]:
    options = {"window": case.window, "rope": case.table(), "keys_rotated": case.keys_rotated}
    scores = {"sink": x.sink, "softcap": case.softcap, "return_lse": True, "backend": backend}
    return list(dk.window_attention_decode(x.q, x.k_cache, x.v_cache, x.lengths, **options, **scores))


def rows_of_full_calls(compute: Callable[..., tuple[Tensor, Tensor]], case: Case, x: Inputs) -> list[Tensor]:
    """What ``compute`` gives for the last queries of each sequence as a whole; before its start, nothing."""
    outs, lses = [], []
    for b, length in enumerate(case.lengths):
        q = x.q[b : b + 1, :, max(case.queries - length, 0) :]
        missing, options = case.queries - q.shape[2], case.options
        keys, values = x.keys[b], x.values[b]
        if case.keys_rotated:
            # As they were stored, rounded after the rotation; the query is not, so it needs the wider dtype.
            keys, values = (rotated(keys, 0, case.rope).to(x.k_cache.dtype).double(), values.double())
            q, options = rotated(q, length - q.shape[2], case.rope), replace(options, rope=None)
        wide = torch.promote_types(q.dtype, keys.dtype)
        out, lse = compute(q.to(wide), keys.to(wide), values.to(wide), options, sink=x.sink)
        outs.append(torch.cat((out.new_zeros(1, case.heads, missing, case.value_dim), out), 2))
        lses.append(torch.cat((x.sink.to(lse.dtype)[None, :, None].expand(-1, -1, missing), lse), 2))
    return [torch.cat(outs), torch.cat(lses)]


CASES = {
    "linear": Case((1, 5, 40), 64, window=(None, 0), rope=Rope()),
    "rolling": Case((3, 15, 16, 17, 31, 32, 33, 1000), 16, rope=Rope()),
    "cache_of_the_window": Case((9, 10, 11, 20, 21), 10, heads=6, key_heads=2, rope=Rope(interleaved=True)),
    "several_queries": Case((4, 14, 15, 16, 17, 18, 19, 20, 47), 15, 4, dim=40, value_dim=24, rope=Rope(theta=500.0)),
    "queries_before_the_start": Case((0, 1, 2, 3, 7), 12, 3, rope=Rope()),
    "one_slot": Case((0, 1, 2, 77), 1, window=(0, 0), rope=Rope()),
    "no_slot": Case((0, 0), 0),
    "no_sequence": Case((), 8),
    "no_query": Case((5, 9), 16, 0),
    "rotated_keys": Case((5, 20, 63), 24, 2, rope=Rope(rotary_dim=16), keys_rotated=True),
    "odd_dims": Case((19, 40), 20, 2, heads=7, key_heads=1, dim=63, value_dim=63, rope=Rope(rotary_dim=38)),
    "softcap": Case((19, 40), 30, heads=8, key_heads=8, softcap=2.0, window=(17, 0)),
    "looks_ahead": Case((12, 30, 31), 24, 5, heads=5, key_heads=5, window=(6, 2)),
    "not_itself": Case((1, 12, 30), 24, 2, window=(8, -2)),
    "blind": Case((1, 12, 30), 24, 2, window=(-3, None)),
    "parts": Case((1500,), 1100, 2, heads=3, key_heads=1, dim=64, value_dim=128, window=(1000, 0), rope=Rope()),
    "parts_and_wrap": Case((700, 1030, 2100), 1024, heads=9, key_heads=1, dim=40, window=(1023, 0), rope=Rope()),
    "wide": Case((130, 300), 256, heads=8, key_heads=2, dim=256, value_dim=256, window=(255, 0), rope=Rope()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, dtype: torch.dtype, backend: str) -> None:
    case = CASES[name]
    x = draw(case, dtype)
    results = decode(case, x, backend)
    if not case.lengths:
        assert [r.shape for r in results] == [(0, 4, 1, 16), (0, 4, 1)]
        return
    # Tensor cores take rotated queries and keys rounded to dtype, which shows in lse.
    right, usual = rows_of_full_calls(exact, case, x), rows_of_full_calls(plain_for(backend, dtype), case, x)
    usual = [usual[0].to(dtype), usual[1].float()]
    for what, *three in zip(("out", "lse"), results, right, usual, strict=True):
        assert_close_to_reference(*three, what)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("name", ["rolling", "parts", "odd_dims"])
def test_cache_of_another_dtype(name: str, dtypes: tuple[torch.dtype, torch.dtype], backend: str) -> None:
    case = CASES[name]
    x = draw(case, *dtypes)
    results = decode(case, x, backend)
    assert results[0].dtype == dtypes[0]
    # Every input is a float32 number, so float32 is the plain computation; the result is rounded once.
    right = rows_of_full_calls(exact, case, x)
    usual = rows_of_full_calls(plain, case, x._replace(q=x.q.float()))
    usual[0] = usual[0].to(dtypes[0])
    for what, *three in zip(("out", "lse"), results, right, usual, strict=True):
        assert_close_to_reference(*three, what)


@pytest.mark.parametrize("keys_rotated", [False, True])
@pytest.mark.parametrize("slots", [12, 13, 64])
def test_stepping_equals_one_full_call(slots: int, keys_rotated: bool, backend: str) -> None:
    """Token by token, before, at and after each wrap of the cache, in chunks of one to three."""
    window, heads, key_heads, dim, length = (9, 0), 6, 2, 32, 50
    q, k, v = (torch.randn(2, h, length, dim) for h in (heads, key_heads, key_heads))
    table = dk.rope_table(dim, length)
    full = dk.window_attention(q, k, v, window=window, rope=table, backend=backend)
    stored = rotated(k, 0, Rope()).float() if keys_rotated else k
    k_cache, v_cache = (torch.full((2, key_heads, slots, dim), torch.nan) for _ in range(2))
    begin, step = 0, 1
    while begin < length:
        end = min(begin + step, length)
        for j in range(begin, end):
            k_cache[:, :, j % slots], v_cache[:, :, j % slots] = stored[:, :, j], v[:, :, j]
        lengths = torch.full((2,), end, dtype=torch.int32)
        options = {"window": window, "rope": table, "keys_rotated": keys_rotated, "backend": backend}
        out = dk.window_attention_decode(q[:, :, begin:end], k_cache, v_cache, lengths, **options)
        torch.testing.assert_close(out, full[:, :, begin:end], rtol=1e-5, atol=1e-5, msg=f"tokens {begin} to {end}")
        begin, step = end, step % 3 + 1


@pytest.mark.parametrize("layout", ["token_major", "sliced", "offset", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_equal_contiguous(layout: str, dtype: torch.dtype, backend: str) -> None:
    q, k, v = (random_tensor((3, h, n, 32), dtype, layout) for h, n in ((6, 2), (2, 24), (2, 24)))
    lengths = torch.tensor([[2, 0], [24, 0], [61, 0]])[:, 0]
    options = {"window": (15, 0), "rope": dk.rope_table(32, 61), "backend": backend, "return_lse": True}
    out, lse = dk.window_attention_decode(q, k, v, lengths, **options)
    right = dk.window_attention_decode(*(x.contiguous() for x in (q, k, v)), lengths.contiguous(), **options)
    torch.testing.assert_close((out, lse), right, rtol=1e-6, atol=1e-6)
    assert (out.stride(1) < out.stride(2)) == (q.stride(1) < q.stride(2))


def test_same_bits_on_every_run_and_for_every_thread_count(backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch's own matrix products answer for the reference")
    threads, runs = torch.get_num_threads(), []
    x = draw(CASES["parts"], torch.float32)
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            runs.append(decode(CASES["parts"], x, backend))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))


def test_a_nan_that_is_seen_is_not_hidden(backend: str) -> None:
    x = draw(CASES["rolling"], torch.float32)
    x.k_cache[2, 1, 5] = torch.nan
    out, lse = decode(CASES["rolling"], x, backend)
    # Of the 16 tokens of the third sequence, the last sees 10 in the slots 6 to 15; of the fourth, 17 tokens, too.
    assert not out.isnan().any()
    x.k_cache[2, 1, 6], x.v_cache[3, 0, 0] = torch.nan, torch.nan
    out, lse = decode(CASES["rolling"], x, backend)
    nan = torch.zeros(8, 4, dtype=torch.bool)
    nan[2, 2:] = True
    assert torch.equal(lse[..., 0].isnan(), nan)
    nan[3, :2] = True
    assert torch.equal(out[:, :, 0].isnan().all(-1), nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rolling", "several_queries", "rotated_keys", "no_sequence"])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x = draw(case, dtype)
    table = dk.rope_table(case.dim, 1000)
    options = (table.cos, table.sin, x.sink, case.window[0], None, 0.25, 3.0, False, case.keys_rotated)
    torch.library.opcheck(decode_op, (x.q, x.k_cache, x.v_cache, x.lengths, *options))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_fullgraph_dynamic(compiler: str) -> None:
    torch._dynamo.reset()

    def attend(x: Inputs) -> list[Tensor]:
        options = {"window": (9, 0), "rope": table, "sink": x.sink, "softcap": 3.0, "return_lse": True}
        return list(dk.window_attention_decode(x.q, x.k_cache, x.v_cache, x.lengths, **options))

    table = dk.rope_table(32, 1000)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=compiler)
    for name in ("linear", "rolling", "queries_before_the_start"):
        x = draw(CASES[name], torch.float32)
        torch.testing.assert_close(compiled(x), attend(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [False, True], ids=["kernel", "reference"])
def test_compiled_graph_still_sees_a_cache_that_is_too_small(wide: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dk.window_attention_decode, fullgraph=True, backend="aot_eager")
    x = draw(CASES["rolling"], torch.float32)
    q, k_cache, v_cache = (t.double() if wide else t for t in (x.q, x.k_cache, x.v_cache))
    for lengths in (x.lengths, torch.full_like(x.lengths, -3)):
        with pytest.raises((RuntimeError, ValueError), match=r"cache_lengths"):
            compiled(q, k_cache, v_cache, lengths, window=(16, 0))
    assert compiled(q, k_cache, v_cache, x.lengths.clamp(max=16), window=(16, 0)).shape == (*x.q.shape[:3], 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_queries_and_no_cache(dtype: torch.dtype, backend: str) -> None:
    case = CASES["several_queries"]
    x = draw(case, torch.float32)
    with torch.autocast("cpu", dtype):
        out, lse = decode(case, x, backend)
        direct, _ = decode_op(*x[:1], *x[3:6], None, None, None, 9, 0, 0.25, 0.0, False, False)
    right = decode(case, x._replace(q=x.q.to(dtype)), backend)
    assert (out.dtype, direct.dtype) == (dtype, dtype)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])


def test_gradients(backend: str) -> None:
    case = CASES["several_queries"]
    x = draw(case, torch.float32)
    x.q.requires_grad_()
    out, _ = decode(case, x, backend)
    if backend == "reference":
        assert torch.autograd.grad(out.square().sum(), x.q)[0].isfinite().all()
        return
    with pytest.raises(NotImplementedError, match="window_attention_decode: a cache has no gradient"):
        out.sum().backward()


def test_meta_tensors() -> None:
    q, k, v = (torch.empty(shape, device="meta") for shape in ((9, 4, 2, 8), (9, 2, 30, 8), (9, 2, 30, 6)))
    lengths = torch.empty(9, dtype=torch.int64, device="meta")
    out, lse = dk.window_attention_decode(q, k, v, lengths, return_lse=True)
    assert (out.shape, lse.shape) == ((9, 4, 2, 6), (9, 4, 2))


def test_operations_are_those_of_the_seen_pairs() -> None:
    case = CASES["several_queries"]
    x = draw(case, torch.float32)
    seen = [min(9, i) + 1 for n in case.lengths for i in range(n - case.queries, n)]
    with FlopCounterMode(display=False) as counter:
        decode(case, x)
    assert counter.get_total_flops() == 2 * case.heads * sum(seen) * (case.dim + case.value_dim)


def test_no_query_needs_no_slot() -> None:
    q, k, v = torch.randn(1, 2, 0, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    assert dk.window_attention_decode(q, k, v, torch.tensor([9]), window=(9, 0)).shape == (1, 2, 0, 8)


def test_long_sums_lose_little(backend: str) -> None:
    """Values near 1, whose sum over a long window grows: block sums keep what one running sum would lose."""
    if backend == "reference":
        pytest.skip("torch's own sums answer for the reference")
    q, k, v = torch.randn(1, 16, 1, 8), torch.randn(1, 16, 4096, 8), 1 + torch.rand(1, 16, 4096, 8) / 100
    out = dk.window_attention_decode(q, k, v, torch.tensor([4096]), window=(4095, 0), backend=backend)
    right, _ = exact(q, k, v, Options(window=(4095, 0)))
    assert float((out - right).abs().max()) < 1e-6
