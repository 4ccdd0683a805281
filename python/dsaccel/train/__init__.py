"""One loop that trains a model with the pieces of `dsaccel`, and that may be interrupted at any moment."""

from dsaccel.train.config import TrainConfig
from dsaccel.train.folder import RunFolder
from dsaccel.train.interruption import Interrupted, Interruption
from dsaccel.train.progress import Progress, status_line
from dsaccel.train.state import RunMismatchError
from dsaccel.train.trainer import Trainer

__all__ = [
    "Interrupted",
    "Interruption",
    "Progress",
    "RunFolder",
    "RunMismatchError",
    "TrainConfig",
    "Trainer",
    "status_line",
]
