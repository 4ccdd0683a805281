"""The best of several forms of a peer, for peers whose best form depends on the case and the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

_TRIALS = 3

_Name = TypeVar("_Name")


def fastest(runs: Mapping[_Name, Callable[[], Any]]) -> _Name:
    """The name of the run whose best trial is the quickest."""
    seconds = {name: _best(run) for name, run in runs.items()}
    return min(seconds, key=seconds.__getitem__)


def _best(run: Callable[[], Any]) -> float:
    _finish(run)
    seconds = []
    for _ in range(_TRIALS):
        start = time.perf_counter()
        _finish(run)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _finish(run: Callable[[], Any]) -> None:
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
