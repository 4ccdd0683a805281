"""Random masking: parts of the input are hidden while training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dskernels.checks import is_number, shape_of, wrong_type, wrong_value

_SHARED = ("element", "token", "feature")


def random_mask(
    x: Tensor,
    p: float = 0.15,
    *,
    per: str = "element",
    value: float = 0.0,
    scale: bool = False,
    protect: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Replaces random parts of ``x`` by ``value``, each with probability ``p``.

    ``y = where(masked, value, x * s)`` with ``s = 1 / (1 - p)`` if ``scale``, else 1. What is masked gets no gradient,
    the rest ``s`` times its own. Token ids are masked the same way: ``random_mask(ids, value=mask_id)``.

    Args:
        x: ``[..., N, C]``, or token ids of an integer dtype and any shape.
        p: from 0 to 1. Default: 0.15.
        per: what is masked as a whole: ``"element"``; ``"token"``, all ``C`` features of it; ``"feature"``, in all
            ``N`` tokens. Default: ``"element"``.
        value: what stands where something is masked. Default: 0.
        scale: keep the expectation of ``x``, if ``value`` is 0, as dropout does. Default: False: unmasked values pass
            as they are, so that nothing changes between training and use but the masking itself.
        protect: bool, broadcastable to ``x``: what passes as it is, such as padding and special tokens. Default: none.
        generator: on the device of ``x``. Default: torch's own.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        TypeError: ``scale`` with an integer ``x``, or ``protect`` is not bool.
        ValueError: ``p`` is outside 0 to 1, ``per`` is none of the three or needs more dimensions than ``x`` has, or
            ``protect`` has a shape that does not broadcast.

    Source: Devlin et al., "BERT", 2019, section 3.1 (its 15 %; all of them become ``value`` here).
    """
    _check(p, per)
    least = {"element": 0, "token": 1, "feature": 2}[per]
    if x.dim() < least:
        raise wrong_value("x", f"at least {least} dimensions for per={per!r}", f"shape {shape_of(x)}")
    if scale and not x.is_floating_point():
        raise wrong_type("x", "a floating point tensor with scale=True", x)
    shape = list(x.shape)
    if per == "token":
        shape[-1] = 1
    elif per == "feature":
        shape[-2] = 1
    masked = torch.rand(shape, device=x.device, generator=generator) < p
    out = (x / (1 - p) if scale and p < 1 else x).masked_fill(masked, value)
    return out if protect is None else torch.where(_broadcastable(protect, x), x, out)


class RandomMask(nn.Module):
    """`random_mask` in training; in evaluation the input as it is.

    Args:
        p, per, value, scale, generator: as in `random_mask`, with its defaults.

    Raises:
        ValueError: ``p`` is outside 0 to 1, or ``per`` is none of the three.

    Source: as `random_mask`.
    """

    def __init__(
        self,
        p: float = 0.15,
        *,
        per: str = "element",
        value: float = 0.0,
        scale: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check(p, per)
        self.p = p
        self.per = per
        self.value = value
        self.scale = scale
        self.generator = generator

    def forward(self, x: Tensor, protect: Tensor | None = None) -> Tensor:
        """Masks ``x``; shapes, ``protect`` and errors as in `random_mask`."""
        if not self.training:
            return x
        return random_mask(
            x,
            self.p,
            per=self.per,
            value=self.value,
            scale=self.scale,
            protect=protect,
            generator=self.generator,
        )

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"p={self.p}, per={self.per!r}, value={self.value}, scale={self.scale}"


def _check(p: float, per: str) -> None:
    if not is_number(p) or not 0 <= p <= 1:
        raise wrong_value("p", "a number from 0 to 1", p)
    if per not in _SHARED:
        raise wrong_value("per", f"one of {', '.join(map(repr, _SHARED))}", repr(per))


def _broadcastable(protect: Tensor, x: Tensor) -> Tensor:
    if protect.dtype != torch.bool:
        raise wrong_type("protect", "a bool tensor", protect)
    try:
        return protect.expand(x.shape)
    except RuntimeError:
        raise wrong_value(
            "protect", f"a shape that broadcasts to that of x, {shape_of(x)}", shape_of(protect)
        ) from None
