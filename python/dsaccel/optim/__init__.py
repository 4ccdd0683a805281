"""Learning rates: schedules, and a test of which rates a model takes."""

from dsaccel.optim.lr_range import LRRangeResult, lr_range_test
from dsaccel.optim.schedules import ClosedFormLR, CosineWarmRestarts, WarmupCosine, warm_restarts_for

__all__ = [
    "ClosedFormLR",
    "CosineWarmRestarts",
    "LRRangeResult",
    "WarmupCosine",
    "lr_range_test",
    "warm_restarts_for",
]
