"""Losses that stay finite where torch's are not."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dskernels.checks import shape_of, wrong_type, wrong_value


def label_smoothing_loss(
    logits: Tensor,
    target: Tensor,
    *,
    smoothing: float = 0.1,
    dim: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy against targets of which a part goes to all classes evenly.

    ``loss_i = -sum_c w_c q_ic log softmax(logits_i)_c``, where ``q_ic`` is ``(1 - smoothing) [c = target_i]`` plus
    ``smoothing / A_i`` for each of the ``A_i`` classes whose logit is not -inf. The mean is
    ``sum_i loss_i / sum_i w_target_i``. This is ``F.cross_entropy(..., label_smoothing=smoothing)`` except that

    - classes that are masked by -inf get no part of the smoothing, which would make the loss infinite and its gradient
      NaN. A target that is masked itself still has an infinite loss;
    - where nothing counts (all targets ignored, weighted 0, or none there), the mean is 0 with gradients 0, not NaN;
    - logits of ignored targets do not matter, even if they are NaN;
    - of float16 and bfloat16 logits the loss is computed in float32 and stays so.

    Args:
        logits: floating point, any shape with ``C`` classes in dimension ``dim``.
        target: int64, the shape of ``logits`` without the classes: class indices, or ``ignore_index``. Or floating
            point, the shape of ``logits``: probabilities, of which then none is ignored, and the mean is over all.
        smoothing: part that goes to all classes, from 0 to 1. Default: 0.1.
        dim: the dimension of classes. Default: as torch's: 1, or 0 if there is only one.
        weight: of the classes, floating point, shape ``[C]``. Default: all 1.
        ignore_index: target that does not count. Default: -100.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. Default: ``"mean"``.

    Returns:
        A scalar, or for ``"none"`` the shape of ``logits`` without the classes; float64 for float64 logits, else
        float32.

    Raises:
        TypeError: ``logits`` is not floating point, or ``target`` neither that nor int64.
        ValueError: ``smoothing``, ``dim``, ``reduction`` or a shape is not as said.
        IndexError: a target is no class (on a GPU an assertion of the device).

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7.
    """
    dim = _class_dim(logits, dim)
    _check(logits, target, smoothing, dim, weight, reduction)
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x.movedim(dim, -1)
    w = None if weight is None else weight.to(x)
    if target.is_floating_point():
        losses, counted = _of_probabilities(x, target.movedim(dim, -1).to(x), smoothing, w)
    else:
        losses, counted = _of_classes(x, target, smoothing, w, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    # Where nothing counts, losses are 0 or do not count: divided by infinity both they and their gradients are 0.
    return losses.sum() / torch.where(counted == 0, math.inf, counted)


def _of_classes(
    x: Tensor, target: Tensor, smoothing: float, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    # The losses, in the shape of target, and what the mean divides their sum by.
    ignored = target == ignore_index
    # The gradient of a softmax of NaN is NaN, even where it is multiplied by 0.
    x = x.masked_fill(ignored[..., None], 0)
    log_p = x.log_softmax(-1)
    rows = log_p.reshape(target.numel(), x.shape[-1])
    at_target = F.nll_loss(rows, target.reshape(-1), weight, ignore_index=ignore_index, reduction="none")
    w_target = torch.ones_like(target, dtype=x.dtype) if weight is None else weight[target.masked_fill(ignored, 0)]
    w_target = w_target.masked_fill(ignored, 0)
    # A target of weight 0 has no loss, even if its class is masked.
    losses = (1 - smoothing) * torch.where(w_target == 0, 0, at_target.view(target.shape))
    if smoothing:
        masked = x == -math.inf
        allowed = x.shape[-1] - masked.sum(-1)
        even = log_p.masked_fill(masked, 0)
        even = even.sum(-1) if weight is None else even @ weight
        losses = losses - (smoothing * even / allowed).masked_fill(ignored, 0)
    return losses, w_target.sum()


def _of_probabilities(x: Tensor, target: Tensor, smoothing: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    masked = x == -math.inf
    allowed = x.shape[-1] - masked.sum(-1, keepdim=True)
    q = (1 - smoothing) * target + (smoothing / allowed).masked_fill(masked, 0)
    q = q if weight is None else q * weight
    losses = -torch.where(q == 0, 0, q * x.log_softmax(-1)).sum(-1)
    return losses, torch.tensor(losses.numel(), dtype=x.dtype, device=x.device)


def _class_dim(logits: Tensor, dim: int | None) -> int:
    if not logits.is_floating_point():
        raise wrong_type("logits", "a floating point tensor", logits)
    if logits.dim() == 0:
        raise wrong_value("logits", "at least one dimension", "shape []")
    if dim is None:
        return min(1, logits.dim() - 1)
    if not -logits.dim() <= dim < logits.dim():
        raise wrong_value("dim", f"a dimension of logits of shape {shape_of(logits)}", dim)
    return dim % logits.dim()


def _check(logits: Tensor, target: Tensor, smoothing: float, dim: int, weight: Tensor | None, reduction: str) -> None:
    if not 0 <= smoothing <= 1:
        raise wrong_value("smoothing", "a number from 0 to 1", smoothing)
    if reduction not in ("mean", "sum", "none"):
        raise wrong_value("reduction", "one of 'mean', 'sum', 'none'", repr(reduction))
    if target.dtype != torch.int64 and not target.is_floating_point():
        raise wrong_type("target", "an int64 or a floating point tensor", target)
    shape = logits.shape if target.is_floating_point() else logits.shape[:dim] + logits.shape[dim + 1 :]
    if target.shape != shape:
        raise wrong_value("target", f"shape {list(shape)}", shape_of(target))
    if weight is not None and weight.shape != (logits.shape[dim],):
        raise wrong_value("weight", f"shape {[logits.shape[dim]]}", shape_of(weight))
