"""Whether a contestant computes what the case says, before anyone times it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.case import DTYPES, OURS, Lane, Problem
from dskernels.testing import assert_close_to_reference

# Peers are asked whether they do the same work, not whether they are as exact: root mean square error over root mean
# square. They round rotated queries and keys to the dtype, and gradients of them too; a window that is off by one key
# among W is off by about 2 / sqrt(W), 12 % for 256 keys.
_PEER_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Expected:
    """Results of a problem in float64 and, as plain PyTorch gives them, in its own dtype."""

    def __init__(self, problem: Problem, inputs: object) -> None:
        dtype = DTYPES[problem.dtype]
        self.names = problem.result_names
        self.exact = problem.expected(inputs, torch.float64)
        # The reference computes half precision in float32 and rounds once, which chunks must not do one by one.
        self.plain = [result.to(dtype) for result in problem.expected(inputs, torch.float32)]


def why_wrong(lane: Lane, results: Sequence[Tensor], expected: Expected) -> str | None:
    """None if the results are right, else what is wrong with them."""
    try:
        for name, result, exact, plain in zip(expected.names, results, expected.exact, expected.plain, strict=True):
            if lane.competitor.name == OURS:
                assert_close_to_reference(result, exact, plain, name)
            else:
                allowed = max(_PEER_TOLERANCES[plain.dtype], lane.competitor.allowed_error)
                _assert_same_work(result, exact, plain.dtype, name, allowed)
    except (AssertionError, ValueError) as error:
        return str(error)
    return None


def _assert_same_work(result: Tensor, exact: Tensor, dtype: torch.dtype, name: str, allowed: float) -> None:
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    assert result.dtype == dtype, f"{name}: dtype {result.dtype}, expected {dtype}"
    error = ((result.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert error <= allowed, f"{name}: relative root mean square error {error:.3g}, a peer is allowed {allowed:.3g}"
