"""Packed sequences as a batch padded at the end, for peers that take nothing else; neither way is ever timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from benchmarks.ops.window_attention import Inputs


@dataclass(frozen=True)
class Padding:
    """Between packed tokens ``[T, H, D]`` and a batch ``[B, H, N, D]``, where ``N`` is the longest of the lengths."""

    lengths: Sequence[int]

    @property
    def notes(self) -> dict[str, Any]:
        """How much is computed for the tokens that count."""
        return {"tokens": sum(self.lengths), "with_padding": len(self.lengths) * max(self.lengths)}

    def pad(self, inputs: Inputs) -> Inputs:
        """The inputs with zeros as padding. A gradient of 0 for its results keeps it out of all others."""

        def padded(packed: Tensor) -> Tensor:
            batch = pad_sequence(packed.split(list(self.lengths)), batch_first=True)
            return batch.transpose(1, 2).contiguous()

        grad_out = None if inputs.grad_out is None else padded(inputs.grad_out)
        return inputs._replace(q=padded(inputs.q), k=padded(inputs.k), v=padded(inputs.v), grad_out=grad_out)

    def unpad(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The results at the tokens that count, packed."""
        return [self._packed(result) for result in results]

    def _packed(self, result: Tensor) -> Tensor:
        rows = result.transpose(1, 2)
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])
