"""Cases of products with quantized weights: the sizes of the targets, and some of each scheme.

A weight of 4096 x 4096 takes 8 to 16 MB in codes, which many processors keep in their caches from one call to the
next. In a model all other weights pass through between two uses of the same one. Up to 16 rows, where the weight is
what there is to read, a case therefore comes twice: "warm", with one weight, and "cold", where every contestant has so
many copies of its weight that they take `_FOOTPRINT` bytes together, and each run takes the next one. Warm weights may
be read faster than the ceiling of copying, which is measured in memory.

Every scheme is an approximation of the product with the float weight, and each contestant has one of its own. All are
compared with the product itself, within what rounding to so few bits leaves of normally distributed numbers; ours
also closely with the reference of its scheme.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import dskernels as dk
from benchmarks.case import (
    DTYPES,
    OURS,
    Case,
    Competitor,
    Lane,
    Prepared,
    cuda_options,
    generator_on,
    our_competitors,
    our_notes,
)
from benchmarks.peers import competitors_for

OP = "quantized_matmul"

# About twice what a large server processor's last cache holds; a turn of all others lies between two of a contestant.
# A GPU's calls follow each other, so several times what its cache holds.
_FOOTPRINT, _CUDA_FOOTPRINT = 2**29, 2**28

# Relative root mean square errors that rounding leaves, with room for few values: of weights alone, a scale a row,
# 0.8 %; of both sides 1.2 %, and 2.3 % where rows share a scale and FBGEMM takes 7 bits; of int4 in groups of 128 11 %;
# of e4m3 4 %.
_ROUNDING_ERRORS = {
    "int8_dynamic": 0.03,
    "int8_static": 0.03,
    "int8_weight_only": 0.015,
    "int4_dynamic": 0.15,
    "int4_weight_only": 0.15,
    "fp8_block": 0.05,
}

# Who has kernels for a scheme; the rest is no contest.
_PEERS = {
    "int8_dynamic": ("fbgemm", "linear", "onednn", "ort", "torch_packed", "torchao"),
    "int8_static": ("fbgemm", "linear", "onednn", "ort"),
    "int8_weight_only": ("linear", "ort", "torch_packed", "torchao"),
    "int4_dynamic": ("linear", "ort", "torch_packed"),
    "int4_weight_only": ("linear", "ort", "torch_packed"),
    "fp8_block": ("linear",),
}

_CUDA_PEERS = {
    "int8_dynamic": ("linear", "torch_packed", "torchao"),
    "int8_weight_only": ("linear", "torch_packed", "torchao"),
    "int4_weight_only": ("linear", "torch_packed", "torchao"),
    "fp8_block": ("linear", "scaled_mm"),
}
# The formats in which a GPU can multiply what a scheme has.
_CUDA_RATES = {"int8_dynamic": ("int8", "bf16"), "fp8_block": ("fp8", "bf16")}

# The targets of the design by scheme and rows, set on AVX2 with 2 threads and a weight that a small cache did not hold.
_TARGETS: dict[tuple[str, int], dict[str, float]] = {
    ("int8_dynamic", 1): {"fbgemm": 1.0, "ort": 1.0},
    ("int8_dynamic", 16): {"fbgemm": 1.2, "ort": 1.2},
    ("int8_dynamic", 256): {"fbgemm": 1.1, "ort": 1.1},
    ("int4_dynamic", 1): {"ort": 2.5},
    ("int4_dynamic", 16): {"ort": 1.5},
    ("int4_dynamic", 256): {"ort": 1.5},
    ("int4_weight_only", 1): {"ort": 4.0},
    ("int4_weight_only", 16): {"ort": 1.5},
}

_Weight = TypeVar("_Weight")


class Inputs(NamedTuple):
    """``x [M, K]``, the weight ``[N, K]`` as it was before it was quantized, and in codes of the scheme.

    ``footprint``: bytes that a contestant's copies of the weight have together, at least; 0 for one weight.
    """

    x: Tensor
    weight: Tensor
    quantized: dk.QuantizedWeight
    footprint: int

    def copies(self, make: Callable[[], _Weight], nbytes: int) -> list[_Weight]:
        """As many results of ``make``, which take ``nbytes`` each, as the footprint asks for."""
        return [make() for _ in range(max(1, -(-self.footprint // nbytes)))]

    def step(self, multiply: Callable[[_Weight], Tensor], weights: Sequence[_Weight]) -> Callable[[], list[Tensor]]:
        """The work that is timed, given a function of a weight: each call takes the next one, on and on.

        All of them are used once here, for those who do part of their work when they first meet a weight.
        """
        turn = itertools.cycle(weights)

        def forward() -> list[Tensor]:
            with torch.inference_mode():
                return [multiply(next(turn))]

        for _ in weights:
            forward()
        return forward


@dataclass(frozen=True, kw_only=True)
class MatmulProblem:
    """Sizes of ``[M, K] @ [N, K].T``; ``footprint`` as in `Inputs`."""

    scheme: str
    rows: int
    dtype: str
    out_features: int = 4096
    in_features: int = 4096
    group_size: int = 128
    footprint: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        group = f" g{self.group_size}" if self.scheme.startswith("int4") else ""
        state = "cold" if self.footprint else "warm"
        return f"{self.scheme}{group}, {self.dtype}, M{self.rows} N{self.out_features} K{self.in_features}, {state}"

    @property
    def result_names(self) -> Sequence[str]:
        """What `expected` and every competitor return."""
        return ("out",)

    @property
    def operations(self) -> int:
        """A multiply-add for each row and element of the weight; quantizing is not counted."""
        return 2 * self.rows * self.out_features * self.in_features

    @property
    def weight_bytes(self) -> int:
        """Codes and float32 scales."""
        n, k = self.out_features, self.in_features
        if self.scheme.startswith("int4"):
            return n * -(-k // 2) + 4 * n * -(-k // self.group_size)
        return n * k + 4 * (-(-n // 128) * -(-k // 128) if self.scheme == "fp8_block" else n)

    @property
    def compulsory_bytes(self) -> int:
        """The weight and x read once, out written once."""
        values = self.rows * (self.in_features + self.out_features)
        step = 4 if self.scheme == "int8_static" else 0
        return self.weight_bytes + values * DTYPES[self.dtype].itemsize + step

    @property
    def rounding_error(self) -> float:
        """How far from `expected` a result in few bits may be: relative root mean square error."""
        return _ROUNDING_ERRORS[self.scheme]

    def draw(self) -> Inputs:
        """Normally distributed numbers from a fixed seed; what is static is calibrated on x itself."""
        generator, dtype = generator_on(self.device), DTYPES[self.dtype]
        x = torch.randn(self.rows, self.in_features, generator=generator, device=self.device).to(dtype)
        weight = torch.randn(self.out_features, self.in_features, generator=generator, device=self.device)
        weight = weight.div_(self.in_features**0.5).to(dtype)
        options: dict[str, Any] = {}
        if self.scheme.startswith("int4"):
            options["group_size"] = self.group_size
        elif self.scheme == "int8_static":
            options["input_scale"] = float(x.abs().max()) / 127
        return Inputs(x, weight, dk.quantize_weight(weight, self.scheme, **options), self.footprint)

    def expected(self, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
        """The product with the float weight."""
        return [inputs.x.to(dtype) @ inputs.weight.to(dtype).T]


def _prepare_ours(problem: MatmulProblem, inputs: Inputs) -> Prepared:
    x = inputs.x
    explanation = dk.explain(dk.quantized_matmul, x, inputs.quantized)
    weights = inputs.copies(lambda: copy.deepcopy(inputs.quantized), problem.weight_bytes)
    run = inputs.step(lambda weight: dk.quantized_matmul(x, weight), weights)
    return Prepared(run, {**our_notes(explanation), "weights": len(weights)})


def _by_reference(problem: MatmulProblem, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    return [dk.quantized_matmul(inputs.x.to(dtype), inputs.quantized, backend="reference")]


_OURS = Competitor(
    name=OURS,
    title="dskernels",
    refuses=lambda problem: None,
    prepare=_prepare_ours,
    allowed_error=lambda problem: problem.rounding_error,
    expected=_by_reference,
)


def our_lane(problem: MatmulProblem, name: str = OURS, title: str = "dskernels") -> Lane:
    """Our product as a lane of any name."""
    return Lane(name=name, title=title, problem=problem, competitor=_OURS)


def _against_peers(problem: MatmulProblem) -> Case:
    named = (_PEERS if problem.device == "cpu" else _CUDA_PEERS)[problem.scheme]
    peers = [peer for peer in competitors_for(OP, problem.device) if peer.name in named]
    options: dict[str, Any] = cuda_options(problem, *_CUDA_RATES.get(problem.scheme, ()), launch="queued")
    if problem.device == "cpu":
        options = _cpu_options(problem)
    state = "cold" if problem.footprint else "warm"
    lanes = [
        Lane(name=c.name, title=c.title, problem=problem, competitor=c)
        for c in (*our_competitors(_OURS, problem.device), *peers)
    ]
    return Case(
        op=OP,
        name=f"{problem.scheme}-m{problem.rows}-{state}-{problem.dtype}",
        title=str(problem),
        dtype=problem.dtype,
        lanes=lanes,
        **options,
    )


def _cpu_options(problem: MatmulProblem) -> dict[str, Any]:
    targets = _TARGETS.get((problem.scheme, problem.rows), {}) if problem.dtype == "fp32" else {}
    return {"targets": targets, "seconds": 12.0 if targets else 8.0}


def cases(quick: bool = False) -> list[Case]:
    """All cases, of 4096 x 4096 weights: those with targets, then some of the other schemes and of bfloat16."""
    sizes: dict[str, Any] = {"out_features": 64, "in_features": 1056, "group_size": 32} if quick else {}
    footprint = 2**18 if quick else _FOOTPRINT
    problems = []
    for scheme in ("int8_dynamic", "int4_dynamic", "int4_weight_only"):
        for rows in (1, 16, 256):
            warm = MatmulProblem(scheme=scheme, rows=rows, dtype="fp32", **sizes)
            problems += [warm, replace(warm, footprint=footprint)] if rows <= 16 else [warm]
    for scheme, rows, dtype in (
        ("int8_weight_only", 1, "fp32"),
        ("int8_static", 16, "fp32"),
        ("fp8_block", 1, "fp32"),
        ("int8_dynamic", 16, "bf16"),
        ("int4_weight_only", 1, "bf16"),
    ):
        problems.append(MatmulProblem(scheme=scheme, rows=rows, dtype=dtype, footprint=footprint, **sizes))
    return [_against_peers(problem) for problem in problems]


def cuda_cases(quick: bool = False) -> list[Case]:
    """All schemes that have peers on a GPU, with 8192 x 8192 weights, from one row to where the matrix units count."""
    sizes: dict[str, Any] = {"out_features": 8192, "in_features": 8192, "footprint": _CUDA_FOOTPRINT}
    if quick:
        sizes = {"out_features": 256, "in_features": 1024, "footprint": 2**18}
    # A turn for each scheme, so that all of them have cases where the time does not suffice for all cases.
    schemes = ("int4_weight_only", "int8_dynamic", "fp8_block")
    problems = [
        MatmulProblem(scheme=scheme, rows=rows, dtype="bf16", device="cuda", **sizes)
        for turn in ((1, 1, 1), (16, 32, 16), (64, 256, 256), (256, 4096, 4096))
        for scheme, rows in zip(schemes, turn, strict=True)
    ]
    return [_against_peers(problem) for problem in (*problems, replace(problems[0], scheme="int8_weight_only"))]
