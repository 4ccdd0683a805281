"""Timing and memory of a GPU, and what it is."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.case import Launch

# As many calls to a pair of events, and as many pairs to a turn, as these hold.
_PAIR_SECONDS, _MOST_LAUNCHES = 1e-3, 50
_TURN_SECONDS, _MOST_PAIRS = 0.02, 10

# A GPU that has to wait for longer than this is not kept waiting so that its work can be queued.
_LONGEST_PAUSE = 0.02
_MARGIN = 1.5
_CALIBRATING_CYCLES = 10_000_000

_QUERIES = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "sm_clock_max": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
    "ecc": "ecc.mode.current",
}


class CudaClock:
    """Times calls by events of the current stream.

    ``launch`` says what a caller finds, and what counts:

    - ``"flushed"``: the second-level cache is overwritten before each call, and the GPU is kept busy while the host
      queues the call: the time of the GPU alone.
    - ``"queued"``: the same without flushing, for several calls to a pair of events, as short ones need: for work on
      weights or caches that take turns, or that are warm on purpose.
    - ``"eager"``: flushed, and the GPU is idle when the call begins, so that the host's time counts where the GPU
      waits for it: for work of very many launches.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        cache = torch.cuda.get_device_properties("cuda").L2_cache_size
        self._flushed = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")
        _spin(_CALIBRATING_CYCLES)
        self._cycles_per_second = _CALIBRATING_CYCLES / _elapsed(lambda: _spin(_CALIBRATING_CYCLES))

    def call(self, run: Callable[[], Any]) -> float:
        """Seconds of one call, the host's time included."""
        return sum(_host_and_rest(run))

    def turn(self, run: Callable[[], Any], estimate: float) -> list[float]:
        """Seconds of the calls of one turn, each the mean over a pair of events, after a call that is not timed."""
        host, _ = _host_and_rest(run)
        launches = 1
        if self._launch == "queued":
            launches = max(1, min(_MOST_LAUNCHES, int(_PAIR_SECONDS / estimate)))
        count = max(1, min(_MOST_PAIRS, int(_TURN_SECONDS / (launches * estimate))))
        pairs = [self._pair(run, launches, launches * host) for _ in range(count)]
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) * 1e-3 / launches for start, end in pairs]

    def _pair(self, run: Callable[[], Any], launches: int, host: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._launch != "queued":
            self._flushed.zero_()
        if self._launch == "eager":
            torch.cuda.synchronize()
        else:
            _spin(int(min(_MARGIN * host, _LONGEST_PAUSE) * self._cycles_per_second))
        start.record()
        for _ in range(launches):
            run()
        end.record()
        return start, end


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def _elapsed(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _host_and_rest(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until a call from an idle GPU returns, and from there until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = run()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    del results
    return returned - start, done - returned


def scratch_bytes(run: Callable[[], Any]) -> int:
    """The most memory that a call holds and that is neither there before nor a result."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    scratch: int = torch.cuda.max_memory_allocated() - before - sum(result.nbytes for result in results)
    return max(0, scratch)


def why_no_cuda() -> str | None:
    """The reason why nothing can run on a GPU here, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"


def fingerprint() -> dict[str, Any]:
    """Name, size, driver, versions and, where ``nvidia-smi`` tells them, clocks and limits."""
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability()),
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **_from_driver(str(getattr(properties, "uuid", ""))),
    }


def _from_driver(uuid: str) -> dict[str, str | None]:
    """What ``nvidia-smi`` says of the GPU in use; its numbers are not torch's where some are hidden."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return dict.fromkeys(_QUERIES)
    chosen = ["--id", f"GPU-{uuid}"] if uuid else []
    command = [program, *chosen, f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_QUERIES)
    answers = [answer.strip() for answer in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_QUERIES, answers, strict=True)) if len(answers) == len(_QUERIES) else dict.fromkeys(_QUERIES)
