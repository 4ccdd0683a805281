"""Stopping in good order: the step is finished and saved first, on all ranks the same one."""

from __future__ import annotations

import signal
import threading


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM came; the last step is done and saved.

    Args:
        number: of the signal.

    Attributes:
        exit_code: what a shell reports for a command that the signal ended: ``128 + number``.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current step; the second acts as usual::

        with Interruption() as interruption:
            while not interruption.requested:
                step()

    Attributes:
        requested: number of the signal that came, else 0.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = 0

    def __enter__(self) -> Interruption:
        # Python hands signals to the main thread alone.
        numbers = self.SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: object) -> None:
        self.requested = number
        self.__exit__()
