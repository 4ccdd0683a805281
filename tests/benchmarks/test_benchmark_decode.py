"""The decode cases: their formulas, their reference, and that every run meets a cache that was long unused."""

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from benchmarks.case import DTYPES
from benchmarks.ops.window_attention_decode import DecodeProblem, cases
from dskernels.window_attention.decode import _prepare
from dskernels.window_attention.decode_schema import decode_op
from dskernels.window_attention.reference import rotate

SIZES = {"seen": 7, "length": 20, "head_dim": 6, "footprint": 3000}
PROBLEMS = {
    "one_sequence": DecodeProblem(batch=1, dtype="fp32", heads=2, key_heads=2, **SIZES),
    "grouped_heads": DecodeProblem(batch=3, dtype="fp32", heads=6, key_heads=2, **SIZES),
    "bf16": DecodeProblem(batch=2, dtype="bf16", heads=4, key_heads=1, **SIZES),
    "before_the_wrap": DecodeProblem(batch=1, dtype="fp32", heads=2, key_heads=1, **{**SIZES, "length": 7}),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


@each_problem
def test_operations_are_those_of_torchs_counter(problem):
    inputs = problem.draw()
    with FlopCounterMode(display=False) as counter:
        decode_op(*_prepare(inputs.q, *inputs.caches[0], inputs.cache_lengths, window=problem.window))
    assert problem.operations == counter.get_total_flops()


@each_problem
def test_bytes_are_those_of_the_tensors(problem):
    inputs = problem.draw()
    last = inputs.cache_lengths - 1
    read = [inputs.q, *inputs.caches[0], inputs.cache_lengths, inputs.rope.cos[last], inputs.rope.sin[last]]
    written = problem.expected(inputs, torch.float32)[0].to(DTYPES[problem.dtype])
    assert problem.compulsory_bytes == sum(tensor.nbytes for tensor in [*read, written])


@each_problem
def test_expected_is_the_last_row_of_whole_sequences(problem):
    inputs = problem.draw()
    (got,) = problem.expected(inputs, torch.float64)
    k_cache, v_cache = (cache.double() for cache in inputs.caches[0])
    for number, length in enumerate(inputs.cache_lengths.tolist()):
        # What the cache still holds, in the order of positions.
        positions = torch.arange(length - problem.seen, length)
        k, v = (cache[number, None][:, :, positions % problem.seen] for cache in (k_cache, v_cache))
        cos, sin = (table[positions[-1:]].double() for table in inputs.rope[:2])
        q = rotate(inputs.q[number, None].double(), cos, sin, inputs.rope.interleaved)
        expected = dk.window_attention(q, k, v, window=problem.window, backend="reference")
        torch.testing.assert_close(got[number, None], expected)


def test_inputs_are_the_same_on_every_draw():
    first, second = (PROBLEMS["grouped_heads"].draw() for _ in range(2))
    for name in ("q", "cache_lengths", "caches", "rope"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=0)


@each_problem
def test_caches_are_equal_and_apart_in_memory(problem):
    caches = problem.draw().caches
    assert len(caches) == problem.copies > 1
    assert sum(tensor.nbytes for cache in caches for tensor in cache) >= problem.footprint
    places = sorted((tensor.data_ptr(), tensor.nbytes) for cache in caches for tensor in cache)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(places))
    for cache in caches[1:]:
        torch.testing.assert_close(cache, caches[0], rtol=0, atol=0)


def test_caches_take_turns_among_all_competitors():
    inputs = PROBLEMS["one_sequence"].draw()
    used = []

    def noted(by):
        return inputs.step(lambda k, v: used.append((by, k.data_ptr(), v.data_ptr())) or k)

    ours, peer = noted("ours"), noted("peer")
    rounds = 2 * len(inputs.caches)
    for number in range(rounds):
        (peer if number % 3 == 1 else ours)()
    addresses = [(k.data_ptr(), v.data_ptr()) for k, v in inputs.caches]
    assert [(k, v) for _, k, v in used] == 2 * addresses
    assert {by for by, *_ in used} == {"ours", "peer"}


def test_cases_are_past_the_wrap_and_too_large_for_a_processors_cache():
    for case in cases():
        problem = case.lanes[0].problem
        assert problem.length > problem.seen
        assert problem.copies * problem.cache_bytes >= 2**28
