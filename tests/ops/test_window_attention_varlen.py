"""window_attention_varlen: every sequence as if it were alone, and nothing between them."""

from __future__ import annotations

import functools
import io

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from window_attention_oracle import Rope, on_rounded_operands, op
from window_attention_varlen_oracle import CASES, NAMES, Case, dense, known, packed, strided, with_gradients

import dskernels as dk
from dskernels.testing import assert_close_to_reference
from dskernels.window_attention.schema import count_seen_pairs
from dskernels.window_attention.varlen_reference import window_attention_varlen_backward_reference
from dskernels.window_attention.varlen_schema import varlen_backward_op, varlen_forward_op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, dtype: torch.dtype, backend: str) -> None:
    inputs, grads, right, usual = known(name, dtype)
    if backend == "cuda":
        # Rotated queries and keys are rounded, as tensor cores take them.
        usual = [usual[0], dense(on_rounded_operands(dtype), CASES[name], *inputs)[1], *usual[2:]]
    results = with_gradients(functools.partial(packed, CASES[name], backend), inputs, grads)
    for what, *three in zip(NAMES[:5], results, right, usual, strict=False):
        assert_close_to_reference(*three, what)
    # Its terms are -weight * sum(grad_out * out) with an out that was rounded: half a unit in the last place of each.
    terms = (grads[0].double() * right[0]).abs().sum((0, 2)) + (grads[1].abs() * (right[1] > -torch.inf)).sum(1)
    allowed = torch.finfo(dtype).eps / 2 * terms + 2**-19 * terms
    assert ((results[5] - right[5]).abs() <= allowed).all()


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_op_sequence_by_sequence(name: str, backend: str) -> None:
    case = CASES[name]
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    results = with_gradients(functools.partial(packed, case, backend), inputs, grads)
    alone = functools.partial(dense, lambda *x, sink: op(*x, backend, sink=sink), case)
    for what, one, other in zip(NAMES, results, with_gradients(alone, inputs, grads), strict=True):
        # The gradient of the sink is one sum here and a sum of sums there; all else is the same arithmetic.
        exactly = what != "grad of sink" and backend != "reference"
        tolerance = 0.0 if exactly else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("name", ["even", "uneven", "more_queries_than_keys", "no_sequence", "many"])
def test_default_of_the_operators(name: str) -> None:
    """The explicit formula, which serves where nothing is compiled, against autograd through the reference."""
    case = CASES[name]._replace(rope=None)
    inputs, grads = [x.double() for x in case.inputs(torch.float32)], [x.double() for x in case.grads(torch.float32)]
    right = with_gradients(functools.partial(packed, case, "reference"), inputs, grads)
    q, k, v, sink = inputs
    options = (*case.offsets(), None, None, sink, *case.window, case.dim**-0.5, case.softcap or 0.0, False)
    results = window_attention_varlen_backward_reference(*grads, q, k, v, *(x.detach() for x in right[:2]), *options)
    for what, one, other in zip(NAMES[2:], results, right[2:5], strict=False):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=what)


