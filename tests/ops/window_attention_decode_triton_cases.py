"""What test_window_attention_triton.py runs of window_attention_decode under Triton's interpreter.

As in window_attention_triton_cases.py, whose head says why there is a process of its own, and no bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from test_window_attention_decode import CASES, Case, Inputs, decode, draw, rows_of_full_calls
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from window_attention_oracle import Rope, exact, on_rounded_operands, rotated

import dskernels as dk
from dskernels.testing import LAYOUTS, assert_close_to_reference, random_tensor
from dskernels.window_attention import decode_triton
from dskernels.window_attention.decode_schema import decode_op
from dskernels.window_attention.triton_schema import triton_decode_op


def check(case: Case, x: Inputs, operand: torch.dtype) -> None:
    results = decode(case, x, "triton")
    right, usual = rows_of_full_calls(exact, case, x), rows_of_full_calls(on_rounded_operands(operand), case, x)
    usual = [usual[0].to(x.q.dtype), usual[1].float()]
    for what, *three in zip(("out", "lse"), results, right, usual, strict=True):
        assert_close_to_reference(*three, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lengths])
def test_matches_float64(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], draw(CASES[name], dtype), dtype)


@pytest.mark.parametrize("name", ["rolling", "odd_dims", "rotated_keys"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
def test_cache_of_another_dtype(dtypes: tuple[torch.dtype, torch.dtype], name: str) -> None:
    check(CASES[name], draw(CASES[name], *dtypes), torch.float32)


@pytest.mark.parametrize(("name", "splits"), [("linear", 2), ("linear", 19), ("several_queries", 2), ("blind", 3)])
def test_splits_are_joined(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than there are tiles of keys too: the last ones see nothing."""
    monkeypatch.setattr(decode_triton, "split_count", lambda *sizes: splits)
    check(CASES[name], draw(CASES[name], torch.float32), torch.float32)


def test_rows_of_several_tiles() -> None:
    # 3 heads of 40 queries are 120 rows, in tiles of 32; a tile begins amid the heads of a query.
    case = Case((25, 40, 70, 130), 90, 40, heads=6, key_heads=2, window=(30, 2), rope=Rope())
    check(case, draw(case, torch.float32), torch.float32)


def test_shapes_alone_decide_on_splits() -> None:
    assert decode_triton.split_count(1, 4096, 1, None) == 16
    assert decode_triton.split_count(1, 4096, 2, 510) == 2
    assert decode_triton.split_count(64, 2**20, 1, None) == 4
    assert decode_triton.split_count(1000, 2**20, 1, None) == 1
    assert decode_triton.split_count(0, 0, 1, -5) == 1


@pytest.mark.parametrize("keys_rotated", [False, True])
@pytest.mark.parametrize("slots", [12, 13, 64])
def test_stepping_equals_one_full_call(slots: int, keys_rotated: bool) -> None:
    """Before, at and after each wrap of the cache, in chunks of one to three."""
    window, heads, key_heads, dim, length = (9, 0), 6, 2, 32, 30
    q, k, v = (torch.randn(2, h, length, dim) for h in (heads, key_heads, key_heads))
    table, sink = dk.rope_table(dim, length), torch.randn(heads)
    options = {"window": window, "rope": table, "sink": sink, "backend": "triton"}
    full = dk.window_attention(q, k, v, **options)
    stored = rotated(k, 0, Rope()).float() if keys_rotated else k
    k_cache, v_cache = (torch.full((2, key_heads, slots, dim), torch.nan) for _ in range(2))
    begin, step = 0, 1
    while begin < length:
        end = min(begin + step, length)
        for j in range(begin, end):
            k_cache[:, :, j % slots], v_cache[:, :, j % slots] = stored[:, :, j], v[:, :, j]
        lengths = torch.full((2,), end, dtype=torch.int32)
        out = dk.window_attention_decode(
            q[:, :, begin:end], k_cache, v_cache, lengths, keys_rotated=keys_rotated, **options
        )
        torch.testing.assert_close(out, full[:, :, begin:end], rtol=1e-5, atol=1e-5, msg=f"tokens {begin} to {end}")
        begin, step = end, step % 3 + 1


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
def test_layouts_equal_contiguous(layout: str) -> None:
    q, k, v = (random_tensor((3, h, n, 32), torch.float32, layout) for h, n in ((6, 2), (2, 24), (2, 24)))
    lengths = torch.tensor([[2, 0], [24, 0], [61, 0]])[:, 0]
    options = {"window": (15, 0), "rope": dk.rope_table(32, 61), "backend": "triton", "return_lse": True}
    out, lse = dk.window_attention_decode(q, k, v, lengths, **options)
    right = dk.window_attention_decode(*(x.contiguous() for x in (q, k, v)), lengths.contiguous(), **options)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    assert (out.stride(1) < out.stride(2)) == (q.stride(1) < q.stride(2))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("splits", [1, 3])
