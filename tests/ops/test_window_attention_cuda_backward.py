"""The gradients of window_attention by the CUDA kernels: what is theirs alone, such as tiles, stages and thread orders.

What every backend has to get right is in the tests that take ``backend``. All but the last run under the emulator.
"""

from __future__ import annotations

import itertools

import emulator
import pytest
import torch
from torch import Tensor
from window_attention_oracle import Options, Rope, check_rounded_sink, exact, op, plain_for, with_gradients
from window_attention_triton_cases import CASES, Case
from window_attention_varlen_oracle import Case as PackedCase
from window_attention_varlen_oracle import packed
from window_attention_varlen_oracle import with_gradients as packed_gradients

import dskernels as dk
from dskernels.testing import LAYOUTS, assert_close_to_reference
from dskernels.window_attention.cuda_schema import cuda_backward_op, cuda_forward_op, cuda_varlen_backward_op

emulated = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Both types of 16 bits have the same tiles.
TILED = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NAMES = ("grad of q", "grad of k", "grad of v", "grad of bias", "grad of sink")


@pytest.fixture(autouse=True)
def _emulator(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        emulator.load()
        emulator.configure()


def compare(case: Case, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> None:
    """Asserts that all gradients are as near to float64 as the tolerance table allows."""
    inputs, grads = case.inputs(dtype, layout), case.grads(dtype, layout)
    extra = {}
    if case.bias is not None:
        extra["bias"] = torch.randn(case.bias)
    if case.sink:
        extra["sink"] = torch.randn(case.heads)

    def call(compute, *more):
        return lambda q, k, v, *rest: compute(q, k, v, case.options, *more, **dict(zip(extra, rest[:-1], strict=True)))

    leaves = [*inputs, *extra.values()]
    right = with_gradients(call(exact), [x.double() for x in leaves], grads, case.options)
    usual = with_gradients(call(plain_for("cuda", dtype)), leaves, grads, case.options)
    there, given = ([x.to(device) for x in tensors] for tensors in (leaves, grads))
    results = with_gradients(call(op, "cuda"), there, given, case.options)
    names = [*NAMES[:3], *(f"grad of {name}" for name in extra)]
    for name, result, exactly, usually in zip(names, results[2:], right[2:], usual[2:], strict=True):
        if name == "grad of sink" and dtype != torch.float32:
            check_rounded_sink(result.cpu(), exactly, right[0], grads, dtype)
        else:
            assert_close_to_reference(result.cpu(), exactly, usually, name)


def run(inputs: list[Tensor], grads: list[Tensor], options: Options) -> list[Tensor]:
    return with_gradients(op, inputs, grads, options, "cuda")


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, dtype: torch.dtype) -> None:
    compare(CASES[name], dtype)


# Tiles have 16, 32 or 64 rows, by the type and the wider of the head dimensions.
EDGES = [(15, 17), (16, 16), (33, 31), (48, 65), (64, 64), (65, 127), (128, 49)]


@emulated
@TILED
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 80), (120, 256)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), EDGES, ids=str)
def test_edges_of_tiles(queries: int, keys: int, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    window = {0: (20, 3), 1: (None, 0), 2: (70, None)}[(queries + keys) % 3]
    compare(Case(1, 2, 1, queries, keys, dim, value_dim, Options(window)), dtype)


@emulated
@TILED
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (5, 1), (70, 1)], ids=str)
def test_groups(heads: int, key_heads: int, dtype: torch.dtype) -> None:
    # Rows of a tile are (query, head of the group): a group ends within a tile, or is longer than one.
    compare(Case(1, heads, key_heads, 19, 23, 24, 40, Options((11, 2), Rope()), sink=True), dtype)


ROPES = [Rope(), Rope(interleaved=True), Rope(rotary_dim=36), Rope(rotary_dim=36, interleaved=True), Rope(rotary_dim=2)]


