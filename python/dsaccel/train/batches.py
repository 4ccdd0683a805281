"""The batches of a run: of a dataset in the order that the configuration asks for, or the caller's own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils.data import Dataset

from dsaccel.data import CurriculumSampler, DynamicSampler, IndexSampler, ResumableLoader, ShuffledSampler
from dsaccel.parallel import ParallelPlan
from dsaccel.train.config import TrainConfig
from dskernels.checks import shape_of, wrong_type, wrong_value


def make_batches(data: Any, config: TrainConfig, difficulty: Any = None) -> Any:
    """An iterable of batches with ``state_dict`` and ``load_state_dict``; each iteration is the rest of an epoch.

    Args:
        data: has ``len`` and items ``(inputs, targets)``: batches are then ``(ids, inputs, targets)``, always of
            ``config.batch`` items, so that the order and the batches are the same under every plan. Or it is such an
            iterable already, of batches ``(inputs, targets)``, and is returned.
        config: tells sampler, batch, workers and seed.
        difficulty: of each item, for the sampler ``"curriculum"`` alone.

    Raises:
        TypeError: ``data`` is neither of the two.
        ValueError: ``config.batch`` does not divide as the plan asks, the sampler needs a dataset, the dataset has
            fewer items than a batch, or ``difficulty`` is given without a sampler that uses it, or not to one that
            does, or not for each item.
    """
    if (config.sampler == "curriculum") != (difficulty is not None):
        expected = "one number for each item" if difficulty is None else "None"
        got = "None" if difficulty is None else "a value"
        raise wrong_value("difficulty", f"{expected} with sampler={config.sampler!r}", got)
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        if config.sampler != "shuffle":
            raise wrong_value("sampler", "'shuffle', as data comes in batches of its own", repr(config.sampler))
        return data
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        expected = "a dataset with len and items, or batches with state_dict and load_state_dict (ResumableLoader)"
        raise wrong_type("data", expected, data)
    multiple = cast(ParallelPlan, config.plan).batch_multiple
    if config.batch % multiple:
        raise wrong_value("batch", f"a multiple of {multiple} for plan {config.plan}", config.batch)
    if len(data) < config.batch:
        raise wrong_value("data", f"at least batch = {config.batch} items", len(data))
    sampler = _sampler(config, len(data), difficulty)
    return ResumableLoader(_Numbered(data), config.batch, sampler=sampler, num_workers=config.workers, drop_last=True)


def _sampler(config: TrainConfig, size: int, difficulty: Any) -> IndexSampler:
    # All ranks take the same batches; `ParallelModel.local_batch` cuts them.
    shared: dict[str, Any] = {"seed": config.seed, "num_replicas": 1, "rank": 0}
    if config.sampler == "dynamic":
        return DynamicSampler(size, **shared)
    if config.sampler == "curriculum":
        difficulty = torch.as_tensor(difficulty)
        if difficulty.shape != (size,):
            raise wrong_value("difficulty", f"one number for each of {size} items", shape_of(difficulty))
        return CurriculumSampler(difficulty, epochs=_epochs(config, difficulty), **shared)
    return ShuffledSampler(size, **shared)


def _epochs(config: TrainConfig, difficulty: torch.Tensor) -> int:
    """The fewest epochs of a curriculum, whose first ones are short, that have as many batches as the run."""
    batches = config.steps * config.accumulate
    epochs = max(1, batches * config.batch // len(difficulty))
    while True:
        sampler = CurriculumSampler(difficulty, epochs=epochs, num_replicas=1, rank=0)
        if sum(sampler.count(epoch) // config.batch for epoch in range(epochs)) >= batches:
            return epochs
        epochs += 1


class _Numbered(Dataset[tuple[Any, ...]]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        inputs, targets = self.items[index]
        return index, inputs, targets
