"""The operators ``dskernels::grad_norm`` and ``dskernels::clip_and_scale_``, as a compiled graph holds them.

Eager code does not come here: it would hand every gradient to the dispatcher. When a graph runs, the operators do what
eager code does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dskernels._library import LIBRARY, define
from dskernels.clip_and_scale.arguments import prepare, prepare_norm
from dskernels.clip_and_scale.backends import clip_operator, norm_operator

grad_norm_op = define("grad_norm", "(Tensor[] grads, Tensor? loss_scale, float norm_type) -> (Tensor, Tensor)")
clip_and_scale_op = define(
    "clip_and_scale_",
    "(Tensor(a!)[] grads, float? max_norm, Tensor? loss_scale, float norm_type) -> (Tensor, Tensor)",
)


def _grad_norm(grads: Sequence[Tensor], loss_scale: Tensor | None, norm_type: float) -> tuple[Tensor, Tensor]:
    call = prepare_norm(grads, loss_scale=loss_scale, norm_type=norm_type)
    result: tuple[Tensor, Tensor] = norm_operator.choose(call, None).run(call)
    return result


def _clip_and_scale_(
    grads: Sequence[Tensor], max_norm: float | None, loss_scale: Tensor | None, norm_type: float
) -> tuple[Tensor, Tensor]:
    call = prepare(grads, max_norm=max_norm, loss_scale=loss_scale, norm_type=norm_type)
    result: tuple[Tensor, Tensor] = clip_operator.choose(call, None).run(call)
    return result


LIBRARY.impl("grad_norm", _grad_norm, "CompositeExplicitAutograd")
LIBRARY.impl("clip_and_scale_", _clip_and_scale_, "CompositeExplicitAutograd")


@torch.library.register_fake(grad_norm_op, lib=LIBRARY)
@torch.library.register_fake(clip_and_scale_op, lib=LIBRARY)
def _fake(grads: Sequence[Tensor], *options: object) -> tuple[Tensor, Tensor]:
    device = next((grad.device for grad in grads if grad.device.type != "cpu"), torch.device("cpu"))
    return torch.empty((), device=device), torch.empty((), device=device)
