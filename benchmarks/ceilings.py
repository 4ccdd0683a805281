"""What this machine can do at best, measured in the same rounds as the work that is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SGEMM, COPY = "sgemm", "copy"

# Which size a matrix library likes best differs; the best one is the ceiling.
_SIZES = {"cpu": (1536, 1792, 2048), "cuda": (4096, 8192)}
# Larger than the caches of common machines, so that memory is what is measured.
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
_QUICK_SIZES = (64,)
_QUICK_COPY_BYTES = 2**20


class Ceiling(NamedTuple):
    """A run whose rate is a limit of the machine: bytes for `COPY`, operations for the other kinds."""

    kind: str
    name: str
    operations: int
    bytes: int
    run: Callable[[], Any]


def ceilings(kinds: Sequence[str] = (SGEMM, COPY), device: str = "cpu", *, quick: bool = False) -> list[Ceiling]:
    """Matrix products of several sizes, and a copy (counted as read and written).

    Args:
        kinds: `COPY`; `SGEMM`, float32; on a GPU also ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"fp8"`` (e4m3).
        device: where they run.
        quick: tiny sizes, whose rates mean nothing.
    """
    tops = []
    for kind in kinds:
        if kind == COPY:
            tops.append(_copy(_QUICK_COPY_BYTES if quick else _COPY_BYTES[device], device))
        else:
            tops += [_product(kind, size, device) for size in (_QUICK_SIZES if quick else _SIZES[device])]
    return tops


def _product(kind: str, size: int, device: str) -> Ceiling:
    a, b = (torch.rand(size, size, device=device) for _ in range(2))
    multiply, width = _PRODUCTS[kind](a, b)

    def run() -> None:
        with torch.inference_mode():
            multiply()

    return Ceiling(kind, f"{kind}-{size}", 2 * size**3, 3 * width * size**2, run)


# A function that multiplies, and the bytes of an element.
_Product = tuple[Callable[[], Any], int]


def _sgemm(a: Tensor, b: Tensor) -> _Product:
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 4


def _tf32(a: Tensor, b: Tensor) -> _Product:
    out, settings = torch.empty_like(a), torch.backends.cuda.matmul

    def multiply() -> None:
        before, settings.fp32_precision = settings.fp32_precision, "tf32"
        try:
            torch.mm(a, b, out=out)
        finally:
            settings.fp32_precision = before

    return multiply, 4


def _half(dtype: torch.dtype) -> Callable[[Tensor, Tensor], _Product]:
    def make(a: Tensor, b: Tensor) -> _Product:
        half_a, half_b = a.to(dtype), b.to(dtype)
        out = torch.empty_like(half_a)
        return lambda: torch.mm(half_a, half_b, out=out), 2

    return make


def _int8(a: Tensor, b: Tensor) -> _Product:
    codes_a, codes_b = (x.mul(127).to(torch.int8) for x in (a, b))
    return lambda: torch._int_mm(codes_a, codes_b.T), 1


def _fp8(a: Tensor, b: Tensor) -> _Product:
    codes_a, codes_b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(codes_a, codes_b.T, one, one, out_dtype=torch.bfloat16), 1


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], _Product]] = {
    SGEMM: _sgemm,
    "tf32": _tf32,
    "bf16": _half(torch.bfloat16),
    "fp16": _half(torch.float16),
    "int8": _int8,
    "fp8": _fp8,
}


def _copy(size: int, device: str) -> Ceiling:
    source, target = (torch.full((size,), value, dtype=torch.uint8, device=device) for value in (1, 0))
    return Ceiling(COPY, f"{COPY}-{size >> 20}MiB", 0, 2 * size, lambda: target.copy_(source))