@emulated
@TILED
@pytest.mark.parametrize("dim", [40, 200])
@pytest.mark.parametrize("rope", ROPES, ids=["half", "pairs", "partial_half", "partial_pairs", "one_pair"])
def test_gradients_are_turned_back(rope: Rope, dim: int, dtype: torch.dtype) -> None:
    compare(Case(1, 3, 1, 20, 30, dim, 16, Options((17, 4), rope)), dtype)


@emulated
@pytest.mark.parametrize("dim", [40, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
@TILED
def test_layouts(layout: str, dim: int, dtype: torch.dtype) -> None:
    compare(Case(2, 4, 2, 20, 25, dim, dim + 8, Options((20, 3), Rope(rotary_dim=32))), dtype, layout=layout)


# The gradient of a bias that is the same along the keys is all rounding: in 16 bits, that of `out`, which delta has.
BIASES = [*itertools.product([(2, 4, 37, 70), (1, 4, 1, 70), (37, 70)], [torch.float32, torch.bfloat16])]
BIASES += [((2, 1, 37, 1), torch.float32), ((4, 1, 1), torch.float32)]


@emulated
@pytest.mark.parametrize(("shape", "dtype"), BIASES, ids=str)
@pytest.mark.parametrize("dim", [24, 200])
def test_gradient_of_a_bias(dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(Case(2, 4, 2, 37, 70, dim, 16, Options((30, 4), softcap=4.0), bias=shape), dtype)


@emulated
@TILED
def test_strides_of_a_bias(dtype: torch.dtype) -> None:
    case = Case(1, 2, 1, 37, 70, 24, 16, Options((30, 4)))
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    dense = torch.randn(1, 2, 37, 70)
    wide = torch.full((1, 70, 2, 75), torch.nan)
    wide[:, :, :, 1:75:2] = dense.permute(0, 3, 1, 2)
    results = []
    for bias in (dense, wide[:, :, :, 1:75:2].permute(0, 2, 3, 1)):
        call = lambda q, k, v, bias, options: op(q, k, v, options, "cuda", bias=bias)  # noqa: E731
        results.append(with_gradients(call, [*inputs, bias], grads, case.options))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@emulated
@TILED
def test_rows_hidden_by_the_bias_give_nothing(dtype: torch.dtype) -> None:
    case = Case(1, 4, 2, 70, 70, 16, 24, Options((9, 2), Rope(), softcap=3.0))
    leaves = [x.requires_grad_() for x in case.inputs(dtype)]
    bias = torch.zeros(70, 70)
    bias[5] = bias[30:33] = bias[69] = -torch.inf
    hidden = bias.isinf().all(1)
    bias[:, 69].masked_fill_(torch.arange(70) < 60, torch.nan)  # out of the window: never read
    bias.requires_grad_()
    out, _ = op(*leaves, case.options, "cuda", bias=bias)
    grad_out = torch.randn(out.shape).to(dtype)
    grad_out[:, :, hidden] = 0
    clean = torch.autograd.grad(out, [*leaves, bias], grad_out, retain_graph=True)
    grad_out[:, :, hidden] = torch.nan
    dirty = torch.autograd.grad(out, [*leaves, bias], grad_out)
    for one, other in zip(dirty, clean, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    assert (dirty[0][:, :, hidden] == 0).all()
    assert (dirty[3][hidden] == 0).all()


@emulated
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("rope", [None, Rope()], ids=["plain", "rope"])
@TILED
def test_unseen_keys_leak_nowhere(dtype: torch.dtype, rope: Rope | None, poison: float) -> None:
    # Queries stand at 50..79 and see keys 40..82: the rest is unseen, next to what is seen.
    case = Case(1, 2, 1, 30, 120, 40, 40, Options((10, 3), rope, query_offset=50))
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    clean = run(inputs, grads, case.options)
    for tensor in inputs[1:]:
        tensor[:, :, :40] = poison
        tensor[:, :, 83:] = poison
    dirty = run(inputs, grads, case.options)
    for one, other in zip(dirty, clean, strict=True):
        assert torch.equal(one, other)
    for grad in dirty[3:]:
        assert (grad[:, :, :40] == 0).all()
        assert (grad[:, :, 83:] == 0).all()


@emulated
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@TILED
def test_blind_queries_leak_nowhere(dtype: torch.dtype, poison: float) -> None:
    # Query i stands at i - 68 and sees keys up to i - 33: none before i = 33, which is within a tile of each size.
    case = Case(1, 6, 2, 100, 32, 24, 24, Options((32, 35)))
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    clean = run(inputs, grads, case.options)
    for tensor in (inputs[0], *grads):
        tensor[:, :, :33] = poison
    dirty = run(inputs, grads, case.options)
    for one, other in zip(dirty, clean, strict=True):
        assert torch.equal(one, other)
    assert (dirty[2][:, :, :33] == 0).all()


@emulated
@pytest.mark.parametrize("dim", [64, 128, 256])
@TILED
def test_same_bits_in_every_order_and_copy_mode(dtype: torch.dtype, dim: int) -> None:
    case = Case(1, 3, 1, 30, 50, dim, dim, Options((40, 5), Rope()))
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    right = run(inputs, grads, case.options)
    for order, copies in itertools.product(emulator.ORDERS, emulator.COPIES):
        emulator.configure(order, copies)
        for name, one, other in zip(NAMES, run(inputs, grads, case.options)[2:], right[2:], strict=False):
            assert torch.equal(one, other), (order, copies, name)


@emulated
@pytest.mark.parametrize("dim", [24, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_packed_sequences_equal_single_ones(dim: int, dtype: torch.dtype) -> None:
    options = {"window": (40, 0), "rope": Rope(rotary_dim=8), "softcap": 3.0}
    case = PackedCase((0, 33, 3, 17), (1, 33, 70, 29), heads=6, dim=dim, rest=(5, 70), **options)
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    results = packed_gradients(lambda *x: packed(case, "cuda", *x), inputs, grads)
    for queries, keys in case.bounds:
        if queries.start == queries.stop:
            continue
        alone = [x[tokens].transpose(0, 1)[None] for x, tokens in zip(inputs, (queries, keys, keys), strict=False)]
        given = [grads[0][queries].transpose(0, 1)[None], grads[1][None, :, queries]]
        sink = inputs[3]
        single = with_gradients(lambda *x, s=sink: op(*x, "cuda", sink=s), alone, given, case.options)
        for name, one, other, tokens in zip(NAMES, results[2:5], single[2:5], (queries, keys, keys), strict=False):
            assert torch.equal(one[tokens], other[0].transpose(0, 1)), name
    for grad, tokens in zip(results[2:5], (sum(case.queries), sum(case.keys), sum(case.keys)), strict=True):
        assert (grad[tokens:] == 0).all()


@emulated
@pytest.mark.parametrize("offsets", [[0, 90, 30, 200], [-50, 10, 60, 60], [0, 2**40, -(2**40), 7]], ids=str)
def test_wrong_offsets_stay_within_the_tensors(offsets: list[int]) -> None:
    """The public function looks at offsets on the CPU; on a GPU only the kernel does."""
    inputs = [torch.randn(66, 2, 8)[3:-3] for _ in range(3)]
    guards = [x._base.clone() for x in inputs]
    cu, table = torch.tensor(offsets), dk.rope_table(8, 70)
    options = (cu, cu, table.cos, table.sin, None, 9, 3, 1.0, 0.0, False)
    grads = cuda_varlen_backward_op(
        torch.randn(60, 2, 8), None, *inputs, torch.randn(60, 2, 8), torch.randn(2, 60), *options
    )
    assert [grad.shape for grad in grads] == [x.shape for x in inputs]
    assert all(torch.equal(x._base, guard) for x, guard in zip(inputs, guards, strict=True))


@emulated
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_empty(batch: int, queries: int, keys: int) -> None:
    case = Case(batch, 4, 2, queries, keys, 16, 8, Options((3, 3)))
    inputs = case.inputs(torch.float32)
    for grad, x in zip(run(inputs, case.grads(torch.float32), case.options)[2:], inputs, strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    q, k, v = Case(1, 2, 1, 9, 12, 8, 4, Options()).inputs(dtype)
    out, lse = cuda_forward_op(q, k, v, None, None, None, None, None, 5, 2, 3, 0.25, 0.0, False)
    return {
        "grad_out": torch.randn_like(out),
        "grad_lse": torch.randn_like(lse),
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
    }


REFUSED = {
    "shape of grad_out": ({"grad_out": torch.randn(1, 2, 8, 4)}, r"grad_out: expected \[B, Hq, Nq, Dv\]"),
    "dtype of grad_out": ({"grad_out": torch.randn(1, 2, 9, 4).half()}, "grad_out: expected the dtype of q"),
    "dimensions of grad_out": ({"grad_out": torch.randn(9, 4)}, "grad_out: expected 4 dimensions, got 2"),
    "shape of grad_lse": ({"grad_lse": torch.randn(1, 2, 8)}, "grad_lse: expected float32 of the shape of lse"),
    "dtype of grad_lse": ({"grad_lse": torch.randn(1, 2, 9).double()}, "grad_lse: expected float32"),
    "shape of out": ({"out": torch.randn(1, 2, 9, 5)}, r"out: expected \[B, Hq, Nq, Dv\]"),
    "shape of lse": ({"lse": torch.randn(1, 2, 10)}, r"lse: expected contiguous float32 \[B, Hq, Nq\]"),
}


@emulated
@pytest.mark.parametrize("name", REFUSED)
def test_direct_calls_are_checked(name: str) -> None:
    changes, message = REFUSED[name]
    options = (None, None, None, None, None, 5, 2, 3, 0.25, 0.0, False, False)
    given = arguments()
    cuda_backward_op(*given.values(), *options)
    with pytest.raises(RuntimeError, match=message):
        cuda_backward_op(*(given | changes).values(), *options)


@emulated
def test_direct_calls_of_the_packed_operator_are_checked() -> None:
    q, offsets = torch.randn(9, 2, 8), torch.tensor([0, 9])
    options = (offsets, offsets, None, None, None, 5, 2, 0.25, 0.0, False)
    good = [q, None, q, q, q, q, torch.randn(2, 9)]
    cuda_varlen_backward_op(*good, *options)
    for place, tensor, message in (
        (0, q[:8], r"grad_out: expected \[T, Hq, Dv\]"),
        (0, q.half(), "grad_out: expected the dtype of q"),
        (0, q[None], "grad_out: expected 3 dimensions, got 4"),
        (1, torch.randn(2, 8), "grad_lse: expected float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cuda_varlen_backward_op(*good[:place], tensor, *good[place + 1 :], *options)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    compare(CASES[name], dtype, "cuda")


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("rope", [None, *ROPES[:3]], ids=["plain", "half", "pairs", "partial"])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (40, 128), (200, 256)], ids=str)
def test_buckets_on_a_gpu(dim: int, value_dim: int, rope: Rope | None, dtype: torch.dtype) -> None:
    compare(Case(2, 6, 2, 200, 257, dim, value_dim, Options((31, 7), rope)), dtype, "cuda")


@pytest.mark.gpu
@DTYPES
def test_same_bits_on_every_run_on_a_gpu(dtype: torch.dtype) -> None:
    case = Case(2, 8, 2, 1000, 1000, 128, 128, Options((255, 0), Rope()))
    inputs, grads = ([x.cuda() for x in tensors] for tensors in (case.inputs(dtype), case.grads(dtype)))
    first, *others = (run(inputs, grads, case.options) for _ in range(5))
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))
