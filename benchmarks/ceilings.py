"""What this machine can do at best, measured in the same rounds as the work that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SGEMM, COPY = "sgemm", "copy"

# Which size a matrix library likes best differs; the best one is the ceiling.
_SGEMM_SIZES = (1536, 1792, 2048)
# Larger than the caches of common machines, so that memory is what is measured.
_COPY_BYTES = 2**28
_QUICK_SGEMM_SIZES = (64,)
_QUICK_COPY_BYTES = 2**20


class Ceiling(NamedTuple):
    """A run whose rate is a limit of the machine: operations for `SGEMM`, bytes for `COPY`."""

    kind: str
    name: str
    operations: int
    bytes: int
    run: Callable[[], Any]


def ceilings(*, quick: bool = False) -> list[Ceiling]:
    """Float32 matrix products of several sizes, and a copy (counted as read and written)."""
    products = [_sgemm(size) for size in (_QUICK_SGEMM_SIZES if quick else _SGEMM_SIZES)]
    return [*products, _copy(_QUICK_COPY_BYTES if quick else _COPY_BYTES)]


def _sgemm(size: int) -> Ceiling:
    a, b, out = (torch.rand(size, size) for _ in range(3))

    def multiply() -> None:
        with torch.inference_mode():
            torch.mm(a, b, out=out)

    return Ceiling(SGEMM, f"{SGEMM}-{size}", 2 * size**3, 3 * 4 * size**2, multiply)


def _copy(size: int) -> Ceiling:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return Ceiling(COPY, f"{COPY}-{size >> 20}MiB", 0, 2 * size, lambda: target.copy_(source))
