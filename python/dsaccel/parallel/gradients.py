"""The norm of gradients that are spread over processes, and their clipping."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from dskernels import GradNorm, clip_and_scale_, grad_norm
from dskernels.checks import is_number, wrong_type, wrong_value


@torch.no_grad()
def total_grad_norm(
    parameters: Iterable[Tensor],
    *,
    copies: Collection[Tensor] = (),
    pipeline: torch.distributed.ProcessGroup | None = None,
    loss_scale: float | Tensor | None = None,
    norm_type: float = 2.0,
) -> GradNorm:
    """The norm of the whole model's gradients, each parameter counted once, and whether all of them are finite.

    Of DTensors the whole counts, by one all-reduce for each process group that shards any; plain tensors are taken to
    be the same in all processes of a stage. Stages of a pipeline have different parameters: their sums are added up by
    one more all-reduce. Nothing waits for the host.

    Args:
        parameters: whose ``.grad`` counts; those without are left out. The same parameters in every process of a stage.
        copies: those of them that an earlier stage counts already, as the head that is tied to the embedding.
        pipeline: one process of each stage. Default: there is one stage.
        loss_scale: by which the loss was multiplied. Default: none.
        norm_type: ``p``, positive, or inf. Default: 2.

    Returns:
        As `dskernels.grad_norm`, the same in every process.
    """
    parameters = list(parameters)
    copied = {id(parameter) for parameter in copies}
    here = grad_norm(
        [parameter.grad for parameter in parameters if id(parameter) not in copied],
        loss_scale=loss_scale,
        norm_type=norm_type,
    )
    if pipeline is None:
        return here
    maximum = math.isinf(norm_type)
    # A stage without any gradient has its zeros on the CPU.
    device = parameters[0].device if parameters else here.total_norm.device
    power = here.total_norm.to(device, torch.float64)
    # The flag travels with the sum; it is no sum's business whether an element was finite.
    both = torch.stack([power if maximum else power**norm_type, here.found_inf.to(power)])
    operation = torch.distributed.ReduceOp.MAX if maximum else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(both, op=operation, group=pipeline)
    total, broken = both.unbind()
    return GradNorm((total if maximum else total ** (1 / norm_type)).float(), broken.clamp(max=1.0).float())


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    copies: Collection[Tensor] = (),
    pipeline: torch.distributed.ProcessGroup | None = None,
    loss_scale: float | Tensor | None = None,
    norm_type: float = 2.0,
) -> GradNorm:
    """Divides gradients by the loss scale and clips the norm of the whole model's, in place.

    All elements are multiplied by ``min(1, max_norm / (total_norm + 1e-6)) / loss_scale``, with `total_grad_norm`'s
    ``total_norm``. Nothing is written in any process where that is 1, or where any element of any gradient is not
    finite.

    Args:
        parameters, copies, pipeline, loss_scale, norm_type: as in `total_grad_norm`. Copies are clipped too.
        max_norm: the largest norm that is left as it is, not below 0.

    Returns:
        As `total_grad_norm`: of the gradients as they came, unscaled.

    Raises:
        TypeError: ``max_norm`` is no number.
        ValueError: ``max_norm`` is negative, or as `dskernels.clip_and_scale_`.
    """
    if not is_number(max_norm):
        raise wrong_type("max_norm", "a number", max_norm)
    if not max_norm >= 0:
        raise wrong_value("max_norm", "a number not below 0", max_norm)
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters]
    if pipeline is None and not copies:
        return clip_and_scale_(grads, max_norm=max_norm, loss_scale=loss_scale, norm_type=norm_type)
    found = total_grad_norm(parameters, copies=copies, pipeline=pipeline, loss_scale=loss_scale, norm_type=norm_type)
    # As a loss scale, so that no stage writes where the factor is 1 or another stage's gradients are broken.
    factor = (max_norm / (found.total_norm.double() + 1e-6)).clamp(max=1.0)
    scale = 1.0 if loss_scale is None else loss_scale
    divisor = torch.where(found.found_inf == 0, scale / factor, 1.0)
    clip_and_scale_(grads, loss_scale=divisor)
    return found
