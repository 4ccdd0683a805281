"""What results are held to, and inputs to try them on; for the tests, the benchmarks and the self-test.

The measure is float64. An operator passes when its error is at most twice that of the same computation in plain
PyTorch of the same dtype, plus a floor for the cases in which plain PyTorch happens to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """How far a result may be from float64, in units of the largest expected magnitude.

    Attributes:
        floor: error that is always allowed.
        reason: why the floor is what it is.
    """

    floor: float
    reason: str


TOLERANCES = {
    torch.float64: Tolerance(2**-46, "rounding of sums of some 100 terms in another order: 64 units in the last place"),
    torch.float32: Tolerance(2**-19, "the same, with exponentials good to 2 units: 16 units in the last place"),
    torch.bfloat16: Tolerance(2**-8, "one rounding at the end is half a unit in the last place, 2**-9; twice that"),
    torch.float16: Tolerance(2**-11, "one rounding at the end is half a unit in the last place, 2**-12 to 2**-11"),
}

# Plain PyTorch is right by luck in one element and wrong in the next; twice its worst is what a user would not notice.
PLAIN_ERRORS = 2.0

LAYOUTS = ("contiguous", "token_major", "sliced", "offset", "expanded")


def assert_close_to_reference(result: Tensor, exact: Tensor, plain: Tensor, name: str = "result") -> None:
    """Asserts that ``result`` is as near to ``exact`` as the table allows.

    Args:
        result: what is tested.
        exact: the same in float64, from the inputs as they are.
        plain: the same in plain PyTorch, in the dtype of ``result``.
        name: how messages call it.

    Raises:
        AssertionError: shape or dtype differ, values that are not finite stand elsewhere, or the largest error or the
            root mean square error is above ``PLAIN_ERRORS`` times that of ``plain`` plus the dtype's floor.
    """
    _expect(result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, expected {tuple(exact.shape)}")
    _expect(result.dtype == plain.dtype, f"{name}: dtype {result.dtype}, expected {plain.dtype}")
    exact, result_64, plain_64 = (x.detach().double() for x in (exact, result, plain))
    finite = exact.isfinite()
    same = torch.where(finite, result_64.isfinite(), (result_64 == exact) | (result_64.isnan() & exact.isnan()))
    misplaced = int((~same).sum())
    _expect(misplaced == 0, f"{name}: {misplaced} values are NaN or infinite where they should not be, or the reverse")
    if not finite.any():
        return
    error, plain_error = (result_64 - exact)[finite].abs(), (plain_64 - exact)[finite].abs()
    floor = TOLERANCES[result.dtype].floor * float(exact[finite].abs().max())
    for measure, size_of in (("largest error", _largest), ("root mean square error", _root_mean_square)):
        got, plain_got = size_of(error), size_of(plain_error)
        allowed = PLAIN_ERRORS * plain_got + floor
        _expect(got <= allowed, f"{name}: {measure} {got:.3g}, allowed {allowed:.3g} (plain PyTorch: {plain_got:.3g})")


def _expect(condition: bool, message: str) -> None:
    # Not an assert statement: the self-test must mean the same under python -O.
    if not condition:
        raise AssertionError(message)


def _largest(error: Tensor) -> float:
    return float(error.max())


def _root_mean_square(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


def random_tensor(
    shape: Sequence[int], dtype: torch.dtype, layout: str = "contiguous", *, generator: torch.Generator | None = None
) -> Tensor:
    """Fresh values of the standard normal distribution, ``[B, H, N, D]``, as users hand them over.

    Args:
        shape: four sizes.
        dtype: of the result; values are drawn in float32 and rounded.
        layout: ``"contiguous"``; ``"token_major"``, a transposed ``[B, N, H, D]``; ``"sliced"``, every second component
            and some rows of a larger tensor; ``"offset"``, a storage offset of one element, which spoils alignment;
            ``"expanded"``, one batch and one head repeated with stride 0.
        generator: source of the values, whose device the result is on. Default: torch's own, on the CPU.

    Raises:
        ValueError: there is no such layout.
    """
    batch, heads, length, width = shape

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=None if generator is None else generator.device).to(dtype)

    if layout == "contiguous":
        return draw(*shape)
    if layout == "token_major":
        return draw(batch, length, heads, width).transpose(1, 2)
    if layout == "sliced":
        return draw(batch, heads + 1, length + 3, 2 * width)[:, 1:, 2 : 2 + length, ::2]
    if layout == "offset":
        return draw(batch * heads * length * width + 1)[1:].view(*shape)
    if layout == "expanded":
        return draw(1, 1, length, width).expand(*shape)
    raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
