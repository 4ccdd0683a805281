"""Peak memory of one lane: on the CPU in a process of its own, ``python -m benchmarks.memory OP CASE LANE``, for Linux.

A GPU's allocator counts for itself, so a lane is measured there in this process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import cuda
from benchmarks.case import Case, Lane
from benchmarks.ops import cases_of

_ROOT = Path(__file__).parent.parent


class Memory(NamedTuple):
    """Bytes of resident memory, or of tensors on a GPU.

    Attributes:
        peak: inputs, results and all that was needed in between, at their highest.
        scratch: the part of it that is neither input nor result.
    """

    peak: int
    scratch: int


def peak_memory(case: Case, lane: Lane, *, quick: bool = False) -> Memory:
    """Measures a lane anew.

    Raises:
        RuntimeError: it failed.
    """
    if case.device == "cuda":
        return _of_gpu(lane)
    command = [sys.executable, "-m", "benchmarks.memory", case.op, case.name, lane.name]
    command += ["--threads", str(torch.get_num_threads()), *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"memory of {case.name}, {lane.name}: {done.stderr.strip() or done.returncode}")
    return Memory(*json.loads(done.stdout))


def measure(op: str, case_name: str, lane_name: str, *, quick: bool = False) -> Memory:
    """Measures a lane in this process."""
    # A tiny call first: what libraries and threads take once does not belong to the work.
    tiny = _case(op, case_name, quick=True).lanes[0]
    tiny.competitor.prepare(tiny.problem, tiny.problem.draw()).run()
    lane = next(lane for lane in _case(op, case_name, quick=quick).lanes if lane.name == lane_name)
    before = _resident()
    inputs = lane.problem.draw()
    run = lane.competitor.prepare(lane.problem, inputs).run
    with_inputs = _resident()
    # From here on the kernel keeps a new maximum.
    Path("/proc/self/clear_refs").write_text("5")
    results = run()
    highest = _status("VmHWM")
    result_bytes = sum(result.nbytes for result in results)
    return Memory(highest - before, max(0, highest - with_inputs - result_bytes))


def _of_gpu(lane: Lane) -> Memory:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = lane.competitor.prepare(lane.problem, lane.problem.draw()).run
    # What a library keeps once it has been used counts, and what it needed to get there does not.
    result_bytes = sum(result.nbytes for result in run())
    with_inputs = torch.cuda.memory_allocated()
    scratch = cuda.scratch_bytes(run)
    return Memory(with_inputs - before + result_bytes + scratch, scratch)


def _case(op: str, name: str, *, quick: bool) -> Case:
    return next(case for case in cases_of(op, quick=quick) if case.name == name)


def _resident() -> int:
    # Memory that was freed, yet kept by the allocator, would hide what the run takes from there.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _status("VmRSS")


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {key}")
    return int(found[1]) * 1024


def main(arguments: list[str] | None = None) -> int:
    """Prints a `Memory` as a JSON list."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("op")
    parser.add_argument("case")
    parser.add_argument("lane")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options.op, options.case, options.lane, quick=options.quick)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
