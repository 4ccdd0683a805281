"""Properties that hold for every input of window_attention, tried on inputs that hypothesis makes up."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dskernels as dk
from dskernels.testing import LAYOUTS, random_tensor

# The fixture only names the backend, so that examples share it is harmless. No deadline: the machine may be busy.
many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
lengths = st.integers(1, 90)
bounds = st.one_of(st.none(), st.integers(-20, 60))
seeds = st.integers(0, 2**31)


def make(
    seed: int, queries: int, keys: int, heads: int = 2, key_heads: int = 1, dim: int = 12, layout: str = "contiguous"
):
    source = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, queries, dim), (1, key_heads, keys, dim), (1, key_heads, keys, dim))
    return [random_tensor(shape, torch.float32, layout, generator=source) for shape in shapes]


def assert_near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@many
@given(seeds, lengths, lengths, bounds, bounds, st.integers(-100, 100), st.integers(1, 40), st.sampled_from(LAYOUTS))
def test_a_row_is_full_attention_over_its_slice(backend, seed, queries, keys, left, right, offset, dim, layout) -> None:
    q, k, v = make(seed, queries, keys, dim=dim, layout=layout)
    out, lse = dk.window_attention(q, k, v, window=(left, right), query_offset=offset, return_lse=True, backend=backend)
    for i in {0, queries // 2, queries - 1}:
        low = 0 if left is None else max(0, i + offset - left)
        high = keys if right is None else min(keys, i + offset + right + 1)
        if low >= high:
            assert (out[:, :, i] == 0).all()
            assert (lse[:, :, i] == -torch.inf).all()
            continue
        scores = q[:, :, i : i + 1] @ k[:, :, low:high].mT * dim**-0.5
        assert_near(out[:, :, i : i + 1], scores.softmax(-1) @ v[:, :, low:high])
        assert_near(lse[:, :, i : i + 1], scores.logsumexp(-1))


@many
@given(seeds, lengths, st.integers(1, 30), st.integers(0, 300))
def test_positions_count_relative_to_each_other(backend, seed, length, left, shift) -> None:
    q, k, v = make(seed, length, length + left)
    table = dk.rope_table(12, length + left + shift)
    pad = [torch.cat((torch.full((1, 1, shift, 12), torch.nan), x), 2) for x in (k, v)]
    window = (left, 0)
    here = dk.window_attention(q, k, v, window=window, rope=table, query_offset=left, backend=backend)
    there = dk.window_attention(q, *pad, window=window, rope=table, query_offset=left + shift, backend=backend)
    assert_near(here, there)


@many
@given(seeds, lengths, st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_a_wider_window_weighs_more(backend, seed, length, left, right, more) -> None:
    q, k, v = make(seed, length, length)
    _, narrow = dk.window_attention(q, k, v, window=(left, right), return_lse=True, backend=backend)
    _, wide = dk.window_attention(q, k, v, window=(left + more, right + more), return_lse=True, backend=backend)
    assert (wide >= narrow - 1e-5).all()


@many
@given(seeds, lengths, lengths, bounds, bounds)
def test_disjoint_windows_merge_by_lse(backend, seed, queries, keys, left, right) -> None:
    q, k, v = make(seed, queries, keys)
    left, right = (30 if left is None else left), (30 if right is None else right)
    if left + right < 0:
        left, right = -right, -left
    cut = (right - left) // 2
    whole = dk.window_attention(q, k, v, window=(left, right), return_lse=True, backend=backend)
    parts = [
        dk.window_attention(q, k, v, window=window, return_lse=True, backend=backend)
        for window in ((left, cut), (-cut - 1, right))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(torch.exp(part_lse - lse).nan_to_num()[..., None] * part for part, part_lse in parts)
    assert_near(lse, whole[1])
    assert_near(merged, whole[0])


@many
@given(seeds, lengths, st.permutations(range(3)), st.integers(1, 3))
def test_heads_do_not_know_each_other(backend, seed, length, order, group) -> None:
    q, k, v = make(seed, length, length, heads=3 * group, key_heads=3)
    out = dk.window_attention(q, k, v, window=(7, 1), backend=backend)
    order = list(order)
    shuffled = q.unflatten(1, (3, group))[:, order].flatten(1, 2)
    result = dk.window_attention(shuffled, k[:, order], v[:, order], window=(7, 1), backend=backend)
    assert_near(result, out.unflatten(1, (3, group))[:, order].flatten(1, 2))


@many
@given(seeds, lengths, lengths, bounds, bounds)
def test_an_output_is_an_average_of_values(backend, seed, queries, keys, left, right) -> None:
    q, k, v = make(seed, queries, keys)
    out = dk.window_attention(q, k, v, window=(left, right), backend=backend)
    assert (out <= v.amax(2, keepdim=True).clamp(min=0) + 1e-5).all()
    assert (out >= v.amin(2, keepdim=True).clamp(max=0) - 1e-5).all()


@many
@given(seeds, st.integers(1, 60), st.integers(2, 4))
def test_group_gradients_are_sums(backend, seed, length, group) -> None:
    q, k, v = make(seed, length, length, heads=2 * group, key_heads=2)
    grads = []
    for repeats in (1, group):
        leaves = [q, *(x.repeat_interleave(repeats, 1) for x in (k, v))]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = dk.window_attention(*leaves, window=(9, 4), backend=backend)
        grads.append(torch.autograd.grad(out.sin().sum(), leaves))
    assert_near(grads[0][0], grads[1][0])
    for grouped, repeated in zip(grads[0][1:], grads[1][1:], strict=True):
        assert_near(grouped, repeated.unflatten(1, (2, group)).sum(2))
