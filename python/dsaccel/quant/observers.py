"""Observers: what range the activations of a layer have, for the step of their codes.

Their statistics are buffers, in the state dict under the observer's name. All but the histograms see a batch once and
keep one number, or one a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsaccel.quant.codes import keep_dtypes
from dskernels.checks import is_integer, is_number, shape_of, wrong_type, wrong_value

LARGEST_CODE = 127.0
_SMALLEST_STEP = 2.0**-126


class Observer(nn.Module):
    """What observers share: calling one with a batch takes it in, and `step` says what follows from all batches.

    Attributes:
        batches: int64 ``[]``, how many batches were taken in; those with no elements do not count.
    """

    per_channel = False
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def forward(self, x: Tensor) -> None:
        """Takes in ``x``, floating point of any shape.

        Raises:
            ValueError: ``x`` has values that are not finite.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise wrong_type("x", "a floating point tensor", x)
        if x.numel() == 0:
            return
        if not bool(x.isfinite().all()):
            raise wrong_value("x", "finite values", f"{int((~x.isfinite()).sum())} of {shape_of(x)} that are not")
        self.update(x.detach())

    def update(self, x: Tensor) -> None:
        """Takes in a batch that has elements, all of them finite."""
        raise NotImplementedError

    def clip(self) -> Tensor:
        """The magnitude that gets the largest code: float32 ``[]``, or ``[C]`` per channel."""
        raise NotImplementedError

    def step(self) -> Tensor:
        """``clip / 127``, at least ``2**-126``: the step between codes, float32 ``[]``, or ``[C]`` per channel.

        NaN as long as no batch was taken in.
        """
        step = (self.clip() / LARGEST_CODE).clamp(min=_SMALLEST_STEP)
        return torch.where(self.batches > 0, step, torch.nan)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Statistics are moved, not cast.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        keep_dtypes(self, before)
        return self


class MinMaxObserver(Observer):
    """The largest magnitude of all values: nothing that was seen is clipped.

    Symmetric codes need no minimum: ``clip = max(|x|)`` over all batches.
    """

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def update(self, x: Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, x.abs().amax().float()))
        self.batches += 1

    def clip(self) -> Tensor:
        return self.largest


class MovingAverageObserver(Observer):
    """The exponential moving average of the largest magnitudes of batches.

    ``clip = decay * clip + (1 - decay) * max(|x|)``, and ``max(|x|)`` after the first batch.

    Args:
        decay: between 0 and 1. Default: 0.99.

    Raises:
        TypeError, ValueError: ``decay`` is no number between 0 and 1.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, section 3.1.
    """

    average: Tensor

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = checked_decay(decay)
        self.register_buffer("average", torch.zeros(()))

    def update(self, x: Tensor) -> None:
        largest = x.abs().amax().float()
        moved = torch.where(self.batches > 0, torch.lerp(largest, self.average, self.decay), largest)
        # In training, where this is called for every batch, one with an infinity must not be the end of the average.
        finite = largest.isfinite()
        self.average.copy_(torch.where(finite, moved, self.average))
        self.batches += finite

    def clip(self) -> Tensor:
        return self.average


class PerChannelMinMaxObserver(Observer):
    """The largest magnitude for each index of one dimension, over all batches.

    It shows which channels stand out. `convert` takes no such observer: ``int8_static`` has one step for all of a
    tensor.

    Args:
        dim: the dimension. Default: -1.

    Raises:
        TypeError: ``dim`` is no int.
    """

    per_channel = True
    largest: Tensor

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = _checked_dim(dim)
        self.register_buffer("largest", torch.zeros(0))

    def update(self, x: Tensor) -> None:
        largest = _largest_of_channels(x, self.dim, self.largest, bool(self.batches))
        self.largest = torch.maximum(self.largest, largest) if self.batches else largest
        self.batches += 1

    def clip(self) -> Tensor:
        return self.largest

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        _resize(self, "largest", state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[arg-type]


class PerChannelMovingAverageObserver(Observer):
    """The moving average of the largest magnitudes of batches, for each index of one dimension.

    As `MovingAverageObserver`; for the dimension, and for what it is good for, see `PerChannelMinMaxObserver`.

    Args:
        dim: the dimension. Default: -1.
        decay: between 0 and 1. Default: 0.99.

    Raises:
        TypeError, ValueError: ``dim`` is no int, or ``decay`` no number between 0 and 1.
    """

    per_channel = True
    average: Tensor

    def __init__(self, dim: int = -1, decay: float = 0.99) -> None:
        super().__init__()
        self.dim = _checked_dim(dim)
        self.decay = checked_decay(decay)
        self.register_buffer("average", torch.zeros(0))

    def update(self, x: Tensor) -> None:
        largest = _largest_of_channels(x, self.dim, self.average, bool(self.batches))
        self.average = torch.lerp(largest, self.average, self.decay) if self.batches else largest
        self.batches += 1

    def clip(self) -> Tensor:
        return self.average

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        _resize(self, "average", state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[arg-type]


def checked_decay(decay: float) -> float:
    """``decay``, if it is a number between 0 and 1.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not is_number(decay):
        raise wrong_type("decay", "a number", decay)
    if not 0 <= decay < 1:
        raise wrong_value("decay", "a number from 0 to below 1", decay)
    return float(decay)


def _checked_dim(dim: int) -> int:
    if not is_integer(dim):
        raise wrong_type("dim", "an int", dim)
    return dim


def _largest_of_channels(x: Tensor, dim: int, so_far: Tensor, seen: bool) -> Tensor:
    if not -x.dim() <= dim < x.dim():
        raise wrong_value("x", f"a tensor with a dimension {dim}", shape_of(x))
    if seen and x.shape[dim] != so_far.shape[0]:
        raise wrong_value("x", f"size {so_far.shape[0]} of dimension {dim}, as before", shape_of(x))
    return x.abs().movedim(dim, 0).flatten(1).amax(1).float()


def _resize(observer: Observer, name: str, state_dict: dict[str, Tensor], prefix: str) -> None:
    # How many channels there are shows with the first batch, or with what is loaded.
    value = state_dict.get(prefix + name)
    if isinstance(value, Tensor):
        setattr(observer, name, getattr(observer, name).new_zeros(value.shape))
