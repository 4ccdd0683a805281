"""The rotation inside window_attention, and the tables it reads."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from window_attention_oracle import Options, Rope, exact, op, rotated

import dskernels as dk

ULP_BF16 = 2.0**-8


def attend(
    rows: int, *, dim: int = 16, length: int = 8, offset: int | None = None, backend: str | None = None, **table
):
    q, k, v = (torch.randn(1, 1, length, dim) for _ in range(3))
    rope = dk.rope_table(dim, rows, **table)
    return dk.window_attention(q, k, v, rope=rope, query_offset=offset, backend=backend)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 100])
@pytest.mark.parametrize("interleaved", [False, True])
def test_table_is_float64_rounded_once(theta: float, interleaved: bool) -> None:
    table = dk.rope_table(64, 4096, theta=theta, rotary_dim=32, interleaved=interleaved)
    exponents = torch.tensor([-2 * i / 32 for i in range(16)], dtype=torch.float64)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * torch.pow(theta, exponents)
    for stored, wide in ((table.cos, angles.cos()), (table.sin, angles.sin())):
        assert stored.dtype == torch.float32
        assert stored.is_contiguous()
        torch.testing.assert_close(stored.double(), wide, rtol=0, atol=6e-8)
    assert (table.rotary_dim, table.max_positions, table.interleaved) == (32, 4096, interleaved)


def test_table_is_a_pytree_and_moves() -> None:
    table = dk.rope_table(8, 4, interleaved=True)
    leaves, spec = torch.utils._pytree.tree_flatten(table)
    assert isinstance(torch.utils._pytree.tree_unflatten(leaves, spec), dk.RopeTable)
    moved = table.to("meta")
    assert moved.cos.device.type == moved.sin.device.type == "meta"
    assert moved.interleaved


def test_table_copies_and_pickles() -> None:
    table = dk.rope_table(8, 4, interleaved=True)
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert isinstance(other, dk.RopeTable)
        assert torch.equal(other.cos, table.cos)
        assert torch.equal(other.sin, table.sin)
        assert other.cos.data_ptr() != table.cos.data_ptr()
        assert other.interleaved


def test_late_positions_are_told_apart() -> None:
    table = dk.rope_table(128, 131072, theta=5e5)
    rows = torch.cat((table.cos, table.sin), 1)[65536 : 65536 + 256]
    assert rows.unique(dim=0).shape[0] == 256


@pytest.mark.parametrize("interleaved", [False, True])
def test_bf16_at_late_positions(interleaved: bool, backend: str) -> None:
    """A key rotated at position 131071 comes back through the scores of queries that are unit vectors."""
    torch.manual_seed(0)
    dim, keys, rope = 64, 131072, Rope(theta=5e5, interleaved=interleaved)
    table = dk.rope_table(dim, keys, theta=5e5, interleaved=interleaved)
    key = torch.randn(1, 1, 1, dim).bfloat16()
    k = torch.zeros(1, 1, keys, dim, dtype=torch.bfloat16)
    k[:, :, -1] = key
    # Queries at positions 0..63 look at nothing but the last key: left is as negative as the distance.
    for position in (0, 5):
        q = torch.eye(dim).bfloat16().view(1, dim, 1, dim)
        _, lse = dk.window_attention(
            q,
            k,
            k[..., :1],
            window=(-(keys - 1 - position), None),
            query_offset=position,
            rope=table,
            scale=1.0,
            return_lse=True,
            backend=backend,
        )
        score = lse.flatten().double()
        expected = rotated(q, position, rope).view(dim, dim) @ rotated(key, keys - 1, rope).flatten()
        wide = key.double().flatten()
        pairs = wide.view(-1, 2) if interleaved else wide.view(2, -1).T
        norm = pairs.norm(dim=1)
        norm = norm.repeat_interleave(2) if interleaved else norm.repeat(2)
        # A unit vector rotated at `position` meets one pair of the key, whose norm bounds the score.
        assert ((score - expected).abs() <= 2 * ULP_BF16 * norm).all()
        # The arithmetic is float32 inside, so it is far nearer than that, but for what tensor cores want rounded.
        if backend != "cuda":
            assert ((score - expected).abs() <= 1e-6 * norm.clamp_min(1)).all()


def test_interleaved_equals_half_split_after_permutation(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 40, 24) for _ in range(3))
    order = torch.arange(24).view(12, 2).T.flatten()
    half = op(q[..., order], k[..., order], v, Options(window=(9, 0), rope=Rope()), backend)
    pairs = op(q, k, v, Options(window=(9, 0), rope=Rope(interleaved=True)), backend)
    for one, other in zip(half, pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_query_offset_is_a_position(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 60, 32) for _ in range(3))
    options = Options(window=(11, 0), rope=Rope())
    whole, _ = op(q, k, v, options, backend)
    for first, last in ((0, 5), (5, 60), (17, 18), (30, 44)):
        part, _ = op(q[:, :, first:last], k, v, Options((11, 0), Rope(), query_offset=first), backend)
        torch.testing.assert_close(part, whole[:, :, first:last], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [7, 1])
def test_position_beyond_the_table(rows: int, backend: str) -> None:
    with pytest.raises(IndexError, match=f"last key stands at position 7, the table holds {rows} positions"):
        attend(rows, backend=backend)


def test_query_outside_the_table(backend: str) -> None:
    with pytest.raises(IndexError, match="last query stands at position 8, the table holds 8 positions"):
        attend(8, offset=1, backend=backend)
    with pytest.raises(IndexError, match="first query stands at position -1, the table of 8 positions starts at 0"):
        attend(8, offset=-1, backend=backend)
    assert attend(9, offset=1, backend=backend).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((64, 10), {"rotary_dim": 66}, ValueError, "rotary_dim: expected an even number up to head_dim = 64, got 66"),
        ((63, 10), {}, ValueError, "rotary_dim: expected an even number"),
        ((64, 0), {}, ValueError, "max_positions: expected a positive number, got 0"),
        ((64, 10), {"theta": -1.0}, ValueError, "theta"),
        ((64, 10), {"theta": "x"}, TypeError, "theta"),
        ((64.0, 10), {}, TypeError, "head_dim: expected an int, got 64.0"),
        ((True, 10), {}, TypeError, "head_dim"),
        ((64, 10), {"interleaved": 1}, TypeError, "interleaved"),
    ],
)
def test_wrong_table_arguments(arguments: tuple, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dk.rope_table(*arguments, **options)


def test_default_scaling_is_none() -> None:
    assert torch.equal(dk.rope_table(8, 9, scaling={"rope_type": "default"}).sin, dk.rope_table(8, 9).sin)


def test_partial_rotation_leaves_the_tail(backend: str) -> None:
    # Queries and keys that live in the tail alone meet as if there were no table.
    q, k, v = (torch.randn(1, 2, 50, 24) for _ in range(3))
    q[..., :8], k[..., :8] = 0, 0
    with_table, _ = op(q, k, v, Options(window=(9, 2), rope=Rope(rotary_dim=8)), backend)
    without, _ = op(q, k, v, Options(window=(9, 2)), backend)
    assert torch.equal(with_table, without)


def test_adding_to_all_positions_changes_nothing(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 30, 32) for _ in range(3))
    shift = 1000
    pad = [torch.cat((torch.full((1, 2, shift, 32), torch.nan), x), 2) for x in (k, v)]
    # Queries start 10 keys in, so that a window of 10 reaches back to the first real key and no further.
    here, _ = op(q, k, v, Options((10, 5), Rope(), query_offset=10), backend)
    there, _ = op(q, *pad, Options((10, 5), Rope(), query_offset=10 + shift), backend)
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        here.double(), exact(q, k, v, Options((10, 5), Rope(), query_offset=10))[0], rtol=1e-4, atol=1e-5
    )
