"""Real English text that needs no download: the help texts that come with Python (``help("assert")`` and so on)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsaccel.demo.options import DemoError

# Bytes of text that go to one side of the split together; every tenth piece is held out.
PIECE = 4096
HELD_OUT = 10


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, in two parts.

    Attributes:
        train: what is learned from, uint8, shape ``[T]``.
        validation: what is held out, uint8, shape ``[V]``.
        digest: names the exact text; Python's help differs from version to version.
    """

    train: Tensor
    validation: Tensor
    digest: str


def load_corpus() -> Corpus:
    """The texts of ``pydoc_data.topics``, split at paragraphs, always in the same way.

    Topics quote each other. A paragraph is kept once, so that nothing held out can be learned by heart.

    Raises:
        DemoError: this Python was installed without its help texts.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError(f"this Python has no help texts to train on ({error}); install its full package") from error
    paragraphs = dict.fromkeys(p for name in sorted(topics) for p in re.split("\n{2,}", topics[name].strip("\n")))
    parts: tuple[list[str], list[str]] = [], []
    position = 0
    for paragraph in paragraphs:
        parts[position // PIECE % HELD_OUT == HELD_OUT - 1].append(paragraph)
        position += len(paragraph)
    train, validation = ("\n\n".join(part).encode() for part in parts)
    digest = hashlib.sha256(train + b"\0" + validation).hexdigest()[:16]
    return Corpus(_tensor(train), _tensor(validation), digest)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def text_of(tokens: Tensor) -> str:
    """Bytes as text; what is no valid UTF-8 shows as replacement characters."""
    return bytes(tokens.tolist()).decode(errors="replace")


def even_windows(text: Tensor, length: int, count: int) -> Tensor:
    """Up to ``count`` windows of ``length + 1`` bytes, evenly spread over a text, int64 ``[count, length + 1]``."""
    _check_length(text, length)
    windows = text.unfold(0, length + 1, length)
    rows = torch.linspace(0, len(windows) - 1, min(count, len(windows))).round().long()
    return windows[rows].long()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The windows of a text, one after the other, as inputs and targets, int64, shape ``[length]`` each.

    Args:
        text: uint8, shape ``[T]``.
        length: of a window; targets are one byte further.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        _check_length(text, length)
        self._windows = text.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._windows[index].long()
        return window[:-1], window[1:]


class Batches:
    """Endless batches of windows of a text: every window once an epoch, cut and ordered anew in each.

    What comes at a position depends on nothing but the seed, so the position alone is the state.

    Args:
        text: uint8, shape ``[T]``.
        length: a window has ``length + 1`` bytes: inputs, and targets one further.
        size: windows of a batch.
        seed: of the order.
    """

    def __init__(self, text: Tensor, length: int, size: int, seed: int) -> None:
        # One length is set apart for the random start of the first window.
        _check_length(text, length * (size + 1))
        self.text = text
        self.length = length
        self.size = size
        self.seed = seed
        self.position = 0
        self._per_epoch = ((len(text) - 1) // length - 1) // size
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.long)

    def next(self) -> Tensor:
        """The next batch, int64, shape ``[size, length + 1]``."""
        epoch, index = divmod(self.position, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            first = torch.randint(self.length, (), generator=generator)
            order = torch.randperm(self._per_epoch * self.size, generator=generator)
            self._starts, self._epoch = first + self.length * order, epoch
        self.position += 1
        starts = self._starts[index * self.size : (index + 1) * self.size]
        return self.text[starts[:, None] + torch.arange(self.length + 1)].long()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is left of the epoch, as inputs and targets, int64, shape ``[size, length]`` each."""
        while True:
            windows = self.next()
            yield windows[:, :-1], windows[:, 1:]
            if self.position % self._per_epoch == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on with the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was called."""
        self.position = state["position"]


def _check_length(text: Tensor, needed: int) -> None:
    if len(text) <= needed:
        raise DemoError(
            f"the text of {len(text)} bytes is too short: {needed + 1} are needed; lower --length or --batch"
        )
