"""The clipping threshold for half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsaccel.amp import clip_threshold


@pytest.mark.parametrize(
    ("arguments", "threshold"),
    [
        ((2.0, torch.float16), 1.4),
        ((2.0, torch.bfloat16), 1.4),
        ((2.0, torch.float32), 2.0),
        ((2.0, torch.float64), 2.0),
        ((0, torch.float16), 0.0),
    ],
    ids=str,
)
def test_values(arguments: tuple[float, torch.dtype], threshold: float) -> None:
    assert clip_threshold(*arguments) == pytest.approx(threshold)
    assert clip_threshold(*arguments, factor=1) == arguments[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("1", torch.float16), TypeError, "max_norm: expected a number, got '1'"),
        ((-1.0, torch.float16), ValueError, "max_norm: expected a number not below 0, got -1.0"),
        ((float("nan"), torch.float16), ValueError, "max_norm: expected a number not below 0, got nan"),
        ((1.0, "float16"), TypeError, "dtype: expected a torch.dtype, got 'float16'"),
        ((1.0, torch.int8), ValueError, "dtype: expected a floating point type, got torch.int8"),
        ((1.0, torch.float16, None), TypeError, "factor: expected a number, got None"),
        ((1.0, torch.float16, 0.0), ValueError, "factor: expected a number above 0 and at most 1, got 0.0"),
        ((1.0, torch.float16, 1.5), ValueError, "factor: expected a number above 0 and at most 1, got 1.5"),
    ],
    ids=str,
)
def test_errors(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    max_norm, dtype, *factor = arguments
    with pytest.raises(error, match=message):
        clip_threshold(max_norm, dtype, **({"factor": factor[0]} if factor else {}))
