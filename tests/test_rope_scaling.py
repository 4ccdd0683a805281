"""Stretched rotary tables against the formulas of their papers, pair by pair in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

import dskernels as dk

DIM, THETA, ORIGINAL = 64, 10000.0, 2048


def table_of(frequencies: list[float], positions: int, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.tensor([[p * f for f in frequencies] for p in range(positions)], dtype=torch.float64)
    return factor * angles.cos(), factor * angles.sin()


def check(table: dk.RopeTable, frequencies: list[float], factor: float = 1.0) -> None:
    cos, sin = table_of(frequencies, table.max_positions, factor)
    torch.testing.assert_close(table.cos.double(), cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin.double(), sin, rtol=0, atol=1e-6)


def plain_frequencies(theta: float = THETA, dim: int = DIM) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def test_default_is_none() -> None:
    check(dk.rope_table(DIM, 50, scaling={"rope_type": "default"}), plain_frequencies())


def test_linear_divides_positions() -> None:
    stretched = dk.rope_table(DIM, 200, scaling={"rope_type": "linear", "factor": 4.0})
    unstretched = dk.rope_table(DIM, 50)
    torch.testing.assert_close(stretched.cos[::4], unstretched.cos)
    torch.testing.assert_close(stretched.sin[::4], unstretched.sin)


@pytest.mark.parametrize("length", [1024, 2048, 8192])
def test_dynamic_grows_the_base_with_the_length(length: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    stretch = max(1.0, 2.0 * length / ORIGINAL - 1.0)
    check(dk.rope_table(DIM, length, scaling=scaling), plain_frequencies(THETA * stretch ** (DIM / (DIM - 2))))


def test_llama3_blends_by_wave_length() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    expected, kinds = [], set()
    for f in plain_frequencies(500000.0):
        wave = 2 * math.pi / f
        if wave < ORIGINAL / 4.0:
            expected.append(f)
            kinds.add("kept")
        elif wave > ORIGINAL / 1.0:
            expected.append(f / 8.0)
            kinds.add("interpolated")
        else:
            smooth = (ORIGINAL / wave - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * f / 8.0 + smooth * f)
            kinds.add("blended")
    assert kinds == {"kept", "interpolated", "blended"}
    check(dk.rope_table(DIM, 300, theta=500000.0, scaling=scaling), expected)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("extra", "attention"),
    [
        ({}, 0.1 * math.log(16) + 1),
        ({"attention_factor": 1.3}, 1.3),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(16) + 1) / (0.05 * math.log(16) + 1)),
        ({"beta_fast": 16, "beta_slow": 2}, 0.1 * math.log(16) + 1),
    ],
)
def test_yarn_ramps_over_pairs(extra: dict, attention: float, truncate: bool) -> None:
    scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": ORIGINAL, **extra}
    ends = []
    for turns in (extra.get("beta_fast", 32), extra.get("beta_slow", 1)):
        # The pair that turns so often over the original length: THETA ** (-2 i / DIM) * ORIGINAL = 2 pi turns.
        ends.append(DIM / 2 * math.log(ORIGINAL / (2 * math.pi * turns), THETA))
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    expected = []
    for i, f in enumerate(plain_frequencies()):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        expected.append((1 - ramp) * f + ramp * f / 16.0)
    check(dk.rope_table(DIM, 300, scaling=scaling | {"truncate": truncate}), expected, attention)


def test_attention_factor_scales_the_scores_by_its_square() -> None:
    scaling = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64, "attention_factor": 1.5}
    q, k, v = (torch.randn(1, 2, 20, DIM) for _ in range(3))
    stretched = dk.window_attention(q, k, v, rope=dk.rope_table(DIM, 20, scaling=scaling))
    plain = dk.window_attention(q, k, v, rope=dk.rope_table(DIM, 20), scale=1.5**2 * DIM**-0.5)
    torch.testing.assert_close(stretched, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "error", "message"),
    [
        ("linear", TypeError, "scaling: expected None or a mapping"),
        ({"rope_type": "ntk"}, ValueError, "scaling: expected a 'rope_type' among 'default', 'linear'"),
        (
            {"rope_type": "linear"},
            ValueError,
            "scaling: expected the keys factor for the type 'linear', got no 'factor'",
        ),
        ({"rope_type": "linear", "factor": "2"}, TypeError, r"scaling\['factor'\]: expected a number"),
        ({"rope_type": "linear", "factor": 0.5}, ValueError, r"scaling\['factor'\]: expected a number not below 1"),
        ({"rope_type": "linear", "factor": -2.0}, ValueError, r"scaling\['factor'\]: expected a positive number"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, ValueError, "no keys for the type 'linear' but"),
        ({"rope_type": "yarn", "factor": 2.0}, ValueError, "got no 'original_max_position_embeddings'"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048.0},
            TypeError,
            r"scaling\['original_max_position_embeddings'\]: expected an int",
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            },
            ValueError,
            "scaling: expected low_freq_factor below high_freq_factor",
        ),
    ],
)
def test_wrong_scaling(scaling: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dk.rope_table(DIM, 8, scaling=scaling)
