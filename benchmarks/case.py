"""What a benchmark is made of: a problem, those who solve it, and what the result is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

import dskernels as dk
from benchmarks.ceilings import COPY, SGEMM
from dskernels._registry import Explanation

# Ourselves as automatic choice serves a call, and on a GPU our Triton kernels beside it.
OURS, TRITON = "dskernels", "triton"
DEVICES = ("cpu", "cuda")
Launch = Literal["flushed", "queued", "eager"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Problem(Protocol):
    """One piece of work of fixed sizes, counted by formula. Problems are equal when their sizes are."""

    dtype: str
    device: str
    result_names: Sequence[str]

    @property
    def operations(self) -> int:
        """Useful operations; a multiply-add counts 2."""

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that must move whatever the algorithm: each input read once, each result written once."""

    def draw(self) -> Any:
        """The inputs on ``device``, the same on every call."""

    def expected(self, inputs: Any, dtype: torch.dtype) -> list[Tensor]:
        """The results by the reference, computed in ``dtype`` from the inputs as they are."""


Results = Sequence[Tensor]


@dataclass(frozen=True)
class Prepared:
    """A competitor ready to be timed.

    Attributes:
        run: does the work once and returns the results, in the order of ``Problem.result_names``.
        notes: what a reader of the results should know, such as the block size that a peer chose.
        comparable: brings what ``run`` returned into the form of ``Problem.expected``, outside the timing. Default: it
            has that form.
        own_threads: it works in threads of its own, not in those of torch.
    """

    run: Callable[[], Results]
    notes: Mapping[str, Any] = field(default_factory=dict)
    comparable: Callable[[Results], Results] = lambda results: results
    own_threads: bool = False


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """One way to do an operator's work.

    Attributes:
        name: how options, targets and results call it.
        title: how tables call it.
        refuses: the reason why it cannot take a problem here, or None.
        prepare: does all that is not part of the work (masks, tables, compilation), outside the timing.
        allowed_error: relative root mean square error that it may have in a problem, where that is more than peers may
            have.
        expected: for our own work where it approximates ``Problem.expected``: what its reference gives for a problem,
            inputs and dtype. Results are held closely to this, and within ``allowed_error`` to the problem's.
        devices: where it can run at all; elsewhere it is no peer, and nobody misses it.
    """

    name: str
    title: str
    refuses: Callable[[Any], str | None]
    prepare: Callable[[Any, Any], Prepared]
    allowed_error: Callable[[Any], float] = lambda problem: 0.0
    expected: Callable[[Any, Any, torch.dtype], list[Tensor]] | None = None
    devices: Sequence[str] = DEVICES

    @property
    def ours(self) -> bool:
        """Whether it is our own work, and held to the tolerances of our tests."""
        return self.name in (OURS, TRITON)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A competitor on a problem: what is timed in turn with the other lanes of its case."""

    name: str
    title: str
    problem: Any
    competitor: Competitor


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lanes that are timed in turn, and what their ratios are held to.

    Attributes:
        op: the operator.
        name: how options and results call the case.
        title: how tables call it.
        dtype: a key of `DTYPES`.
        lanes: the contestants; one that is not there is reported, not left out.
        baseline: name of the lane that the others are divided by.
        targets: for a lane, how many times the baseline's time it must take at least; for ``"sgemm"`` and ``"copy"``,
            the share of that ceiling that the baseline must reach at least. None are set for a GPU.
        limits: for a lane, how many times the baseline's time it may take at most; in a sweep, its memory, too.
        sweep: what changes from lane to lane, for plots: the axis and a value for each lane.
        device: where it runs.
        seconds: time that it is given, unless the command line says another.
        ceilings: the kinds of `benchmarks.ceilings` that are measured beside it.
        launch: how a GPU is timed, see `benchmarks.cuda.CudaClock`.
    """

    op: str
    name: str
    title: str
    dtype: str
    lanes: Sequence[Lane]
    baseline: str = OURS
    targets: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    sweep: tuple[str, tuple[int, ...]] | None = None
    device: str = "cpu"
    seconds: float = 20.0
    ceilings: Sequence[str] = (SGEMM, COPY)
    launch: Launch = "flushed"


# Compiling and verifying take most of the time of a run on a GPU, and its turns are short.
_CUDA_SECONDS = 2.0
# fp32 is multiplied in three products of TF32.
_CUDA_RATES = {"fp32": (SGEMM, "tf32"), "bf16": ("bf16",), "fp16": ("fp16",)}


def cuda_options(problem: Any, *rates: str, launch: Launch = "flushed") -> dict[str, Any]:
    """Fields of a `Case` on a GPU: its ceilings, which are ``rates`` or those of the dtype, and how it is timed."""
    kinds = (*(rates or _CUDA_RATES[problem.dtype]), COPY)
    return {"device": problem.device, "seconds": _CUDA_SECONDS, "ceilings": kinds, "launch": launch}


def generator_on(device: str) -> torch.Generator:
    """What the inputs of a problem on ``device`` are drawn from."""
    return torch.Generator(device).manual_seed(0)


def our_notes(explanation: Explanation) -> dict[str, Any]:
    """What serves a call of ours."""
    tier = {} if explanation.chosen in ("cuda", "triton") else {"tier": dk.build_info()["cpu_tier"]}
    return {"backend": explanation.chosen, **tier}


def our_competitors(ours: Competitor, device: str) -> list[Competitor]:
    """``ours`` and, on a GPU, the same on Triton's backend."""
    return [ours] if device == "cpu" else [ours, _on_triton(ours)]


def _on_triton(ours: Competitor) -> Competitor:
    def prepare(problem: Any, inputs: Any) -> Prepared:
        with dk.use_backend(TRITON):
            prepared = ours.prepare(problem, inputs)

        def run() -> Results:
            with dk.use_backend(TRITON):
                return prepared.run()

        return replace(prepared, run=run)

    return replace(ours, name=TRITON, title=f"{ours.title}, Triton", prepare=prepare)
