"""Batches of samples of similar length."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsaccel.data._arguments import check_integer, checked_vector, fingerprint
from dsaccel.data.sampler import ResumableSampler, SharedOptions
from dskernels.checks import wrong_type, wrong_value

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Batches whose samples are sorted together by default: enough that neighbours are of nearly one length, few enough that
# batches are made of other samples in each epoch.
POOLED_BATCHES = 50


class LengthGroupedBatchSampler(ResumableSampler[list[int]]):
    """Batches of similar length, every sample in one of them once an epoch, for ``DataLoader(batch_sampler=...)``.

    Samples are shuffled; each ``pool`` of them in turn is sorted by length and cut into batches; batches are shuffled.
    A batch has ``batch_size`` samples, or as many as ``max_tokens`` allow: counted by the sum of their lengths, as
    `dskernels.window_attention_varlen` packs them, or with ``padded=True`` by ``samples * longest``.

    Ranks have equal numbers of batches: the batches of most samples are halved until ``num_replicas`` divides their
    number. Only if there are too few samples for that, batches are repeated, or left out, or dealt out unequally, as
    ``drop_last`` and ``pad`` say; they mean batches here. Which batches there are depends on ``num_replicas``, so a
    state from the middle of an epoch fits only as many ranks as it was saved with.

    Args:
        lengths: of the samples, integers of at least 1, ``[n]``.
        batch_size: samples of a batch, at least 1; or
        max_tokens: tokens of a batch at most, not below the longest sample.
        padded: whether ``max_tokens`` counts padding, too. Default: False.
        pool: how many samples are sorted together, at least 1. Default: about 50 batches.
        shared: ``seed``, ``num_replicas``, ``rank``, ``drop_last``, ``pad`` and ``group``, as in `ResumableSampler`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit, or there are both ``batch_size`` and ``max_tokens``, or neither.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 5.1 (batches of similar length and about as many
    tokens).
    """

    def __init__(
        self,
        lengths: Tensor,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        padded: bool = False,
        pool: int | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        lengths = checked_vector("lengths", lengths, least=1)
        if lengths.is_floating_point():
            raise wrong_type("lengths", "integers", lengths)
        self.lengths = lengths.to(torch.int64, copy=True)
        longest = int(self.lengths.max())
        if (batch_size is None) == (max_tokens is None):
            raise wrong_value("batch_size and max_tokens", "one of them", (batch_size, max_tokens))
        if batch_size is not None:
            check_integer("batch_size", batch_size, least=1)
            usual = batch_size
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, least=1)
            if max_tokens < longest:
                raise wrong_value("max_tokens", f"at least {longest}, the longest sample's", max_tokens)
            usual = max(1, max_tokens * len(lengths) // int(self.lengths.sum()))
        pool = POOLED_BATCHES * usual if pool is None else pool
        check_integer("pool", pool, least=1)
        super().__init__(len(lengths), **shared)
        self.batch_size, self.max_tokens, self.padded, self.pool = batch_size, max_tokens, bool(padded), pool
        self._fingerprint = fingerprint(self.lengths)
        self._batches: list[Tensor] = []

    def batches(self) -> list[Tensor]:
        """All batches of the current epoch, ids int64 ``[k]`` each; `order` has their numbers."""
        self.order()
        return self._batches

    def padding_share(self) -> float:
        """Which part of the current epoch's tokens would be padding if each batch were padded to its longest sample."""
        lengths = [self.lengths[batch] for batch in self.batches()]
        return 1 - sum(int(each.sum()) for each in lengths) / sum(len(each) * int(each.max()) for each in lengths)

    def _order(self, epoch: int, generator: torch.Generator) -> Tensor:
        ids = torch.randperm(len(self.lengths), generator=generator)
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in ids.split(self.pool)]
        batches = [batch for pool in pools for batch in pool.split(self._sizes(pool))]
        self._batches = halved(batches, self.num_replicas)
        return torch.randperm(len(self._batches), generator=generator)

    def _sizes(self, pool: Tensor) -> int | list[int]:
        """Of the batches into which samples in order of their length are cut, or the size of each."""
        if self.batch_size is not None:
            return self.batch_size
        limit = self.max_tokens or 0
        sizes, size, tokens = [], 0, 0
        for length in self.lengths[pool].tolist():
            # Lengths rise, so that this one is the longest.
            cost = (size + 1) * length if self.padded else tokens + length
            if cost > limit:
                sizes.append(size)
                size, tokens = 0, 0
            size, tokens = size + 1, tokens + length
        return [*sizes, size]

    def _items(self, numbers: list[int]) -> Iterable[list[int]]:
        return (self._batches[number].tolist() for number in numbers)

    def _identity(self) -> dict[str, Any]:
        return {
            "size": len(self.lengths),
            "lengths": self._fingerprint,
            "batch_size": self.batch_size,
            "max_tokens": self.max_tokens,
            "padded": self.padded,
            "pool": self.pool,
        }

    def state_dict(self) -> dict[str, Any]:
        """As `ResumableSampler.state_dict`; after the last batch of an epoch, that of the next one's beginning."""
        state = super().state_dict()
        if self._position and self._total() - self._position < (self.num_replicas if self.drop_last else 1):
            # So that another number of ranks can load it.
            state.update(epoch=self.epoch + 1, position=0)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `ResumableSampler.load_state_dict`; within an epoch only for as many ranks as saved the state."""
        if state_dict.get("position") and state_dict["num_replicas"] != self.num_replicas:
            saved = state_dict["num_replicas"]
            raise wrong_value(
                "num_replicas", f"{saved}, as in the state, which was saved within an epoch", self.num_replicas
            )
        super().load_state_dict(state_dict)


def halved(batches: list[Tensor], multiple: int) -> list[Tensor]:
    """Halves batches of most samples, the first of equal ones, until their number is a multiple; as far as it goes."""
    missing = -len(batches) % multiple
    if missing > sum(map(len, batches)) - len(batches):
        return batches
    batches = list(batches)
    heap = [(-len(batch), number) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    for _ in range(missing):
        number = heap[0][1]
        batches[number], half = batches[number].tensor_split(2)
        heapq.heapreplace(heap, (-len(batches[number]), number))
        heapq.heappush(heap, (-len(half), len(batches)))
        batches.append(half)
    return batches
