"""Which precision autocast gets on a device, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from dsaccel.amp.fp32 import KeptFP32, keep_fp32

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PrecisionChoice(NamedTuple):
    """What an `AutocastPolicy` came to; ``print`` says it in a line.

    Attributes:
        device: device type, such as ``"cuda"``.
        dtype: of matrix products under autocast; float32 means that autocast stays off.
        reason: why this one.
    """

    device: str
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class AutocastPolicy:
    """`torch.autocast` with a dtype that the device supports::

        policy = AutocastPolicy()
        print(policy.choice)  # bfloat16 on cuda: its hardware has it
        with policy.autocast():  # or, above a function, @policy.autocast()
            loss = model(x)

    Without a ``dtype``: on CUDA and XPU bfloat16 where the hardware has it, else float16; on a CPU bfloat16 where it
    has AVX-512, for which torch's matrix products in bfloat16 are made, else float32; on other devices torch's default;
    float32 where there is no autocast.

    Args:
        dtype: bfloat16, float16 or float32 (no autocast). Default: by the device.
        device: device or its type. Default: the accelerator if there is one, else ``"cpu"``.
        enabled: False leaves everything in float32. Default: True.
        keep: classes of modules that `prepare` keeps in float32, beside norms and softmaxes. Default: none.
        cache: keep the casts of weights until the outermost autocast ends, as in `torch.autocast`. Default: True.

    Raises:
        ValueError: ``dtype`` is none of the three.
        RuntimeError: (when `choice` is asked) an explicit half-precision ``dtype`` on a device that is not there or has
            no autocast for it.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; the lists of operators are those of `torch.amp`.
    """

    dtype: torch.dtype | None = None
    device: str | torch.device | None = None
    enabled: bool = True
    keep: tuple[type[nn.Module], ...] = ()
    cache: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(f"dtype: expected one of {', '.join(map(str, _DTYPES))} or None, got {self.dtype}")

    @property
    def choice(self) -> PrecisionChoice:
        """Device, dtype and reason."""
        device = self.device
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        device = torch.device(device).type
        if not self.enabled:
            return PrecisionChoice(device, torch.float32, "enabled is False")
        if self.dtype == torch.float32:
            return PrecisionChoice(device, torch.float32, "asked for")
        missing = _why_no_autocast(device)
        if self.dtype is None:
            return PrecisionChoice(device, torch.float32, missing) if missing else _by_device(device)
        if missing:
            raise RuntimeError(f"dtype: expected float32 or None on {device} ({missing}), got {self.dtype}")
        return PrecisionChoice(device, self.dtype, "asked for")

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether gradients can fall below the range of the dtype, as those of float16 do: then use a loss scaler."""
        return self.choice.dtype == torch.float16

    def autocast(self) -> torch.autocast:
        """A new `torch.autocast` by this policy: for a ``with`` statement, or to decorate a function with."""
        device, dtype, _ = self.choice
        if dtype == torch.float32:
            # "cpu" where the device has none: a context that does nothing needs a device that has.
            available = torch.amp.is_autocast_available(device)
            return torch.autocast(device if available else "cpu", enabled=False)
        return torch.autocast(device, dtype, cache_enabled=self.cache)

    def prepare(self, model: nn.Module) -> KeptFP32:
        """``keep_fp32(model, also=keep)``: what must be float32 is, under autocast as in a half-precision model."""
        return keep_fp32(model, also=self.keep)


def _why_no_autocast(device: str) -> str | None:
    if not torch.amp.is_autocast_available(device):
        return "torch has no autocast for it"
    module = getattr(torch, device, None)
    return None if module is not None and module.is_available() else "there is none"


def _by_device(device: str) -> PrecisionChoice:
    if device in ("cuda", "xpu"):
        if torch.get_device_module(device).is_bf16_supported(including_emulation=False):
            return PrecisionChoice(device, torch.bfloat16, "its hardware has it")
        return PrecisionChoice(device, torch.float16, "its hardware has no bfloat16; needs loss scaling")
    if device == "cpu":
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            return PrecisionChoice(device, torch.bfloat16, "the processor has AVX-512")
        return PrecisionChoice(device, torch.float32, "bfloat16 would be slower: the processor has no AVX-512")
    return PrecisionChoice(device, torch.get_autocast_dtype(device), "torch's default there")
