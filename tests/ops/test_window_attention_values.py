"""window_attention where the right values are known by themselves, at sizes and scores at which kernels slip."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from window_attention_oracle import NAMES, Options, Rope, check, expected, op, plain, with_gradients

import dskernels as dk
from dskernels.testing import assert_close_to_reference, random_tensor

HALF_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize(
    ("window", "first", "last"),
    [((w - 1, 0), 1 - w, 0) for w in (1, 2, 4)]
    + [((w, w), -w, w) for w in (1, 2, 4)]
    + [((0, w - 1), 0, w - 1) for w in (2, 4)]
    + [((-1, 4), 1, 4), ((4, -1), -4, -1)],
    ids=str,
)
def test_exactly_the_keys_of_the_window_have_weight(
    window: tuple[int, int], first: int, last: int, dtype: torch.dtype, backend: str
) -> None:
    # With the identity for values a row of the output is the row of weights.
    length = 40
    q, k = (random_tensor((1, 1, length, 16), dtype) for _ in range(2))
    v = torch.eye(length, dtype=dtype)[None, None]
    weights = dk.window_attention(q, k, v, window=window, rope=dk.rope_table(16, length), backend=backend)[0, 0]
    for i in range(length):
        seen = [j for j in range(i + first, i + last + 1) if 0 <= j < length]
        assert weights[i].nonzero().flatten().tolist() == seen
    interior = (weights[5:-5] != 0).sum(1)
    assert (interior == last - first + 1).all()
    sums = torch.tensor([1.0 if i + last >= 0 and i + first < length else 0.0 for i in range(length)])
    torch.testing.assert_close(weights.float().sum(1), sums, rtol=0, atol=4 * torch.finfo(dtype).eps)


def low_scores(way: str, dtype: torch.dtype, queries: int, keys: int) -> tuple[list[Tensor], Tensor | None]:
    """Inputs whose scores with scale 1 are -9984 + m / 8 for small m, without rounding in any dtype, and their bias."""
    q, k = torch.zeros(1, 2, queries, 16), torch.zeros(1, 1, keys, 16)
    v = random_tensor((1, 1, keys, 24), dtype)
    bias = None
    if way == "bias":
        bias = -9984 + torch.randint(-20, 20, (1, 2, queries, keys)) / 8
    else:
        q[..., :2] = 1
        k[..., 0] = -9984
        k[..., 1] = torch.randint(-20, 20, (keys,)) / 8
    return [q.to(dtype), k.to(dtype), v], bias


@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=str)
@pytest.mark.parametrize("way", ["product", "bias"])
@pytest.mark.parametrize("queries", [70, 400])
def test_scores_below_any_finite_mask(queries: int, way: str, dtype: torch.dtype, backend: str) -> None:
    """A mask of -1e4 or so outweighs what is seen, or leaves weight in tiles that hold nothing."""
    # The first half of the queries stands before every key, and nobody sees the last keys.
    blind = queries // 2
    options = Options(window=(20, 0), scale=1.0, query_offset=-blind)
    inputs, bias = low_scores(way, dtype, queries, queries)
    grads = [random_tensor((1, 2, queries, 24), dtype), torch.randn(1, 2, queries)]

    def attend(compute, *extra):
        return lambda q, k, v, options: compute(q, k, v, options, *extra, bias=bias)

    right = with_gradients(attend(plain), [x.double() for x in inputs], grads, options)
    results = with_gradients(attend(op, backend), inputs, grads, options)
    # A score is rounded at its size, 2**-11, on the way to its exponential, and so is the lse of the backward.
    relative = 2 * torch.finfo(dtype).eps + 2**-23 * 9984
    for name, result, exactly in zip(NAMES, results, right, strict=True):
        if name == "grad of q":
            # The sum over the first component of the keys, -9984 each, cancels to what rounding leaves.
            result, exactly = result[..., 1:], exactly[..., 1:]
        size = 1.0 if name == "lse" else float(exactly.detach().abs().max())
        torch.testing.assert_close(result.double(), exactly, rtol=0, atol=relative * size, msg=name)
    out, lse, grad_q, *grads_of_keys = results
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert (grad_q[:, :, :blind] == 0).all()
    assert all((grad[:, :, queries - blind :] == 0).all() for grad in grads_of_keys)


def with_bias(compute, *extra):
    """``compute`` for `with_gradients`, with the bias as the last of the inputs."""
    return lambda q, k, v, bias, options: compute(q, k, v, options, *extra, bias=bias)


@functools.cache
def long_cache(dtype: torch.dtype):
    inputs = [random_tensor(shape, dtype) for shape in ((1, 8, 300, 128), (1, 2, 4096, 128), (1, 2, 4096, 128))]
    grads = [random_tensor((1, 8, 300, 128), dtype), torch.randn(1, 8, 300)]
    options = Options(window=(333, None))
    # In float64 the plain computation is an exact one, in a tenth of the time of the row by row one.
    right = with_gradients(plain, [x.double() for x in inputs], grads, options)
    return inputs, grads, options, (right, with_gradients(plain, inputs, grads, options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_queries_of_a_long_cache(dtype: torch.dtype, backend: str) -> None:
    inputs, grads, options, known = long_cache(dtype)
    check(inputs, grads, options, backend, known)


@functools.cache
def square_1025(window: tuple[int | None, int]):
    shapes = ((1, 1, 1025, 16), (1, 1, 1025, 16), (1, 1, 1025, 8), (1, 1, 1025, 1025))
    leaves = [random_tensor(shape, torch.float32) for shape in shapes]
    grads, options = [torch.randn(1, 1, 1025, 8), torch.randn(1, 1, 1025)], Options(window=window)
    right = with_gradients(with_bias(plain), [x.double() for x in leaves], grads, options)
    return leaves, grads, options, right, with_gradients(with_bias(plain), leaves, grads, options)


@pytest.mark.parametrize("window", [(None, 0), (100, 30)], ids=str)
def test_gradients_with_a_bias_at_1025(window: tuple[int | None, int], backend: str) -> None:
    """One more than a multiple of every tile, with rows of the bias that are aligned to nothing."""
    leaves, grads, options, right, usual = square_1025(window)
    results = with_gradients(with_bias(op, backend), leaves, grads, options)
    for name, *three in zip((*NAMES, "grad of bias"), results, right, usual, strict=True):
        assert_close_to_reference(*three, name)


def test_a_hundred_runs_give_the_same_bits(backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch's own matrix products answer for the reference")
    shapes = ((2, 4, 300, 24), (2, 2, 333, 24), (2, 2, 333, 40))
    q, k, v = (random_tensor(shape, torch.float32).requires_grad_() for shape in shapes)
    bias, sink = torch.randn(4, 300, 333, requires_grad=True), torch.randn(4, requires_grad=True)
    grads = [torch.randn(2, 4, 300, 40), torch.randn(2, 4, 300)]
    table = dk.rope_table(24, 333)

    def run() -> list[Tensor]:
        options = {"window": (50, 3), "rope": table, "softcap": 3.0, "return_lse": True, "backend": backend}
        results = dk.window_attention(q, k, v, bias=bias, sink=sink, **options)
        return [*results, *torch.autograd.grad(results, (q, k, v, bias), grads)]

    threads, first = torch.get_num_threads(), run()
    try:
        # The emulator takes seconds for one.
        for i in range(3 if backend == "cuda" else 100):
            torch.set_num_threads(1 + i % 4)
            assert all(torch.equal(one, other) for one, other in zip(run(), first, strict=True)), i
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [(None, -3), (-3, None), (-2, 5)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (33, 150)])
def test_negative_bounds(window: tuple[int | None, int | None], queries: int, keys: int, backend: str) -> None:
    inputs = [random_tensor(shape, torch.float32) for shape in ((1, 2, queries, 24), (1, 1, keys, 24), (1, 1, keys, 8))]
    grads = [torch.randn(1, 2, queries, 8), torch.randn(1, 2, queries)]
    check(inputs, grads, Options(window=window, rope=Rope()), backend)


def test_every_call_has_its_own_table(backend: str) -> None:
    inputs = [random_tensor((1, 2, 60, 32), torch.float32) for _ in range(3)]
    grads = [torch.randn(1, 2, 60, 32), torch.randn(1, 2, 60)]
    ropes = [Rope(), Rope(theta=100.0), Rope(theta=100.0, interleaved=True), Rope(theta=100.0, rotary_dim=8)]
    known = [expected(inputs, grads, Options(window=(20, 0), rope=rope)) for rope in ropes]
    for one, other in zip(known[1:], known[:-1], strict=True):
        assert (one[0][0] - other[0][0]).abs().max() > 0.01
    for _ in range(2):
        for rope, results in zip(ropes, known, strict=True):
            check(inputs, grads, Options(window=(20, 0), rope=rope), backend, results)
