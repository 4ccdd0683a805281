"""Exact weighted draws of any number of samples; `torch.multinomial` takes no more than 2^24."""

from __future__ import annotations

import torch
from torch import Tensor

from dsaccel.data._arguments import check_integer, checked_vector
from dskernels.checks import wrong_value


def draw(weights: Tensor, count: int, generator: torch.Generator, *, replacement: bool) -> Tensor:
    """Draws ids with ``P(i) = weights[i] / sum(weights)``; one of weight 0 is never drawn.

    With replacement: the inverse of the cumulative sum, in float64, at ``count`` uniform numbers. Without, one after
    the other from those that are left: the ``count`` smallest of ``-log(u_i) / weights[i]``.

    The same seed gives the same ids on every instruction set of x86-64 and for every number of threads.

    Args:
        weights: finite and not negative, not all 0, floating point ``[n]``, any ``n``; with replacement, of finite sum.
        count: how many to draw, at least 0; without replacement at most as many as have a weight above 0.
        generator: of the uniform numbers, on the CPU.
        replacement: whether an id may be drawn twice.

    Returns:
        Ids in the order in which they were drawn, int64 ``[count]``, on the CPU.

    Raises:
        TypeError: ``weights`` is no tensor or ``count`` no int.
        ValueError: a value does not fit.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006, algorithm A (the keys
    ``u_i^(1 / w_i)``, of which these are the logarithms).
    """
    weights = checked_vector("weights", weights, least=0.0)
    check_integer("count", count, least=0)
    if not weights.any():
        raise wrong_value("weights", "at least one above 0", f"{len(weights)} times 0")
    if replacement:
        cumulative = torch.cumsum(weights, 0, dtype=torch.float64)
        if not cumulative[-1].isfinite():
            raise wrong_value("weights", "a finite sum", cumulative[-1].item())
        return invert(cumulative, torch.rand(count, dtype=torch.float64, generator=generator))
    candidates = weights.nonzero().flatten()
    if count > len(candidates):
        expected = f"at most {len(candidates)}, which is how many weights are above 0"
        raise wrong_value("count", f"{expected}, without replacement", count)
    # In (0, 1]: of 0 the logarithm is infinite.
    keys = 1 - torch.rand(len(candidates), dtype=torch.float64, generator=generator)
    keys.log_().neg_().div_(weights[candidates])
    return candidates[keys.argsort(stable=True)[:count]]


def invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """The first ids whose cumulative weight is above ``uniform * total``: none of weight 0, for 0 and for 1, too.

    Args:
        cumulative: of the weights, not falling, float64 ``[n]``, the last above 0.
        uniform: from 0 to 1, float64 ``[count]``.
    """
    total = cumulative[-1]
    # What rounds to the total belongs to the last id whose weight brought it there.
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, (uniform * total).clamp_(max=below), right=True)
