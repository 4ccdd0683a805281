"""How far to clip when the model computes in half precision."""

from __future__ import annotations

import torch

from dskernels.checks import is_number, wrong_type, wrong_value


def clip_threshold(max_norm: float, dtype: torch.dtype, *, factor: float = 0.7) -> float:
    """The norm at which to clip a model that computes in ``dtype``: ``max_norm * factor`` in half precision.

    The factor is a rule of thumb of practitioners, who give no reason for it, and none follows from the arithmetic:
    gradients that are unscaled and measured in float32 have the norm that they have in full precision, up to rounding.
    What it does: a step whose norm is below ``0.7 * max_norm`` is the same with and without it, one above is up to 30 %
    shorter. That is a margin for gradients that are noisier for their rounding, paid for with smaller steps; after
    optimizers that divide by the size of gradients, such as Adam, little of it is left if most steps are clipped.
    Compare both on your task, and give 1 for ``factor`` where it does not help.

    The mistake that does need a correction is another: a threshold held against gradients that are still multiplied by
    the loss scale is smaller by that scale. `LossScaler.step` always clips the unscaled norm.

    Args:
        max_norm: the threshold that suits float32, not below 0.
        dtype: what the forward pass computes in: under autocast its dtype, otherwise that of the parameters.
        factor: for float16 and bfloat16, above 0 and at most 1. Default: 0.7.

    Returns:
        ``max_norm * factor`` for float16 and bfloat16, ``max_norm`` for float32 and float64.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit.
    """
    if not is_number(max_norm):
        raise wrong_type("max_norm", "a number", max_norm)
    if not max_norm >= 0:
        raise wrong_value("max_norm", "a number not below 0", max_norm)
    if not isinstance(dtype, torch.dtype):
        raise wrong_type("dtype", "a torch.dtype", dtype)
    if not dtype.is_floating_point:
        raise wrong_value("dtype", "a floating point type", dtype)
    if not is_number(factor):
        raise wrong_type("factor", "a number", factor)
    if not 0 < factor <= 1:
        raise wrong_value("factor", "a number above 0 and at most 1", factor)
    return float(max_norm * factor) if dtype.itemsize <= 2 else float(max_norm)
