"""Samplers for `torch.utils.data.DataLoader`: weighted, graded, grouped by length; distributed; resumable anywhere."""

from dsaccel.data.curriculum import CurriculumSampler
from dsaccel.data.draws import draw
from dsaccel.data.dynamic import DynamicSampler
from dsaccel.data.history import LossHistory
from dsaccel.data.lengths import LengthGroupedBatchSampler
from dsaccel.data.loader import ResumableLoader
from dsaccel.data.sampler import IndexSampler, ResumableSampler, ShuffledSampler

__all__ = [
    "CurriculumSampler",
    "DynamicSampler",
    "IndexSampler",
    "LengthGroupedBatchSampler",
    "LossHistory",
    "ResumableLoader",
    "ResumableSampler",
    "ShuffledSampler",
    "draw",
]
