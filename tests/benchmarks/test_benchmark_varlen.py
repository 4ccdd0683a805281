"""The cases of packed sequences: their formulas and their reference, and padding for those who need it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from benchmarks.case import DTYPES
from benchmarks.ops.window_attention_varlen import VarlenProblem, cases
from benchmarks.peers._padding import Padding
from dskernels.window_attention.varlen import _prepare
from dskernels.window_attention.varlen_schema import varlen_forward_op

SIZES = {"heads": 2, "head_dim": 6}
PROBLEMS = {
    "forward": VarlenProblem(lengths=(5, 37, 1), seen=4, dtype="fp32", **SIZES),
    "one_sequence": VarlenProblem(lengths=(9,), seen=20, dtype="fp16", **SIZES),
    "with_backward": VarlenProblem(lengths=(3, 23, 8, 23), seen=6, dtype="bf16", backward=True, **SIZES),
    "several_chunks": VarlenProblem(lengths=(300, 2), seen=70, dtype="fp32", backward=True, **SIZES),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def _leaves(problem, inputs, dtype):
    return [tensor.detach().to(dtype).requires_grad_(problem.backward) for tensor in inputs[:3]]


@each_problem
def test_operations_are_those_of_torchs_counter(problem):
    inputs = problem.draw()
    offsets = (problem.offsets, problem.offsets)
    with FlopCounterMode(display=False) as counter:
        leaves = _leaves(problem, inputs, DTYPES[problem.dtype])
        out, _ = varlen_forward_op(*_prepare(*leaves, *offsets, window=problem.window, rope=inputs.rope))
        if problem.backward:
            out.backward(inputs.grad_out)
    assert problem.operations == counter.get_total_flops()


@each_problem
def test_bytes_are_those_of_the_tensors(problem):
    inputs = problem.draw()
    tensors = [*inputs[:3], inputs.rope.cos, inputs.rope.sin, problem.offsets]
    tensors += [inputs.grad_out] if problem.backward else []
    results = [result.to(DTYPES[problem.dtype]) for result in problem.expected(inputs, torch.float32)]
    assert problem.compulsory_bytes == sum(tensor.nbytes for tensor in [*tensors, *results])


@each_problem
def test_expected_is_the_packed_reference(problem):
    inputs = problem.draw()
    leaves, offsets = _leaves(problem, inputs, torch.float64), problem.offsets
    out = dk.window_attention_varlen(
        *leaves, offsets, offsets, window=problem.window, rope=inputs.rope, backend="reference"
    )
    whole = [out.detach()]
    if problem.backward:
        whole += torch.autograd.grad(out, leaves, inputs.grad_out.double())
    results = problem.expected(inputs, torch.float64)
    assert len(results) == len(problem.result_names)
    for got, expected in zip(results, whole, strict=True):
        torch.testing.assert_close(got, expected)


@each_problem
def test_padding_keeps_tokens_and_adds_zeros(problem):
    inputs, padding = problem.draw(), Padding(problem.lengths)
    padded = padding.pad(inputs)
    longest = max(problem.lengths)
    for packed, batch in zip((*inputs[:3], inputs.grad_out), (*padded[:3], padded.grad_out), strict=True):
        if packed is None:
            assert batch is None
            continue
        assert batch.shape == (len(problem.lengths), 2, longest, 6)
        assert batch.is_contiguous()
        for row, sequence, length in zip(batch, packed.split(problem.lengths), problem.lengths, strict=True):
            torch.testing.assert_close(row[:, :length], sequence.transpose(0, 1), rtol=0, atol=0)
            assert not row[:, length:].any()
        (again,) = padding.unpad([batch])
        torch.testing.assert_close(again, packed, rtol=0, atol=0)
    assert padding.notes == {"tokens": len(inputs.q), "with_padding": len(problem.lengths) * longest}


def test_inputs_are_the_same_on_every_draw():
    problem = PROBLEMS["with_backward"]
    for first, second in zip(problem.draw(), problem.draw(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_lengths_are_uneven_and_of_every_octave():
    for case in cases():
        lengths = torch.tensor(case.lanes[0].problem.lengths).double()
        assert len(lengths) == 16
        octaves = lengths.log2().floor().int()
        assert octaves.unique().tolist() == [6, 7, 8, 9, 10, 11]
