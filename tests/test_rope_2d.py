"""rope_table_2d: its angles, its layout, and what it says to wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch

import dskernels as dk


@pytest.mark.parametrize("theta", [100.0, 10000, 0.5])
@pytest.mark.parametrize("rotary_dim", [None, 4, 8, 20])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1), (3, 5), (16, 16)], ids=str)
def test_angles(size: tuple[int, int], rotary_dim: int | None, theta: float) -> None:
    height, width = size
    table = dk.rope_table_2d(24, height, width, theta=theta, rotary_dim=rotary_dim)
    rotary = 24 if rotary_dim is None else rotary_dim
    quarter = rotary // 4
    assert table.cos.shape == table.sin.shape == (height * width, rotary // 2)
    assert (table.rotary_dim, table.max_positions, table.interleaved) == (rotary, height * width, False)
    right = torch.empty(2, height * width, rotary // 2, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            for i in range(quarter):
                frequency = theta ** (-4 * i / rotary)
                for pair, angle in ((i, y * frequency), (quarter + i, x * frequency)):
                    right[:, y * width + x, pair] = torch.tensor([math.cos(angle), math.sin(angle)])
    # Computed in float64, rounded once.
    for part, exact in zip(table[:2], right, strict=True):
        assert part.dtype == torch.float32
        assert (part.double() - exact).abs().max() <= 2**-25 + 1e-12


def test_first_frequencies_are_one() -> None:
    table = dk.rope_table_2d(8, 4, 6)
    y, x = torch.arange(24) // 6, torch.arange(24) % 6
    for pair, place in ((0, y), (2, x)):
        torch.testing.assert_close(table.cos[:, pair].double(), place.double().cos(), rtol=0, atol=1e-7)
        torch.testing.assert_close(table.sin[:, pair].double(), place.double().sin(), rtol=0, atol=1e-7)


def test_an_axis_alone_is_a_table_of_one_dimension() -> None:
    for height, width in ((9, 1), (1, 9)):
        table, line = dk.rope_table_2d(16, height, width, theta=50.0), dk.rope_table(8, 9, theta=50.0)
        turning, still = (slice(0, 4), slice(4, 8)) if width == 1 else (slice(4, 8), slice(0, 4))
        assert torch.equal(table.cos[:, turning], line.cos)
        assert torch.equal(table.sin[:, turning], line.sin)
        assert (table.cos[:, still] == 1).all()
        assert (table.sin[:, still] == 0).all()


def test_interleaved_names_pairs_not_angles() -> None:
    halves, pairs = dk.rope_table_2d(16, 3, 4), dk.rope_table_2d(16, 3, 4, interleaved=True)
    assert pairs.interleaved
    assert torch.equal(halves.cos, pairs.cos)
    assert torch.equal(halves.sin, pairs.sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_differences_of_places_alone(interleaved: bool) -> None:
    table = dk.rope_table_2d(16, 6, 7, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    everywhere = torch.arange(42)
    turned = [table.rotate(x.expand(1, 1, 42, 16), everywhere)[0, 0].view(6, 7, 16) for x in (q, k)]
    for down, right in ((0, 0), (2, 1), (5, 6), (1, 0)):
        products = (turned[0][down:, right:] * turned[1][: 6 - down, : 7 - right]).sum(-1)
        torch.testing.assert_close(products, products[:1, :1].expand_as(products), rtol=0, atol=1e-5)


def test_moves_to_a_device_as_float32() -> None:
    table = dk.rope_table_2d(16, 3, 4).to("meta")
    assert table.cos.device.type == table.sin.device.type == "meta"
    with torch.device("meta"):
        assert dk.rope_table_2d(16, 3, 4).cos.shape == (12, 8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head_dim": 8.0}, TypeError, r"head_dim: expected an int, got 8.0 \(float\)"),
        ({"head_dim": 0}, ValueError, "head_dim: expected a positive number, got 0"),
        ({"height": 0}, ValueError, "height: expected a positive number, got 0"),
        ({"height": (7, 7)}, TypeError, r"height: expected an int, got \(7, 7\) \(tuple\)"),
        ({"width": -3}, ValueError, "width: expected a positive number, got -3"),
        ({"width": True}, TypeError, r"width: expected an int, got True \(bool\)"),
        ({"rotary_dim": 0}, ValueError, "rotary_dim: expected a positive number, got 0"),
        ({"rotary_dim": 6}, ValueError, "rotary_dim: expected a multiple of 4 up to head_dim = 16, got 6"),
        ({"rotary_dim": 20}, ValueError, "rotary_dim: expected a multiple of 4 up to head_dim = 16, got 20"),
        ({"rotary_dim": "8"}, TypeError, r"rotary_dim: expected an int, got '8' \(str\)"),
        ({"head_dim": 18}, ValueError, "rotary_dim: expected a multiple of 4 up to head_dim = 18, got 18"),
        ({"theta": 0}, ValueError, "theta: expected a positive number, got 0"),
        ({"theta": -1.0}, ValueError, "theta: expected a positive number, got -1.0"),
        ({"theta": math.nan}, ValueError, "theta: expected a positive number, got nan"),
        ({"theta": "100"}, TypeError, r"theta: expected a number, got '100' \(str\)"),
        ({"interleaved": 1}, TypeError, r"interleaved: expected a bool, got 1 \(int\)"),
    ],
)
def test_message(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"head_dim": 16, "height": 3, "width": 4, **changes}
    with pytest.raises(error, match=message):
        dk.rope_table_2d(**arguments)


def test_a_table_for_each_head_is_of_swin_attention_alone() -> None:
    table = dk.rope_table_2d(16, 2, 3)
    by_head = dk.RopeTable(torch.stack((table.cos, table.cos)), torch.stack((table.sin, table.sin)))
    assert (by_head.rotary_dim, by_head.max_positions) == (16, 6)
    q, cache, offsets = torch.randn(1, 2, 6, 16), torch.tensor([6]), torch.tensor([0, 6])
    message = r"expected .*\[P, rotary_dim / 2\], one for all heads, got shape \[2, 6, 8\]"
    with pytest.raises(ValueError, match="table: " + message):
        by_head.rotate(q, torch.arange(6))
    with pytest.raises(ValueError, match="rope: " + message):
        dk.window_attention(q, q, q, window=(2, 0), rope=by_head)
    with pytest.raises(ValueError, match="rope: " + message):
        dk.window_attention_decode(q[:, :, :1], q, q, cache, window=(2, 0), rope=by_head)
    with pytest.raises(ValueError, match="rope: " + message):
        dk.window_attention_varlen(*(q[0].transpose(0, 1),) * 3, offsets, offsets, window=(2, 0), rope=by_head)
