"""RopeTable.rotate: as complex numbers, at any positions, and what it says to wrong arguments."""

from __future__ import annotations

import pytest
import torch

import dskernels as dk


@pytest.mark.parametrize("positions", [[3, 0, 9, 3], [[1, 2, 3, 4], [9, 7, 5, 0]]], ids=["N", "BN"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_pairs_as_complex_numbers(positions: list, interleaved: bool) -> None:
    x, places = torch.randn(2, 3, 4, 10, dtype=torch.float64), torch.tensor(positions)
    table = dk.rope_table(10, 10, theta=50.0, rotary_dim=6, interleaved=interleaved)
    angles = places.double().view(-1, 1, 4, 1) * 50.0 ** (-torch.arange(0, 6, 2).double() / 6)
    turned = torch.polar(torch.ones(()).double(), angles)
    a, b = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
    right = torch.complex(a, b) * turned
    result = table.rotate(x, places)
    got = (result[..., 0:6:2], result[..., 1:6:2]) if interleaved else (result[..., :3], result[..., 3:6])
    # The table is float32.
    torch.testing.assert_close(torch.complex(*got), right, rtol=1e-6, atol=1e-6)
    assert torch.equal(result[..., 6:], x[..., 6:])


def test_computes_in_float32_and_rounds_once() -> None:
    x, places, table = torch.randn(1, 2, 5, 8).bfloat16(), torch.arange(5), dk.rope_table(8, 5)
    wide = table.rotate(x.float(), places)
    assert torch.equal(table.rotate(x, places), wide.bfloat16())
    assert torch.equal(table.rotate(x, places, dtype=torch.float32), wide)


def test_gradient_turns_back() -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: dk.rope_table(8, 9).rotate(y, torch.tensor([8, 1, 0, 3, 3])), x)


X, PLACES = torch.randn(2, 3, 4, 8), torch.arange(4)


@pytest.mark.parametrize(
    ("x", "positions", "error", "message"),
    [
        (None, PLACES, TypeError, "x: expected a tensor, got None"),
        (X, [0, 1, 2, 3], TypeError, r"positions: expected a tensor, got \[0, 1, 2, 3\]"),
        (X[0], PLACES, ValueError, r"x: expected floating point \[B, H, N, D\]"),
        (X.long(), PLACES, ValueError, r"x: expected floating point \[B, H, N, D\]"),
        (X[..., :6], PLACES, ValueError, "D at least rotary_dim = 8"),
        (X, PLACES[:3], ValueError, r"positions: expected int64, shape \[N\] or \[B, N\] = \[2, 4\], got shape \[3\]"),
        (X, PLACES.int(), ValueError, "positions: expected int64"),
        (X, PLACES.to("meta"), ValueError, "positions: expected the device of the table, cpu, got meta"),
        (X, PLACES + 7, IndexError, "positions: position 10 is outside the table of 10 positions"),
        (X, PLACES - 1, IndexError, "positions: position -1 is outside the table of 10 positions"),
    ],
)
def test_message(x: object, positions: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        dk.rope_table(8, 10).rotate(x, positions)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype: expected a floating point dtype"):
        dk.rope_table(8, 10).rotate(X, PLACES, dtype=torch.int64)


def test_compiled_code_does_not_count_from_the_end() -> None:
    table = dk.rope_table(8, 10)
    rotate = torch.compile(lambda x, places: table.rotate(x, places), fullgraph=True, backend="aot_eager")
    assert torch.equal(rotate(X, PLACES), table.rotate(X, PLACES))
    with pytest.raises((IndexError, RuntimeError)):
        rotate(X, PLACES - 1)
