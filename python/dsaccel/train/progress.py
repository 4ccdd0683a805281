"""What the terminal shows: one line that changes in place, or plain lines where the output is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from dsaccel.train.trainer import Trainer


class Progress:
    """Shows how far a run is.

    Args:
        stream: where to. Default: the standard output.
        interval: seconds between two plain lines; a terminal's line is renewed ten times a second at most.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 10.0) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._in_place = self._stream.isatty()
        self._interval = 0.1 if self._in_place else interval
        self._last = -float("inf")
        self._open = False

    def update(self, line: str, *, force: bool = False) -> None:
        """Shows ``line``, unless another was shown just now and it is not ``force``."""
        now = time.monotonic()
        if now - self._last < self._interval and not force:
            return
        self._last = now
        if not self._in_place:
            print(line, file=self._stream, flush=True)
            return
        # A line that wraps cannot be overwritten; the escape clears what a longer one left.
        line = line[: shutil.get_terminal_size().columns - 1]
        print(f"\r{line}\x1b[K", end="", file=self._stream, flush=True)
        self._open = True

    def say(self, text: str = "") -> None:
        """Prints text that stays."""
        if self._open:
            print(file=self._stream)
            self._open = False
        print(text, file=self._stream, flush=True)


def status_line(trainer: Trainer) -> str:
    """Step, loss, speed and time left: ``step 12/100   loss 2.31   validation loss 2.40   51 samples/s   8 s left``.

    Args:
        trainer: after a step at least; loss and speed are those of its last 20 events.
    """
    steps = trainer.config.steps
    # Averages over the last steps: single batches differ too much to be followed by eye.
    recent = [event for event in trainer.recent if event["event"] == "train"]
    loss = sum(event["loss"] for event in recent) / len(recent)
    speed = sum(event["samples"] for event in recent) / sum(event["seconds"] for event in recent)
    left = trainer.seconds / trainer.step * (steps - trainer.step)
    validation = f"validation loss {trainer.validation_loss:.3g}   " if trainer.validation_loss is not None else ""
    return (
        f"step {trainer.step:>{len(str(steps))}}/{steps}   loss {loss:.3g}   {validation}{speed:.3g} samples/s   "
        f"{left:.0f} s left"
    )
