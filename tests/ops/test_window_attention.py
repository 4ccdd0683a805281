"""window_attention against float64, and the values at which public implementations are known to go wrong."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from window_attention_oracle import NAMES, Options, Rope, check, exact, expected, op, with_gradients

import dskernels as dk
from dskernels.testing import LAYOUTS, assert_close_to_reference, random_tensor

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    window: tuple[int | None, int | None]
    rope: Rope | None = None
    query_offset: int | None = None

    @property
    def options(self) -> Options:
        return Options(window=self.window, rope=self.rope, query_offset=self.query_offset)

    def inputs(self, dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
        shapes = (
            (self.batch, self.heads, self.queries, self.dim),
            (self.batch, self.key_heads, self.keys, self.dim),
            (self.batch, self.key_heads, self.keys, self.value_dim),
        )
        return [random_tensor(shape, dtype, layout) for shape in shapes]

    def grads(self, dtype: torch.dtype, layout: str = "contiguous") -> list[Tensor]:
        out = random_tensor((self.batch, self.heads, self.queries, self.value_dim), dtype, layout)
        return [out, torch.randn(self.batch, self.heads, self.queries)]


def case_id(case: Case) -> str:
    batch, heads, key_heads, *sizes, (left, right), rope, _ = case
    rotation = "" if rope is None else f"-rope{rope.rotary_dim or case.dim}{'i' * rope.interleaved}"
    return "B{}-H{}_{}-N{}_{}-D{}_{}".format(batch, heads, key_heads, *sizes) + f"-W{left}_{right}{rotation}"


CASES = [
    Case(1, 1, 1, 1, 1, 8, 8, (None, None)),
    Case(2, 2, 1, 63, 63, 40, 40, (16, 0), Rope()),
    Case(1, 4, 2, 100, 100, 63, 63, (None, 0), Rope(rotary_dim=62)),
    Case(2, 6, 2, 100, 257, 72, 40, (31, 7), Rope(interleaved=True)),
    Case(1, 3, 3, 257, 257, 128, 128, (64, 0), Rope(rotary_dim=64)),
    Case(1, 2, 1, 257, 63, 160, 24, (32, 64)),
    Case(1, 2, 2, 63, 100, 8, 160, (-2, 9), Rope(rotary_dim=2)),
    Case(1, 2, 2, 100, 63, 24, 256, (20, -3)),
    Case(2, 1, 1, 129, 129, 256, 8, (0, 0), Rope(interleaved=True)),
    Case(1, 2, 1, 65, 300, 104, 120, (None, -3), Rope(rotary_dim=52, interleaved=True)),
    Case(1, 8, 1, 1, 257, 64, 64, (100, 0), Rope()),
    Case(1, 2, 2, 300, 300, 64, 64, (0, None)),
    Case(1, 2, 2, 90, 50, 16, 16, (10, 5), Rope(), 7),
    Case(1, 2, 2, 50, 90, 32, 32, (10, 5), None, -20),
    Case(1, 1, 1, 5, 5, 1, 1, (2, 0)),
    Case(1, 2, 1, 40, 2500, 24, 24, (None, 0), Rope()),  # more keys than a kernel holds the scores of at a time
]


@functools.cache
def known(case: Case, dtype: torch.dtype):
    torch.manual_seed(CASES.index(case))
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    return inputs, grads, expected(inputs, grads, case.options)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_float64(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs, grads, results = known(case, dtype)
    check(inputs, grads, case.options, backend, results)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_in_float64(case: Case) -> None:
    inputs, grads = case.inputs(torch.float64), case.grads(torch.float64)
    check(inputs, grads, case.options, "reference")


@pytest.mark.parametrize("dim", [8, 24, 40, 63, 72, 104, 120, 160])
def test_head_dims(dim: int, backend: str) -> None:
    case = Case(1, 2, 1, 70, 70, dim, dim, (20, 3), Rope(rotary_dim=dim - dim % 2))
    check(case.inputs(torch.float32), case.grads(torch.float32), case.options, backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_equal_contiguous(layout: str, dtype: torch.dtype, backend: str) -> None:
    case = Case(2, 4, 2, 75, 83, 40, 24, (20, 3), Rope())
    inputs, grads = case.inputs(dtype, layout), case.grads(dtype, layout)
    results, grads_of = _run(inputs, grads, case.options, backend)
    dense = [x.contiguous() for x in inputs]
    dense_results, dense_grads_of = _run(dense, [g.contiguous() for g in grads], case.options, backend)
    for strided, contiguous in zip(results + grads_of, dense_results + dense_grads_of, strict=True):
        torch.testing.assert_close(strided, contiguous, rtol=1e-6, atol=1e-6)


def _run(
    inputs: list[Tensor], grads: list[Tensor], options: Options, backend: str
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = list(op(*leaves, options, backend))
    return results, list(torch.autograd.grad(results, leaves, grads))


def test_inputs_stay_as_they_are(backend: str) -> None:
    case = Case(1, 4, 2, 60, 70, 32, 32, (20, 3), Rope())
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    before = [x.clone() for x in inputs + grads]
    _run(inputs, grads, case.options, backend)
    assert all(torch.equal(now, then) for now, then in zip(inputs + grads, before, strict=True))


@pytest.mark.parametrize("window", [(256, 0), (2**31 - 1, 0), (2**63 - 1, 0), (10**30, 0)], ids=str)
def test_wide_windows_equal_causal(window: tuple[int, int], backend: str) -> None:
    q, k, v = Case(1, 2, 2, 257, 257, 64, 64, (None, 0)).inputs(torch.float32)
    causal = dk.window_attention(q, k, v, window=(None, 0), backend=backend)
    torch.testing.assert_close(
        dk.window_attention(q, k, v, window=window, backend=backend), causal, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("right", [300, 2**31 - 1, 2**63 - 1])
def test_huge_right_bound_equals_full_attention(right: int, backend: str) -> None:
    q, k, v = Case(1, 2, 2, 300, 100, 64, 64, (None, None)).inputs(torch.float32)
    full = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for left in (None, 300, 2**31 - 1, 2**63 - 1):
        out = dk.window_attention(q, k, v, window=(left, right), backend=backend)
        torch.testing.assert_close(out.double(), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_rows_without_keys(dtype: torch.dtype, backend: str) -> None:
    case = Case(1, 2, 2, 129, 32, 64, 64, (32, 64))
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    # Query i stands at i - 97 and sees keys up to i - 33: none before i = 33.
    (out, lse), (grad_q, *other_grads) = _run(inputs, grads, case.options, backend)
    assert (out[:, :, :33] == 0).all()
    assert (lse[:, :, :33] == -torch.inf).all()
    assert lse[:, :, 33:].isfinite().all()
    assert (grad_q[:, :, :33] == 0).all()
    assert all(grad.isfinite().all() for grad in (grad_q, *other_grads))
    check(inputs, grads, case.options, backend)


@pytest.mark.parametrize("window", [(-200, None), (None, -200), (3, -4), (-(2**63), None)], ids=str)
def test_no_row_sees_a_key(window: tuple[int | None, int | None], backend: str) -> None:
    case = Case(1, 2, 1, 100, 100, 16, 16, window)
    results, grads = _run(case.inputs(torch.float32), case.grads(torch.float32), case.options, backend)
    assert (results[0] == 0).all()
    assert (results[1] == -torch.inf).all()
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("rope", [None, Rope()], ids=["plain", "rope"])
def test_window_of_one_gives_the_value_itself(rope: Rope | None, backend: str) -> None:
    case = Case(2, 3, 3, 100, 100, 40, 40, (0, 0), rope)
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    grads[1].zero_()
    results, (grad_q, grad_k, grad_v) = _run(inputs, grads, case.options, backend)
    torch.testing.assert_close(results[0], inputs[2], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_v, grads[0], rtol=1e-6, atol=0)
    # One key takes all the weight, so nothing depends on scores; what is left is the rounding of P * (dP - delta).
    assert grad_q.abs().max() < 2e-5
    assert grad_k.abs().max() < 2e-5


@pytest.mark.parametrize("length", [600, 1100])
def test_first_key_blocks_out_of_sight(length: int, backend: str) -> None:
    case = Case(1, 1, 1, length, length, 32, 32, (-300, None), Rope())
    (out, lse), grads = _run(case.inputs(torch.float32), case.grads(torch.float32), case.options, backend)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
    assert lse[0, 0].isfinite().nonzero().flatten().tolist() == list(range(length - 300))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rope", [None, Rope()], ids=["plain", "rope"])
def test_unseen_keys_leak_nowhere(poison: float, rope: Rope | None, backend: str) -> None:
    # Queries stand at 100..149 and see keys 90..152: the rest is unseen, next to what is seen.
    case = Case(1, 2, 1, 50, 257, 40, 40, (10, 3), rope, 100)
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    clean_results, clean_grads = _run(inputs, grads, case.options, backend)
    for tensor in inputs[1:]:
        tensor[:, :, :90] = poison
        tensor[:, :, 153:] = poison
    results, grads_of = _run(inputs, grads, case.options, backend)
    for dirty, clean in zip(results + grads_of, clean_results + clean_grads, strict=True):
        assert torch.equal(dirty, clean)
    assert (grads_of[1][:, :, :90] == 0).all()
    assert (grads_of[2][:, :, 153:] == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_blind_queries_leak_nowhere(poison: float, backend: str) -> None:
    case = Case(1, 2, 1, 129, 32, 40, 40, (32, 64))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    clean_results, clean_grads = _run(inputs, grads, case.options, backend)
    for tensor in (inputs[0], *grads):
        tensor[:, :, :33] = poison
    results, grads_of = _run(inputs, grads, case.options, backend)
    for dirty, clean in zip(results + grads_of, clean_results + clean_grads, strict=True):
        assert torch.equal(dirty, clean)


def test_nan_stays_where_it_is_seen(backend: str) -> None:
    case = Case(1, 1, 1, 200, 200, 16, 16, (5, 0))
    q, k, v = case.inputs(torch.float32)
    q[:, :, 50] = torch.nan
    out, lse = op(q, k, v, case.options, backend)
    assert out[:, :, 50].isnan().all()
    assert lse[:, :, 50].isnan().all()
    others = torch.arange(200) != 50
    torch.testing.assert_close(
        out[:, :, others].double(), exact(q, k, v, case.options)[0][:, :, others], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (12, 3)], ids=str)
def test_grouped_heads_equal_repeated_heads(heads: tuple[int, int], backend: str) -> None:
    query_heads, key_heads = heads
    group = query_heads // key_heads
    case = Case(2, query_heads, key_heads, 60, 70, 24, 16, (20, 2), Rope())
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    q, k, v = inputs
    results, (grad_q, grad_k, grad_v) = _run(inputs, grads, case.options, backend)
    repeated = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]
    full_results, (full_q, full_k, full_v) = _run(repeated, grads, case.options, backend)
    for one, other in zip([*results, grad_q], [*full_results, full_q], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for grad, full in ((grad_k, full_k), (grad_v, full_v)):
        torch.testing.assert_close(grad, full.unflatten(1, (key_heads, group)).sum(2), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0), (1, 0, 0)], ids=lambda size: str(size)
)
def test_empty(batch: int, queries: int, keys: int, backend: str) -> None:
    case = Case(batch, 4, 2, queries, keys, 16, 8, (3, 3))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    (out, lse), grads_of = _run(inputs, grads, case.options, backend)
    assert out.shape == (batch, 4, queries, 8)
    assert lse.shape == (batch, 4, queries)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((grad == 0).all() and grad.shape == x.shape for grad, x in zip(grads_of, inputs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores(dtype: torch.dtype, backend: str) -> None:
    case = Case(1, 2, 2, 100, 100, 64, 64, (30, 0))
    q, k, v = case.inputs(dtype)
    # Scores of about +-1e4: a softmax without its maximum overflows, and a finite mask value would win.
    inputs, grads, options = [q * 30, k * 30, v], case.grads(dtype), Options(window=(30, 0), scale=1.0)
    exact_results, plain_results = expected(inputs, grads, options)
    results = with_gradients(op, inputs, grads, options, backend)
    for name, result, right, usual in zip(NAMES, results, exact_results, plain_results, strict=True):
        if name in ("out", "lse"):
            assert_close_to_reference(result, right, usual, name)
            continue
        # A backward that recomputes P = exp(score - lse) has the rounding of a large lse as its relative error.
        relative = torch.finfo(dtype).eps + 2**-23 * exact_results[1].abs().max()
        assert (result.double() - right).abs().max() <= relative * right.abs().max(), name


@pytest.mark.parametrize("scale", [0.0, -0.3, 2, 1e-3])
def test_scale(scale: float, backend: str) -> None:
    case = Case(1, 2, 2, 60, 60, 32, 32, (20, 0))
    options = Options(window=(20, 0), scale=scale, rope=Rope())
    check(case.inputs(torch.float32), case.grads(torch.float32), options, backend)


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
def test_same_bits_on_every_run_and_for_every_thread_count(dtype: torch.dtype, backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch's own matrix products answer for the reference")
    case = Case(1, 6, 2, 700, 700, 64, 64, (90, 0), Rope())
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (threads, threads, 1, 2, 3):
            torch.set_num_threads(count)
            runs.append([*_flat(_run(inputs, grads, case.options, backend))])
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))


def _flat(parts: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
    return parts[0] + parts[1]


def test_long_sequence_matches_slices(backend: str) -> None:
    # Long enough for several tasks a head; each checked row is computed from the keys it sees alone.
    case = Case(1, 2, 1, 2500, 2500, 32, 32, (256, 0), Rope())
    q, k, v = case.inputs(torch.float32)
    out, lse = op(q, k, v, case.options, backend)
    for i in (0, 1, 255, 256, 257, 1023, 1024, 1500, 2047, 2048, 2499):
        low = max(0, i - 256)
        rows = slice(low, i + 1)
        one = exact(q[:, :, rows], k[:, :, rows], v[:, :, rows], Options(rope=Rope()))
        torch.testing.assert_close(out[:, :, i].double(), one[0][:, :, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, :, i].double(), one[1][:, :, -1], rtol=1e-5, atol=1e-5)
