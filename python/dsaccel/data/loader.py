"""A DataLoader whose state is that of the batches handed out, not of those fetched ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dsaccel.data._arguments import check_integer
from dsaccel.data.sampler import ResumableSampler, generator
from dskernels.checks import wrong_type, wrong_value


class ResumableLoader:
    """`torch.utils.data.DataLoader` over a sampler of this package, which counts what is handed out::

        loader = ResumableLoader(dataset, batch_size=32, sampler=ShuffledSampler(len(dataset)), num_workers=2)
        for epoch in range(loader.sampler.epoch, epochs):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                ...  # loader.state_dict() is that after this batch

    Workers fetch batches ahead of time; the sampler counts a batch as consumed at the moment the loop gets it. So the
    state is exact with any number of workers, and may be loaded with another number. Iterating goes on from where the
    sampler is in its epoch; a loop that was left early is continued by the next one.

    Which samples come in which batch depends on nothing but the sampler. Global random numbers are neither used nor
    advanced, so that a resumed training has those that it saved. What a dataset itself draws at random is its own: to
    resume it exactly, draw it from a generator seeded by the sample's id and the epoch.

    Args:
        dataset: map-style.
        batch_size: samples of a batch. Default: 1; with ``batch_sampler``, nothing else may be given.
        sampler: of ids: `ShuffledSampler`, `DynamicSampler`, `CurriculumSampler`.
        batch_sampler: instead of ``sampler``, of batches: `LengthGroupedBatchSampler`.
        num_workers: processes that fetch batches; 0: this one. Default: 0.
        drop_last: whether to leave out the last batch of an epoch if it is smaller; not with ``batch_sampler``.
            Default: False.
        options: further ones of DataLoader, as ``collate_fn``, ``pin_memory`` and ``persistent_workers``.

    Attributes:
        sampler: the one given, of either kind.

    Raises:
        TypeError: the sampler is none of this package, or an argument has the wrong type.
        ValueError: there is not exactly one sampler, or an argument does not go with it or with a fixed order.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        sampler: ResumableSampler[int] | None = None,
        batch_sampler: ResumableSampler[list[int]] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if (sampler is None) == (batch_sampler is None):
            raise wrong_value("sampler and batch_sampler", "one of them", "both" if sampler is not None else "neither")
        name, chosen = ("batch_sampler", batch_sampler) if sampler is None else ("sampler", sampler)
        if not isinstance(chosen, ResumableSampler):
            raise wrong_type(name, "a sampler of dsaccel.data", chosen)
        check_integer("batch_size", batch_size, least=1)
        if batch_sampler is not None and (batch_size != 1 or drop_last):
            raise wrong_value("batch_size and drop_last", "1 and False with batch_sampler", (batch_size, drop_last))
        for reserved in ("shuffle", "generator"):
            if reserved in options:
                raise wrong_value(reserved, "nothing: the sampler decides the order", options[reserved])
        if not options.get("in_order", True):
            raise wrong_value("in_order", "True: batches in another order cannot be counted", False)
        self.sampler: ResumableSampler[Any] = chosen
        self.batch_size = batch_size
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Ahead(chosen, None if sampler is None else batch_size, drop_last),
            num_workers=num_workers,
            generator=self._generator,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:
        # The workers' seeds come from it.
        self._generator.manual_seed(generator(self.sampler.seed, self.sampler.epoch).initial_seed())
        return self.sampler.consume(self._loader, self.batch_size)

    def __len__(self) -> int:
        """Batches of the current epoch for this rank, those consumed included."""
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's: plain numbers, strings and tensors."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of `state_dict`, or the sampler's own.

        Raises:
            ValueError: it does not fit the sampler.
        """
        self.sampler.load_state_dict(state_dict)


class _Ahead:
    """Batches of what remains, which DataLoader may take as early as it likes: nothing is consumed by that."""

    def __init__(self, sampler: ResumableSampler[Any], batch_size: int | None, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        remaining = self.sampler.remaining()
        if self.batch_size is None:
            yield from remaining
            return
        while batch := list(itertools.islice(remaining, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        count, size = len(self.sampler), self.batch_size or 1
        return count // size if self.drop_last else -(-count // size)
