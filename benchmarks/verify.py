"""Whether a contestant computes what the case says, before anyone times it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import DTYPES, Competitor, Lane, Problem
from dskernels.testing import assert_close_to_reference

# Peers are asked whether they do the same work, not whether they are as exact: root mean square error over root mean
# square. They round rotated queries and keys to the dtype, and gradients of them too; a window that is off by one key
# among W is off by about 2 / sqrt(W), 12 % for 256 keys.
_PEER_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}

# Elements that are compared at a time: in float64 a gradient of a billion would need several times its memory.
_PIECE = 2**26


class Expected:
    """Results of a problem in float64 and, as plain PyTorch gives them, in its own dtype.

    Attributes:
        names, exact, plain: of each result.
    """

    def __init__(self, problem: Problem, inputs: object) -> None:
        self.names = problem.result_names
        self.exact, self.plain = _exact_and_plain(problem, inputs, problem.expected)
        self._problem, self._inputs = problem, inputs

    def own(self, competitor: Competitor) -> tuple[list[Tensor], list[Tensor]]:
        """``exact`` and ``plain`` of what this competitor computes."""
        if competitor.expected is None:
            return self.exact, self.plain
        return _exact_and_plain(self._problem, self._inputs, partial(competitor.expected, self._problem))


def why_wrong(lane: Lane, results: Sequence[Tensor], expected: Expected) -> str | None:
    """None if the results are right, else what is wrong with them."""
    competitor = lane.competitor
    try:
        if competitor.ours:
            for name, *triple in zip(expected.names, results, *expected.own(competitor), strict=True):
                for result, exact, plain in _pieces(*triple):
                    assert_close_to_reference(result, exact, plain, name)
        if not competitor.ours or competitor.expected is not None:
            for name, *triple in zip(expected.names, results, expected.exact, expected.plain, strict=True):
                for result, exact, plain in _pieces(*triple):
                    allowed = max(_PEER_TOLERANCES[plain.dtype], competitor.allowed_error(lane.problem))
                    _assert_same_work(result, exact, plain.dtype, name, allowed)
    except (AssertionError, ValueError) as error:
        return str(error)
    return None


def _pieces(result: Tensor, exact: Tensor, plain: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The three as they are or, where they are very long, in parts of the same elements."""
    if exact.numel() <= _PIECE or result.shape != exact.shape:
        yield result, exact, plain
    else:
        yield from zip(*(tensor.flatten().split(_PIECE) for tensor in (result, exact, plain)), strict=True)


def _exact_and_plain(
    problem: Problem, inputs: object, compute: Callable[[Any, torch.dtype], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    # The reference computes half precision in float32 and rounds once, which chunks must not do one by one.
    plain = [result.to(DTYPES[problem.dtype]) for result in compute(inputs, torch.float32)]
    return compute(inputs, torch.float64), plain


def _assert_same_work(result: Tensor, exact: Tensor, dtype: torch.dtype, name: str, allowed: float) -> None:
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    assert result.dtype == dtype, f"{name}: dtype {result.dtype}, expected {dtype}"
    error = ((result.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert error <= allowed, f"{name}: relative root mean square error {error:.3g}, allowed {allowed:.3g}"