def test_gradcheck() -> None:
    case = Case((3, 0, 2), (4, 1, 2), dim=4, value_dim=2, window=(2, 1), rope=Rope(), softcap=2.0, rest=(1, 1))
    inputs = [x.double().requires_grad_() for x in case.inputs(torch.float32)]

    def finite_part(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = packed(case, "reference", *leaves)
        return out, lse.clamp(min=-1e3)

    assert torch.autograd.gradcheck(finite_part, inputs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_either_type_and_any_stride(dtype: torch.dtype, backend: str) -> None:
    case = CASES["uneven"]
    *tensors, _ = case.inputs(torch.float32)
    right = dk.window_attention_varlen(*tensors, *case.offsets(), window=(4, 0), backend=backend)
    offsets = [torch.stack((x, x + 99), 1).to(dtype)[:, 0] for x in case.offsets()]
    assert torch.equal(dk.window_attention_varlen(*tensors, *offsets, window=(4, 0), backend=backend), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["head_major", "sliced", "offset"])
def test_layouts_equal_contiguous(layout: str, dtype: torch.dtype, backend: str) -> None:
    case = CASES["uneven"]
    inputs, grads = case.inputs(dtype), case.grads(dtype)
    right = with_gradients(functools.partial(packed, case, backend), inputs, grads)
    moved = [*(strided(x, layout) for x in inputs[:3]), inputs[3]]
    moved_grads = [strided(grads[0], layout), grads[1].T.contiguous().T]
    results = with_gradients(functools.partial(packed, case, backend), moved, moved_grads)
    for what, one, other in zip(NAMES, results, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=what)
    assert results[0].is_contiguous()
    assert results[1].is_contiguous()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nothing_past_the_last_offset_leaks(poison: float, backend: str) -> None:
    case = CASES["uneven"]._replace(rest=(30, 50))
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    right = with_gradients(functools.partial(packed, case, backend), inputs, grads)
    tokens, others = sum(case.queries), sum(case.keys)
    for tensor, end in zip((*inputs[:3], grads[0], grads[1].T), (tokens, others, others, tokens, tokens), strict=True):
        tensor[end:] = poison
    results = with_gradients(functools.partial(packed, case, backend), inputs, grads)
    for what, one, other in zip(NAMES, results, right, strict=True):
        assert torch.equal(one, other), what
    for result, end in zip((results[0], *results[2:5]), (tokens, tokens, others, others), strict=True):
        assert (result[end:] == 0).all()
    assert (results[1][:, tokens:] == -torch.inf).all()


def test_sequences_do_not_touch_each_other(backend: str) -> None:
    case = CASES["even"]
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    right = with_gradients(functools.partial(packed, case, backend), inputs, grads)
    for tensor in (*inputs[:3], grads[0]):
        tensor[20:53] = torch.nan
    results = with_gradients(functools.partial(packed, case, backend), inputs, grads)
    others = torch.tensor([*range(20), *range(53, 60)])
    for what, one, other in zip(NAMES[:5], results, right, strict=False):
        token_dim = int(what == "lse")
        assert torch.equal(one.index_select(token_dim, others), other.index_select(token_dim, others)), what


def test_same_bits_on_every_run_and_for_every_thread_count(backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch's own matrix products answer for the reference")
    case = CASES["several_chunks"]
    inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            runs.append(with_gradients(functools.partial(packed, case, backend), inputs, grads)[:5])
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ["uneven", "empty_queries", "no_sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    q, k, v, sink = case.inputs(dtype)
    table = dk.rope_table(case.dim, 100)
    options = (*case.offsets(torch.int32), table.cos, table.sin, sink, 9, None, 0.25, 3.0, False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(varlen_forward_op, (*leaves, *options))
    out, lse = varlen_forward_op(q, k, v, *options)
    grads = case.grads(dtype)
    torch.library.opcheck(varlen_backward_op, (*grads, q, k, v, out, lse, *options))
    torch.library.opcheck(varlen_backward_op, (grads[0], None, q, k, v, out, lse, *options))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_fullgraph_dynamic(compiler: str) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, offsets_q: Tensor, offsets_k: Tensor) -> list[Tensor]:
        options = {"window": (9, 3), "rope": table, "sink": sink, "return_lse": True}
        return list(dk.window_attention_varlen(q, k, v, offsets_q, offsets_k, **options))

    table = dk.rope_table(24, 100)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=compiler)
    for name in ("even", "uneven", "many"):
        case = CASES[name]
        inputs, grads = case.inputs(torch.float32), case.grads(torch.float32)
        one, other = (
            with_gradients(lambda *x, f=function, case=case: f(*x, *case.offsets()), inputs, grads)
            for function in (compiled, attend)
        )
        for what, traced, eager in zip(NAMES, one, other, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5, msg=what)


class Packed(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor) -> tuple[Tensor, Tensor]:
        options = {"window": (9, 3), "rope": dk.rope_table(24, 100), "return_lse": True}
        return dk.window_attention_varlen(q, k, v, offsets_q, offsets_k, **options)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_number_of_tokens_and_sequences(strict: bool) -> None:
    def draw(name: str) -> tuple[Tensor, ...]:
        return (*CASES[name].inputs(torch.float32)[:3], *CASES[name].offsets())

    keys, sequences = torch.export.Dim("keys"), torch.export.Dim("sequences", min=2)
    sizes = ({0: torch.export.Dim.DYNAMIC}, {0: keys}, {0: keys}, {0: sequences}, {0: sequences})
    program = torch.export.export(Packed(), draw("uneven"), dynamic_shapes=sizes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for again in (program, torch.export.load(file)):
        for name in ("even", "empty_queries", "many"):
            inputs = draw(name)
            for one, other in zip(again.module()(*inputs), Packed()(*inputs), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)


def test_a_compiled_graph_says_why_it_cannot_loop() -> None:
    case = CASES["even"]
    *tensors, _ = case.inputs(torch.float32)
    if dk.explain(dk.window_attention_varlen, *tensors, *case.offsets()).chosen == "reference":
        pytest.skip("without a kernel the operator is the reference")
    torch._dynamo.reset()
    compiled = torch.compile(dk.window_attention_varlen, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="lengths of the sequences are values"):
        compiled(*tensors, *case.offsets(), backend="reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    case = CASES["uneven"]
    *tensors, sink = case.inputs(torch.float32)
    leaves = [x.requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype):
        out, lse = packed(case, backend, *leaves, sink)
        direct, _ = varlen_forward_op(*leaves, *case.offsets(), None, None, None, 9, 3, 0.25, 0.0, False)
    right = packed(case, backend, *(x.detach().to(dtype) for x in leaves), sink)
    assert (out.dtype, direct.dtype) == (dtype, dtype)
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.float().sum(), leaves))


def test_meta_tensors() -> None:
    q, k, v = (torch.empty(shape, device="meta") for shape in ((9, 4, 8), (12, 2, 8), (12, 2, 6)))
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    out, lse = dk.window_attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    assert (out.shape, lse.shape) == ((9, 4, 6), (4, 9))


def test_operations_are_those_of_the_seen_pairs() -> None:
    case = CASES["uneven"]
    q, k, v, _ = (x.requires_grad_() for x in case.inputs(torch.float32))
    pairs = sum(count_seen_pairs(n, m, 9, 3, m - n) for n, m in zip(case.queries, case.keys, strict=True))
    with FlopCounterMode(display=False) as counter:
        out, _ = varlen_forward_op(q, k, v, *case.offsets(), None, None, None, 9, 3, 0.25, 0.0, False)
    assert counter.get_total_flops() == 2 * case.heads * pairs * (case.dim + case.value_dim)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * case.heads * pairs * (3 * case.dim + 2 * case.value_dim)


def test_double_backward_of_the_kernel_says_no() -> None:
    case = CASES["even"]
    q, k, v, _ = (x.requires_grad_() for x in case.inputs(torch.float32))
    out, _ = varlen_forward_op(q, k, v, *case.offsets(), None, None, None, 9, 3, 0.25, 0.0, False)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="reference"'):
        grad.sum().backward()
