"""What the terminal shows: one line that changes in place, or plain lines where the output is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO


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
