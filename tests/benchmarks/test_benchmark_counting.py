"""The formulas for operations and bytes, and the chunked reference, against brute force."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from benchmarks.case import DTYPES
from benchmarks.ops.window_attention import WindowProblem
from dskernels.window_attention.arguments import prepare
from dskernels.window_attention.schema import forward_op

PROBLEMS = {
    "window": WindowProblem(length=37, seen=5, dtype="fp32", heads=2, key_heads=2, head_dim=6),
    "window_of_one": WindowProblem(length=9, seen=1, dtype="fp32", heads=2, key_heads=2, head_dim=4),
    "window_above_length": WindowProblem(length=7, seen=20, dtype="bf16", heads=2, key_heads=2, head_dim=4),
    "grouped_heads": WindowProblem(length=11, seen=4, dtype="fp16", batch=2, heads=6, key_heads=2, head_dim=4),
    "with_backward": WindowProblem(length=23, seen=6, dtype="bf16", heads=4, key_heads=1, head_dim=8, backward=True),
    "several_chunks": WindowProblem(length=600, seen=70, dtype="fp32", heads=2, key_heads=1, head_dim=4, backward=True),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def _whole_reference(problem, inputs, dtype):
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs[:3]]
    out = dk.window_attention(*leaves, window=problem.window, rope=inputs.rope, backend="reference")
    if not problem.backward:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out.to(dtype))]


@each_problem
def test_seen_pairs_are_those_of_a_mask(problem):
    position = torch.arange(problem.length)
    distance = position[:, None] - position
    assert problem.seen_pairs == ((distance >= 0) & (distance < problem.seen)).sum()


@each_problem
def test_operations_are_those_of_torchs_counter(problem):
    inputs = problem.draw()
    with FlopCounterMode(display=False) as counter:
        # Through the operator, whatever backend is there, since the formula is registered for it.
        leaves = [tensor.detach().requires_grad_(problem.backward) for tensor in inputs[:3]]
        out, _ = forward_op(*prepare(*leaves, window=problem.window, rope=inputs.rope))
        if problem.backward:
            out.backward(inputs.grad_out)
    assert problem.operations == counter.get_total_flops()


@each_problem
def test_bytes_are_those_of_the_tensors(problem):
    inputs = problem.draw()
    tensors = [*inputs[:3], inputs.rope.cos, inputs.rope.sin]
    tensors += [inputs.grad_out] if problem.backward else []
    results = [result.to(DTYPES[problem.dtype]) for result in problem.expected(inputs, torch.float32)]
    assert problem.compulsory_bytes == sum(tensor.nbytes for tensor in [*tensors, *results])


@each_problem
def test_chunked_reference_is_the_whole_one(problem):
    inputs = problem.draw()
    chunked = problem.expected(inputs, torch.float64)
    whole = _whole_reference(problem, inputs, torch.float64)
    assert len(chunked) == len(problem.result_names)
    for got, expected in zip(chunked, whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_inputs_are_the_same_on_every_draw():
    problem = PROBLEMS["with_backward"]
    for first, second in zip(problem.draw(), problem.draw(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
