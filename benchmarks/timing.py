"""Timing in turn: A B A B ... in one process, so that what drifts in the machine drifts under everyone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

Turns = list[list[float]]

# Fewer turns say nothing about spread; slow peers get these however long they take.
LEAST_TURNS = 5

# A turn of a quick competitor is some calls, the first of them untimed: it would pay for caches that others emptied.
_TURN_SECONDS = 0.05
_MOST_CALLS = 10
_WARM_BELOW_SECONDS = 0.1

# Workers wait for more work before they sleep, and take a core meanwhile: torch's for about 10 ms, those of ONNX
# Runtime for 40.
_REST_SECONDS = 0.1


class Clock(Protocol):
    """What times a contestant."""

    def call(self, run: Callable[[], Any]) -> float:
        """Seconds of one call, for an estimate."""

    def turn(self, run: Callable[[], Any], estimate: float) -> list[float]:
        """Seconds of the calls of one turn."""


class HostClock:
    """Times what is done when it returns."""

    def call(self, run: Callable[[], Any]) -> float:
        return _timed(run)

    def turn(self, run: Callable[[], Any], estimate: float) -> list[float]:
        if estimate < _WARM_BELOW_SECONDS:
            run()
        calls = max(1, min(_MOST_CALLS, int(_TURN_SECONDS / estimate)))
        return [_timed(run) for _ in range(calls)]


def take_turns(
    runs: Mapping[str, Callable[[], Any]],
    *,
    clock: Clock | None = None,
    seconds: float = 0.0,
    repeats: int | None = None,
    own_threads: Collection[str] = (),
) -> dict[str, Turns]:
    """Times every function in turn, round after round.

    Args:
        runs: what to time, by name, in the order of a round; each has run before, so that nothing is first-time work.
        clock: what times them. Default: a `HostClock`.
        seconds: start no new round after this time, once there are `LEAST_TURNS`.
        repeats: this many rounds instead.
        own_threads: names of those who do not work in torch's threads. Whoever follows one of them, and whoever of
            them follows another, waits until the other's threads sleep.

    Returns:
        For each name a list of turns, one a round, each a list of the seconds of its calls.
    """
    clock = clock or HostClock()
    estimates = {name: clock.call(run) for name, run in runs.items()}
    turns: dict[str, Turns] = {name: [] for name in runs}
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        rounds, previous = 0, None
        while rounds < repeats if repeats is not None else rounds < LEAST_TURNS or _since(start) < seconds:
            for name, run in runs.items():
                if name in own_threads or previous in own_threads:
                    time.sleep(_REST_SECONDS)
                turns[name].append(clock.turn(run, estimates[name]))
                previous = name
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return turns


def _since(start: float) -> float:
    return time.perf_counter() - start


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    results = run()
    seconds = _since(start)
    # Giving the results' memory back is not part of the work.
    del results
    return seconds
