"""Sizes and times of models."""

from __future__ import annotations

import io
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dskernels import build_info


def saved_bytes(module: nn.Module) -> int:
    """Bytes of the state dict as `torch.save` writes it; what is shared is there once."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getbuffer().nbytes


def seconds_in_turns(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Times several things in turns, so that whatever else the machine does slows all of them alike.

    Args:
        work: by name, what to call.
        rounds: how often each is timed, after one call that is not.

    Returns:
        For each name, seconds by round.
    """
    for call in work.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def speed(seconds: Mapping[str, list[float]], name: str, first: str, amount: float) -> tuple[float, float]:
    """How many of ``amount`` a second (by the median), and how many times as fast as ``first``.

    The second is the median of the ratios within the rounds, which drift of the machine does not touch.
    """
    ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
    return amount / statistics.median(seconds[name]), statistics.median(ratios)


def with_torch_dynamic(model: nn.Module) -> nn.Module | None:
    """A copy of ``model`` after torch's own ``quantize_dynamic`` (FBGEMM), or None where torch has it no more."""
    try:
        from torch.ao.quantization import quantize_dynamic
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is deprecated, and still what most people run.
        quantized: nn.Module = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return quantized


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = build_info()
    return {
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "cpu_tier": info["cpu_tier"],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
