"""How much memory a forward keeps for its backward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dsaccel.checkpoint._saved import Counter, Kept, counters
from dskernels.checks import wrong_type


@dataclass
class MemoryReport:
    """What `memory_report` found; ``print`` shows it. All but ``summary`` are bytes.

    Attributes:
        saved_bytes: the most that tensors saved for backward held at a time: parameters apart, each storage counted
            once and as a whole, as long as something saved refers to it.
        held_bytes: the most that saved tensors held of parameters, and of buffers of the model: memory that is there
            anyway.
        offloaded_bytes: the most that waited in the memory of the CPU because of `offload_activations`.
        peak_rss: the most of the CPU's memory that the process has held so far; None where the system does not tell.
        rss_growth: by how much ``peak_rss`` rose: 0 if the process had held more before. None as ``peak_rss``.
        peak_allocated: the most that tensors on the current CUDA device held at a time, `torch.cuda`'s
            ``max_memory_allocated``; None where CUDA has not been used.
        peak_reserved: the most that torch took from that device for tensors, ``max_memory_reserved``; None likewise.
        summary: `torch.cuda.memory_summary`, abbreviated; None likewise.
    """

    saved_bytes: int = 0
    held_bytes: int = 0
    offloaded_bytes: int = 0
    peak_rss: int | None = None
    rss_growth: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    summary: str | None = None

    def __str__(self) -> str:
        lines = [
            ("saved for backward", self.saved_bytes),
            ("parameters among it", self.held_bytes),
            ("offloaded to the CPU", self.offloaded_bytes),
            ("peak RSS of the process", self.peak_rss),
            ("peak allocated on CUDA", self.peak_allocated),
            ("peak reserved on CUDA", self.peak_reserved),
        ]
        return "\n".join(f"{label:<24} {as_mebibytes(size)}" for label, size in lines if size is not None)


@contextlib.contextmanager
def memory_report(model: nn.Module | None = None) -> Iterator[MemoryReport]:
    """Counts what autograd keeps from forward to backward while the context is open::

        with memory_report(model) as report:
            loss = model(x).sum()
            loss.backward()
        print(report)

    The counts are exact for what is saved through `torch.autograd`, and by `checkpoint_blocks`; torch's hooks on saved
    tensors do the counting, and edits in between are found as without hooks. Of nested hooks torch calls the innermost
    only: enter this context outside of `offload_activations`, which tells what it moves. What a block computes again
    in backward is not counted: `estimate` says how much that is.

    On CUDA the peaks of the allocator are set back at the beginning (``torch.cuda.reset_peak_memory_stats``).

    Args:
        model: whose buffers are counted with the parameters. Default: none.

    Yields:
        The report, filled in at the end of the context.

    Raises:
        TypeError: ``model`` is no module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise wrong_type("model", "a module or None", model)
    report, rss = MemoryReport(), _peak_rss()
    # Asked this way, CUDA is not started for a report.
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with counting(model) as counter:
        try:
            yield report
        finally:
            report.saved_bytes, report.held_bytes = counter.saved.peak, counter.held.peak
            report.offloaded_bytes = counter.offloaded.peak
            report.peak_rss = _peak_rss()
            if rss is not None and report.peak_rss is not None:
                report.rss_growth = report.peak_rss - rss
            if torch.cuda.is_initialized():
                report.peak_allocated = torch.cuda.max_memory_allocated()
                report.peak_reserved = torch.cuda.max_memory_reserved()
                report.summary = torch.cuda.memory_summary(abbreviated=True)


@contextlib.contextmanager
def counting(model: nn.Module | None) -> Iterator[Counter]:
    """A counter of all that is saved inside, parameters and buffers of ``model`` apart."""
    counter = Counter(() if model is None else itertools.chain(model.parameters(), model.buffers()))
    counters.append(counter)
    try:
        with torch.autograd.graph.saved_tensors_hooks(Kept, Kept.unpack):
            yield counter
    finally:
        counters.remove(counter)


def as_mebibytes(size: int) -> str:
    """``size`` bytes in MiB, for tables."""
    return f"{size / 2**20:,.1f} MiB"


def _peak_rss() -> int | None:
    # Not getrusage, which begins with what the parent process held.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024
