"""What test_window_attention_triton.py runs of window_attention_varlen under Triton's interpreter.

As in window_attention_triton_cases.py, whose head says why there is a process of its own, and no bfloat16.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from window_attention_oracle import Rope, on_rounded_operands, op
from window_attention_varlen_oracle import CASES, NAMES, Case, dense, known, packed, strided, with_gradients

import dskernels as dk
from dskernels.testing import assert_close_to_reference
from dskernels.window_attention.triton_common import sequence_of, tile_count
from dskernels.window_attention.triton_schema import triton_varlen_backward_op, triton_varlen_forward_op
from dskernels.window_attention.varlen_schema import varlen_forward_op

triton = pytest.importorskip("triton")
tl = triton.language


def triton_run(case: Case, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return with_gradients(functools.partial(packed, case, "triton"), inputs, grads)


# The interpreter takes milliseconds a tile, so not those of a hundred tiles.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CASES if name not in ("many", "several_chunks")]
    + [(name, torch.float16) for name in ("uneven", "empty_keys", "more_queries_than_keys", "ahead_only", "short")],
    ids=str,
)
def test_matches_float64(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs, grads, right, usual = known(name, dtype)
    usual = [usual[0], dense(on_rounded_operands(dtype), case, *inputs)[1], *usual[2:]]
    results = triton_run(case, inputs, grads)
    for what, *three in zip(NAMES[:5], results, right, usual, strict=False):
        assert_close_to_reference(*three, what)
    terms = (grads[0].double() * right[0]).abs().sum((0, 2)) + (grads[1].abs() * (right[1] > -torch.inf)).sum(1)
    allowed = torch.finfo(dtype).eps / 2 * terms + 2**-19 * terms
    assert ((results[5] - right[5]).abs() <= allowed).all()


@pytest.mark.parametrize("name", ["uneven", "empty_keys", "blind", "short"])
def test_equals_the_dense_op_sequence_by_sequence(name: str) -> None:
    case = CASES[name]
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    alone = functools.partial(dense, lambda *x, sink: op(*x, "triton", sink=sink), case)
    results, others = triton_run(case, inputs, grads), with_gradients(alone, inputs, grads)
    for what, one, other in zip(NAMES, results, others, strict=True):
        # The tiles of forward and dq are the same. The dense op leaves out keys that nobody sees: dkdv's are shifted.
        tolerance = 0.0 if what in NAMES[:3] else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_either_type_and_any_stride(dtype: torch.dtype) -> None:
    case = CASES["short"]
    *tensors, _ = case.inputs(torch.float32)
    right = dk.window_attention_varlen(*tensors, *case.offsets(), window=(4, 0), backend="triton")
    offsets = [torch.stack((x, x + 99), 1).to(dtype)[:, 0] for x in case.offsets()]
    assert torch.equal(dk.window_attention_varlen(*tensors, *offsets, window=(4, 0), backend="triton"), right)


@pytest.mark.parametrize("layout", ["head_major", "sliced", "offset"])
def test_layouts_equal_contiguous(layout: str) -> None:
    case = CASES["short"]
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    moved = [*(strided(x, layout) for x in inputs[:3]), inputs[3]]
    moved_grads = [strided(grads[0], layout), grads[1].T.contiguous().T]
    results = triton_run(case, moved, moved_grads)
    for what, one, other in zip(NAMES[:5], results, triton_run(case, inputs, grads), strict=False):
        assert torch.equal(one, other), what
        assert one.is_contiguous(), what


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("rope", [None, Rope()], ids=["plain", "rope"])
def test_nothing_past_the_last_offset_leaks(rope: Rope | None, poison: float) -> None:
    case = CASES["uneven"]._replace(rest=(30, 90), rope=rope)
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    right = triton_run(case, inputs, grads)
    tokens, others = sum(case.queries), sum(case.keys)
    for tensor, end in zip((*inputs[:3], grads[0], grads[1].T), (tokens, others, others, tokens, tokens), strict=True):
        tensor[end:] = poison
    results = triton_run(case, inputs, grads)
    for what, one, other in zip(NAMES, results, right, strict=True):
        assert torch.equal(one, other), what
    for result, end in zip((results[0], *results[2:5]), (tokens, tokens, others, others), strict=True):
        assert (result[end:] == 0).all()
    assert (results[1][:, tokens:] == -torch.inf).all()


@pytest.mark.parametrize("window", [(9, 3), (None, None)], ids=["window", "full"])
def test_sequences_do_not_touch_each_other(window: tuple) -> None:
    case = CASES["even"]._replace(window=window)
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    right = triton_run(case, inputs, grads)
    for tensor in (*inputs[:3], grads[0]):
        tensor[20:53] = torch.nan
    results = triton_run(case, inputs, grads)
    others = torch.tensor([*range(20), *range(53, 60)])
    for what, one, other in zip(NAMES[:5], results, right, strict=False):
        token_dim = int(what == "lse")
        assert torch.equal(one.index_select(token_dim, others), other.index_select(token_dim, others)), what


def test_keys_that_nobody_sees_leak_nowhere() -> None:
    # Each sequence's queries stand at its last keys and see 9 back: the first keys are unseen, next to what is seen.
    case = CASES["uneven"]._replace(rest=(0, 0))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    right = triton_run(case, inputs, grads)
    for tensor in inputs[1:3]:
        tensor[:16] = torch.nan
        tensor[39:53] = torch.nan
    results = triton_run(case, inputs, grads)
    for what, one, other in zip(NAMES, results, right, strict=True):
        assert torch.equal(one, other), what


@triton.jit
def _sequences_of_tiles(found, offsets, others, sequences, tokens, other_tokens, BLOCK: tl.constexpr):
    at = found + tl.program_id(0) * 6
    place = sequence_of(tl.program_id(0), offsets, others, sequences, tokens, other_tokens, BLOCK)
    for index in tl.static_range(6):
        tl.store(at + index, place[index])


@pytest.mark.parametrize("lengths", [(), (0,), (5,), (16, 16), (15, 17, 1), (0, 0, 33, 0), (100, 1, 1, 1, 47)], ids=str)
@pytest.mark.parametrize("rest", [0, 1, 40])
def test_every_token_has_one_tile(lengths: tuple[int, ...], rest: int) -> None:
    block, offsets = 16, torch.tensor([0, *lengths]).cumsum(0)
    tokens = sum(lengths) + rest
    tiles = tile_count(tokens, offsets, block)
    found = torch.full((tiles, 6), -1)
    _sequences_of_tiles[(tiles,)](found, offsets, 2 * offsets, len(lengths), tokens, 2 * tokens, BLOCK=block)
    spans = [*pairwise(offsets.tolist()), (sum(lengths), tokens)]
    covered, idle = [], 0
    for tile, begin, length, other_begin, other_length, past_end in found.tolist():
        rows = [row for row in range(tile * block, (tile + 1) * block) if row < length]
        covered += [begin + row for row in rows]
        idle += not rows
        assert (begin, begin + length) in (spans[-1:] if past_end else spans[:-1])
        assert other_begin == 2 * begin
        assert other_length == (0 if past_end or not rows else 2 * length)
    assert sorted(covered) == list(range(tokens))
    assert idle <= len(lengths) + 1


@pytest.mark.parametrize("offsets", [[0, 90, 30, 200], [-50, 10, 60, 60], [0, 2**40, -(2**40), 7]], ids=str)
def test_wrong_offsets_stay_within_the_tensors(offsets: list[int]) -> None:
    """The public function looks at offsets on the CPU; on a GPU only the kernel does."""
    inputs = [torch.randn(66, 2, 8)[3:-3] for _ in range(3)]
    guards = [x._base.clone() for x in inputs]
    cu = torch.tensor(offsets)
    options = (cu, cu, None, None, None, 9, 3, 1.0, 0.0, False)
    out, lse = triton_varlen_forward_op(*inputs, *options)
    triton_varlen_backward_op(torch.randn_like(out), None, *inputs, out, lse, *options)
    assert all(torch.equal(x._base, guard) for x, guard in zip(inputs, guards, strict=True))


def test_same_bits_on_every_run() -> None:
    case = CASES["one_head"]
    inputs, grads = case.inputs(torch.float16), case.grads(torch.float16)
    first, second = (triton_run(case, inputs, grads) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["uneven", "no_sequence"])
def test_opcheck(name: str) -> None:
    case = CASES[name]._replace(queries=CASES[name].queries[:2], keys=CASES[name].keys[:2])
    q, k, v, sink = case.inputs(torch.float32)
    table = dk.rope_table(case.dim, 100)
    options = (*case.offsets(torch.int32), table.cos, table.sin, sink, 9, None, 0.25, 3.0, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(triton_varlen_forward_op, (*leaves, *options), test_utils=checks)
    out, lse = triton_varlen_forward_op(q, k, v, *options)
    grads = case.grads(torch.float32)
    for grad_lse in (grads[1], None):
        arguments = (grads[0], grad_lse, q, k, v, out, lse, *options)
        torch.library.opcheck(triton_varlen_backward_op, arguments, test_utils=checks)


def test_compile_fullgraph_dynamic() -> None:
    table = dk.rope_table(24, 100)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, offsets_q: Tensor, offsets_k: Tensor) -> list[Tensor]:
        options = {"window": (9, 3), "rope": table, "sink": sink, "return_lse": True, "backend": "triton"}
        return list(dk.window_attention_varlen(q, k, v, offsets_q, offsets_k, **options))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for name in ("even", "uneven"):
        case = CASES[name]
        inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
        one, other = (
            with_gradients(lambda *x, f=function, case=case: f(*x, *case.offsets()), inputs, grads)
            for function in (compiled, attend)
        )
        for what, traced, eager in zip(NAMES, one, other, strict=True):
            assert torch.equal(traced, eager), what


def test_transforms_of_torch_func() -> None:
    case = Case((3, 5), (4, 5), heads=2, key_heads=1, dim=8, value_dim=8, window=(3, 0), rope=Rope())
    first, second = (case.inputs(torch.float32) for _ in range(2))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = packed(case, "triton", q, k, v, first[3])
        return out.square().sum() + lse.sin().sum()

    # Mapped along the last dimension but one, so that nothing that is taken out of it is contiguous.
    both = [torch.stack(pair, -2) for pair in zip(first[:3], second[:3], strict=True)]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=-2)(*both)
    for i, inputs in enumerate((first, second)):
        leaves = [x.requires_grad_() for x in inputs[:3]]
        for one, other in zip(mapped, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(one[i], other)


def test_operations_are_those_of_the_compiled_kernel() -> None:
    case, options = CASES["uneven"], (None, None, None, 9, 3, 0.25, 0.0, False)
    q, k, v, _ = (x.requires_grad_() for x in case.inputs(torch.float32))
    counts = []
    for operator in (triton_varlen_forward_op, varlen_forward_op):
        with FlopCounterMode(display=False) as counter:
            out, _ = operator(q, k, v, *case.offsets(), *options)
            out.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
