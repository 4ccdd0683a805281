"""What LossScaler needs of torch's fused optimizers that torch does not document.

Optimizers with ``_step_supports_amp_scaling`` look at two attributes in their step: they divide gradients by
``grad_scale``, and leave everything as it is if ``found_inf`` is 1. So do torch's Adam, AdamW, SGD and Adagrad with
``fused=True``. `torch.amp.GradScaler.step` sets both, and takes the attributes away afterwards. Because this is no
promise of torch's, the step is tried out once for each class, device and dtype before it is relied upon.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# The most derived ones first.
_CLASSES: tuple[type[Optimizer], ...] = (AdamW, Adam, SGD, Adagrad)


def folds(optimizer: Optimizer) -> bool:
    """Whether the step of ``optimizer`` divides the gradients itself, and does nothing where one is not finite."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # An older form of the same, that asks the scaler.
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return False
    # A checkpoint of an optimizer that was not fused brings its options along.
    if not all(group.get("fused", True) for group in optimizer.param_groups):
        return False
    known: Any = next((each for each in _CLASSES if isinstance(optimizer, each)), None)
    if known is None:
        return True
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    kinds = {(parameter.device.type, parameter.dtype) for parameter in parameters if parameter.grad is not None}
    return all(_follows(known, device, dtype) for device, dtype in kinds)


def preset_scale(optimizer: Optimizer) -> Tensor | None:
    """The ``grad_scale`` that somebody else has set, by which the gradients have to be divided too."""
    preset = getattr(optimizer, "grad_scale", None)
    return None if preset is None else torch.as_tensor(preset, dtype=torch.float32)


def step_folded(
    optimizer: Optimizer, divisor: Tensor | None, found_inf: Tensor | None, args: Iterable[Any], kwargs: dict[str, Any]
) -> Any:
    """``optimizer.step``, with the gradients divided by ``divisor``, and without effect if ``found_inf`` is 1.

    Waits for ``found_inf`` only if this is SGD's first step with momentum.
    """
    if found_inf is not None and _starts_momentum(optimizer) and found_inf.item():
        # torch's SGD takes the buffers that a skipped first step has not filled for momentum in the next.
        return None
    fused: Any = optimizer
    try:
        fused.grad_scale, fused.found_inf = divisor, found_inf
        return optimizer.step(*args, **kwargs)
    finally:
        del fused.grad_scale, fused.found_inf


def _starts_momentum(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, SGD) and any(
        group["momentum"] != 0 and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


@functools.cache
def _follows(optimizer: type[Optimizer], device: str, dtype: torch.dtype) -> bool:
    """Whether a fused step with both attributes gives what one without gives for gradients that are divided before."""
    try:
        wanted = _parameter_after_a_step(optimizer, device, dtype, gradient=0.5)
        divided = _parameter_after_a_step(optimizer, device, dtype, gradient=8.0, divisor=16.0)
        skipped = _parameter_after_a_step(optimizer, device, dtype, gradient=8.0, divisor=16.0, found_inf=1.0)
        unchanged = torch.ones_like(skipped)
        follows = torch.allclose(divided, wanted, rtol=1e-2, atol=0) and torch.equal(skipped, unchanged)
    except (AssertionError, AttributeError, RuntimeError, TypeError):
        follows = False
    if not follows:
        warnings.warn(
            f"{optimizer.__name__}(fused=True) of torch {torch.__version__} gives wrong values for {dtype} parameters"
            f" on {device}: it is stepped without folding, and should have fused=False",
            stacklevel=4,
        )
    return follows


def _parameter_after_a_step(
    optimizer: type[Optimizer],
    device: str,
    dtype: torch.dtype,
    *,
    gradient: float,
    divisor: float | None = None,
    found_inf: float = 0.0,
) -> Tensor:
    # More elements than a vector register holds, and some left over: the two go through different code.
    parameter = torch.nn.Parameter(torch.ones(67, device=device, dtype=dtype))
    parameter.grad = torch.full_like(parameter, gradient)
    # With such a large eps the step depends on the size of the gradient, as it would not otherwise.
    options: dict[str, Any] = {} if optimizer is SGD else {"eps": 1.0}
    once: Any = optimizer([parameter], lr=0.5, fused=divisor is not None, **options)  # type: ignore[call-arg]
    if divisor is not None:
        once.grad_scale = torch.full((), divisor, device=device)
        once.found_inf = torch.full((), found_inf, device=device)
    once.step()
    return parameter.detach()
