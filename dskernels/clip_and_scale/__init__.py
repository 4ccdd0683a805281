"""The norm of a model's gradients, and their clipping and unscaling, in as few passes over memory as there can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dskernels.checks import wrong_value
from dskernels.clip_and_scale.arguments import prepare, prepare_norm
from dskernels.clip_and_scale.backends import clip_operator, norm_operator
from dskernels.clip_and_scale.schema import clip_and_scale_op, grad_norm_op

__all__ = ["GradNorm", "clip_and_scale_", "grad_norm"]


class GradNorm(NamedTuple):
    """What one read of the gradients tells.

    Attributes:
        total_norm: float32 scalar: the norm of all unscaled gradients together.
        found_inf: float32 scalar: 1 if any element is infinite or NaN, else 0, as torch's fused optimizers take it.
    """

    total_norm: Tensor
    found_inf: Tensor


@torch.no_grad()
def grad_norm(
    grads: Tensor | Iterable[Tensor | None],
    *,
    loss_scale: float | Tensor | None = None,
    norm_type: float = 2.0,
    backend: str | None = None,
) -> GradNorm:
    """The norm of all gradients together, and whether all of them are finite, in one read.

    ``total_norm = (sum over all elements g of |g / loss_scale| ** p) ** (1 / p)``, the largest ``|g / loss_scale|``
    for ``p = inf``.

    Args:
        grads: gradients of any shape ``[...]`` and strides, float32, bfloat16, float16 or float64, mixed, on any
            devices. None is left out and a tensor that comes twice counts once. Of sparse ones (coordinates) the sums
            of entries count. Of a DTensor the whole counts: its processes add up, by one all-reduce for each process
            group over which any is sharded. All of them have to call with their pieces, empty ones too, of the same
            DTensors in the same order. Plain tensors are taken to be the same in every process.
        loss_scale: a positive number, or a tensor of one, by which the loss was multiplied. Default: none.
        norm_type: ``p``, positive, or inf. Default: 2.
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; an explicit choice never falls back. Default:
            `use_backend`, then ``DSKERNELS_BACKEND``, then the first that serves the call.

    Returns:
        A `GradNorm`, on the device of the gradients. Without any gradient 0 and 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit, or a gradient is of another dtype.
        RuntimeError: the backend that was asked for cannot serve the call.

    Backends: ``cpu``, ``cuda`` and ``triton`` (float32, bfloat16, float16, float64, summed in float64), ``reference``
    (any devices, tensor by tensor). ``cuda`` and ``triton`` serve CUDA tensors of one device and never wait for it, so
    that a CUDA graph can hold a call: it repeats it on the same gradients, which have to stay where they were, by the
    same numbers and with the value that a tensor ``loss_scale`` on the device has by then. ``triton`` also serves,
    where it is asked for, tensors on the CPU in its interpreter (``TRITON_INTERPRET=1``).

    Source: the global norm of Pascanu et al., "On the difficulty of training recurrent neural networks", 2013,
    section 3.2.
    """
    if torch.compiler.is_compiling():
        return GradNorm(*grad_norm_op(_listed(grads), _as_tensor(loss_scale), float(norm_type)))
    call = prepare_norm(grads, loss_scale=loss_scale, norm_type=norm_type)
    return GradNorm(*norm_operator.choose(call, backend).run(call))


@torch.no_grad()
def clip_and_scale_(
    grads: Tensor | Iterable[Tensor | None],
    *,
    max_norm: float | None = None,
    loss_scale: float | Tensor | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    backend: str | None = None,
) -> GradNorm:
    """Divides gradients by the loss scale and clips their norm, in place: one read, then one read and write.

    All elements are multiplied by ``min(1, max_norm / (total_norm + 1e-6)) / loss_scale``, with `grad_norm`'s
    ``total_norm``, in float32 (float64 for float64) with one rounding. Nothing is written where that is 1, or where any
    element of any gradient is not finite: then the step has to be skipped, and the gradients are as they were.

    Args:
        grads: as in `grad_norm`.
        max_norm: the largest norm that is left as it is, not below 0. Default: no clipping.
        loss_scale: a positive number, or a tensor of one, by which the loss was multiplied. Default: none.
        norm_type: ``p``, positive, or inf. Default: 2.
        error_if_nonfinite: raise if an element is infinite or NaN; on a GPU that waits for the answer. Default: False.
        backend: as in `grad_norm`.

    Returns:
        A `GradNorm` of the gradients as they came, unscaled: the norm before clipping.

    Raises:
        TypeError, ValueError: as `grad_norm`; also where elements of a gradient share memory, as after ``expand``.
        RuntimeError: with ``error_if_nonfinite``, or the backend that was asked for cannot serve the call.

    Backends: as in `grad_norm`.

    Sources: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, algorithm 1; the loss
    scale of Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    if torch.compiler.is_compiling():
        if error_if_nonfinite:
            raise wrong_value("error_if_nonfinite", "False under torch.compile, which looks at no value", True)
        return GradNorm(*clip_and_scale_op(_listed(grads), max_norm, _as_tensor(loss_scale), float(norm_type)))
    call = prepare(
        grads,
        max_norm=max_norm,
        loss_scale=loss_scale,
        norm_type=norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    return GradNorm(*clip_operator.choose(call, backend).run(call))


def _listed(grads: Tensor | Iterable[Tensor | None]) -> list[Tensor]:
    return [grads] if isinstance(grads, Tensor) else [grad for grad in grads if grad is not None]


def _as_tensor(loss_scale: float | Tensor | None) -> Tensor | None:
    if loss_scale is None or isinstance(loss_scale, Tensor):
        return loss_scale
    return torch.full((), loss_scale, dtype=torch.float64)
