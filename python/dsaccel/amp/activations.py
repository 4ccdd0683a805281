"""Bounds of activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dskernels.checks import is_number, wrong_value

_GRADIENTS = ("true", "straight_through")
# Those of torch without a bound of their own at both sides.
_ACTIVATIONS = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU),
    *(nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish),
)


class ActivationClip(nn.Module):
    """``min(max(x, -limit), limit)``, in training and evaluation alike: what was trained with bounds needs them.

    NaN stays NaN; infinities become ``limit``.

    Args:
        limit: positive. Default: 3.0.
        gradient: ``"true"``: that of `torch.clamp`, 0 outside the bounds. ``"straight_through"``: that of the identity,
            so that what left the bounds can be pulled back. Default: ``"true"``.

    Attributes:
        counts: int64, shape ``[2]``: how many elements have come, and how many were beyond the bounds. It follows the
            device of the inputs and is no part of the state dict. `torch.func` cannot change it from within ``vmap``
            or ``grad``: call `torch.clamp` there.

    Raises:
        ValueError: ``limit`` is not positive and finite, or ``gradient`` neither of the two.

    Sources: Krizhevsky, "Convolutional Deep Belief Networks on CIFAR-10", 2010 (bounded activations); Bengio et al.,
    "Estimating or Propagating Gradients Through Stochastic Neurons", 2013 (straight-through).
    """

    counts: Tensor

    def __init__(self, limit: float = 3.0, *, gradient: str = "true") -> None:
        super().__init__()
        if not is_number(limit) or not 0 < limit < math.inf:
            raise wrong_value("limit", "a positive finite number", limit)
        if gradient not in _GRADIENTS:
            raise wrong_value("gradient", f"one of {', '.join(map(repr, _GRADIENTS))}", repr(gradient))
        self.limit = float(limit)
        self.gradient = gradient
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Bounds ``x``: floating point, any shape."""
        with torch.no_grad():
            if self.counts.device != x.device:
                self.counts = self.counts.to(x.device)
            beyond = (x.abs() > self.limit).sum()
            self.counts += torch.stack((torch.full_like(beyond, x.numel()), beyond))
        if self.gradient == "true":
            return x.clamp(-self.limit, self.limit)
        out: Tensor = _StraightThroughClamp.apply(x, self.limit)
        return out

    @property
    def clipped_fraction(self) -> float:
        """Part of the elements that was beyond the bounds since the last `reset`; NaN before any. Waits for a GPU."""
        came, beyond = self.counts.tolist()
        return beyond / came if came else math.nan

    def reset(self) -> None:
        """Counts from 0 again."""
        self.counts.zero_()

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"{self.limit}, gradient={self.gradient!r}"


class _StraightThroughClamp(torch.autograd.Function):
    # x + (clamp(x) - x).detach() would lose the bound to rounding for large x.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@dataclass(frozen=True)
class ClippedActivations:
    """What `clip_activations` attached; ``print`` lists it.

    Attributes:
        clips: name of each module, as in ``model.named_modules()``, and the `ActivationClip` behind it.
    """

    clips: dict[str, ActivationClip]
    _handles: tuple[RemovableHandle, ...]

    def fractions(self) -> dict[str, float]:
        """`ActivationClip.clipped_fraction` of each."""
        return {name: clip.clipped_fraction for name, clip in self.clips.items()}

    def reset(self) -> None:
        """Lets all count from 0 again."""
        for clip in self.clips.values():
            clip.reset()

    def remove(self) -> None:
        """Takes the bounds off the model again."""
        for handle in self._handles:
            handle.remove()

    def __str__(self) -> str:
        lines = [f"{len(self.clips)} activations bounded"]
        return "\n".join(lines + [f"  {name}: {part:.2%} clipped" for name, part in self.fractions().items()])


class _ClipOutput:
    # A hook that can be copied and pickled with the module.

    def __init__(self, clip: ActivationClip) -> None:
        self.clip = clip

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        out: Tensor = self.clip(output)
        return out


def clip_activations(
    model: nn.Module,
    limit: float = 3.0,
    *,
    gradient: str = "true",
    modules: tuple[type[nn.Module], ...] = _ACTIVATIONS,
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> ClippedActivations:
    """Puts an `ActivationClip` behind activations of ``model``, as forward hooks; in place.

    Args:
        model: any module. Activations that are functions, such as ``F.gelu``, are no modules: name in ``modules`` the
            class whose output to bound, or call `ActivationClip` where the function is called.
        limit, gradient: as in `ActivationClip`.
        modules: classes whose outputs are bounded, each one tensor. Default: torch's activations that are unbounded
            at a side.
        filter: ``filter(name, module)`` says which of them. Default: all.

    Returns:
        The clips by name, with the fractions clipped; its ``remove()`` undoes the call. The copies in a copied model
        count for themselves.

    Raises:
        ValueError: as `ActivationClip`, or nothing in ``model`` is to be bounded.

    Source: as `ActivationClip`.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, modules) and (filter is None or filter(name, module))
    }
    if not found:
        names = ", ".join(cls.__name__ for cls in modules)
        raise wrong_value("modules", "classes that occur in the model and pass the filter", names or "none")
    clips = {name: ActivationClip(limit, gradient=gradient) for name in found}
    handles = (module.register_forward_hook(_ClipOutput(clips[name])) for name, module in found.items())
    return ClippedActivations(clips, tuple(handles))
