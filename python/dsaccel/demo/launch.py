"""The processes of a plan: this command starts `torchrun`, which starts it again in each."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from torch import distributed

from dsaccel.train import Interrupted


def start_processes(count: int, arguments: Sequence[str]) -> NoReturn:
    """Becomes ``torchrun`` with ``count`` processes of the demo on this machine; signals and status are its own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "dsaccel.demo", *arguments])


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The process group of all that ``torchrun`` started; none in a process on its own."""
    if not distributed.is_torchelastic_launched():
        yield
        return
    distributed.init_process_group("gloo")
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def is_main() -> bool:
    """Whether this process is the one to write and to tell."""
    return int(os.environ.get("RANK", "0")) == 0


def exit_code(interruption: KeyboardInterrupt) -> int:
    """What a shell reports for a command that a signal ended; ``make`` stops at it."""
    return interruption.exit_code if isinstance(interruption, Interrupted) else 128 + signal.SIGINT