def test_slots_that_nobody_sees_leak_nowhere(splits: int, poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "split_count", lambda *sizes: splits)
    case = Case((20, 64, 150), 64, 2, window=(29, -1), rope=Rope())
    x = draw(case, torch.float32)
    # Seen are the tokens L - 2 - 29 to L - 2.
    clean = x._replace(k_cache=x.k_cache.clone(), v_cache=x.v_cache.clone())
    for b, length in enumerate(case.lengths):
        seen = {j % 64 for j in range(max(0, length - 31), length - 1)}
        for slot in set(range(64)) - seen:
            x.k_cache[b, :, slot] = x.v_cache[b, :, slot] = poison
            clean.k_cache[b, :, slot] = clean.v_cache[b, :, slot] = 0
    for one, other in zip(decode(case, x, "triton"), decode(case, clean, "triton"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_nan_that_is_seen_reaches_only_who_sees_it(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "split_count", lambda *sizes: splits)
    x = draw(CASES["rolling"], torch.float32)
    x.k_cache[2, 1, 6], x.v_cache[3, 0, 0] = torch.nan, torch.nan
    out, lse = decode(CASES["rolling"], x, "triton")
    nan = torch.zeros(8, 4, dtype=torch.bool)
    nan[2, 2:] = True
    assert torch.equal(lse[..., 0].isnan(), nan)
    nan[3, :2] = True
    assert torch.equal(out[:, :, 0].isnan().all(-1), nan)


def test_blind_queries_leak_nowhere() -> None:
    # The first query stands at 0 and sees only tokens before itself; the second sees token 0, a NaN.
    x = draw(Case((2,), 8, 2, window=(3, -1)), torch.float32)
    x.v_cache[:, :, 0] = torch.nan
    out, lse = decode(Case((2,), 8, 2, window=(3, -1)), x, "triton")
    assert (out[:, :, 0] == 0).all()
    assert torch.equal(lse[0, :, 0], x.sink)
    assert out[:, :, 1].isnan().all()


def test_position_outside_the_table_gives_nan() -> None:
    """The public function looks at lengths on the CPU; on a GPU only the kernel does."""
    q, cache = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 8, 8)
    table, lengths = dk.rope_table(8, 4), torch.tensor([4, 5])
    options = (table.cos, table.sin, None, 1, 0, 1.0, 0.0, table.interleaved, False)
    out, _ = triton_decode_op(q, cache, cache, lengths, *options)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_lengths_that_do_not_fit_see_what_is_left_in_the_cache() -> None:
    # Without scores the result is the mean of what is seen: of 1000 tokens the last 6, the first query but one of them.
    q, cache = torch.zeros(3, 2, 2, 8), torch.randn(5, 2, 6, 8)[1:4]
    lengths = torch.tensor([-3, 7, 1000])
    out, lse = triton_decode_op(q, cache, cache, lengths, *(None,) * 4, 0, 1.0, 0.0, False, False)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    for b, length in ((1, 7), (2, 1000)):
        torch.testing.assert_close(out[b, :, 1], cache[b].mean(1))
        earlier = [slot for slot in range(6) if slot != (length - 1) % 6]
        torch.testing.assert_close(out[b, :, 0], cache[b][:, earlier].mean(1))


def test_empty() -> None:
    for name in ("no_sequence", "no_query"):
        case = CASES[name]
        out, lse = decode(case, draw(case, torch.float32), "triton")
        assert out.shape == (len(case.lengths), 4, case.queries, 16)
        assert lse.shape == out.shape[:3]


def test_same_bits_on_every_run() -> None:
    x = draw(CASES["parts"], torch.float16)
    first, second = (decode(CASES["parts"], x, "triton") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["several_queries", "rotated_keys", "no_sequence"])
def test_opcheck(name: str) -> None:
    case = CASES[name]
    x = draw(case, torch.float32)
    table = dk.rope_table(case.dim, 1000)
    options = (table.cos, table.sin, x.sink, case.window[0], None, 0.25, 3.0, False, case.keys_rotated)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_decode_op, (x.q, x.k_cache, x.v_cache, x.lengths, *options), test_utils=checks)


def test_compile_fullgraph_dynamic() -> None:
    def attend(x: Inputs) -> list[Tensor]:
        options = {"window": (9, 0), "rope": table, "sink": x.sink, "return_lse": True, "backend": "triton"}
        return list(dk.window_attention_decode(x.q, x.k_cache, x.v_cache, x.lengths, **options))

    table = dk.rope_table(32, 1000)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for name in ("linear", "queries_before_the_start"):
        x = draw(CASES[name], torch.float32)
        for one, other in zip(compiled(x), attend(x), strict=True):
            assert torch.equal(one, other)


def test_vmap_joins_the_batch() -> None:
    case = CASES["several_queries"]
    x = draw(case, torch.float32)

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return dk.window_attention_decode(*tensors, window=case.window, return_lse=True, backend="triton")

    tensors = (x.q, x.k_cache, x.v_cache, x.lengths)
    mapped = torch.func.vmap(attend)(*(y.unflatten(0, (3, 3)) for y in tensors))
    for one, other in zip(mapped, attend(*tensors), strict=True):
        assert torch.equal(one.flatten(0, 1), other)


def test_there_is_no_gradient() -> None:
    x = draw(CASES["several_queries"], torch.float32)
    out, _ = decode(CASES["several_queries"], x._replace(q=x.q.requires_grad_()), "triton")
    with pytest.raises(NotImplementedError, match="window_attention_decode: a cache has no gradient"):
        out.sum().backward()


def test_operations_are_those_of_the_default() -> None:
    x, counts = draw(CASES["several_queries"], torch.float32), []
    for operator in (triton_decode_op, decode_op):
        with FlopCounterMode(display=False) as counter:
            operator(x.q, x.k_cache, x.v_cache, x.lengths, None, None, None, 9, 0, 0.25, 0.0, False, False)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_refusals() -> None:
    x = draw(CASES["one_slot"], torch.float32)
    for changes, reason in (
        ({"k_cache": x.k_cache.double(), "v_cache": x.v_cache.double()}, "takes caches of float32"),
        ({"q": x.q.double()}, "not torch.float64"),
    ):
        with pytest.raises(RuntimeError, match=rf"backend 'triton'.*{reason}"):
            decode(CASES["one_slot"], x._replace(**changes), "triton")
    automatic = dk.explain(dk.window_attention_decode, x.q, x.k_cache, x.v_cache, x.lengths, window=(0, 0))
    assert "emulated, which is for tests" in automatic.refusals["triton"]
