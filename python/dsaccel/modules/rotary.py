"""A rotary position table that lives in a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsaccel.modules._derived import DerivedTables
from dskernels import RopeTable, rope_table


class RotaryEmbedding(DerivedTables):
    """Holds the table of `dskernels.rope_table` for the attention modules that share it.

    The table follows ``.to(device)`` and stays float32 under ``.to(dtype)``, ``.half()`` and the like, because half
    precision cannot tell late positions apart. It is no part of the state dict: it follows from the arguments.

    Args:
        head_dim: components of a head.
        max_positions: positions ``0`` to ``max_positions - 1`` can be used.
        theta: base of the frequencies. Default: 10000.
        rotary_dim: how many of the first components are rotated. Default: ``head_dim``.
        interleaved: pairs ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``. Default: False.
        scaling: as in `dskernels.rope_table`. Default: none.

    Attributes:
        cos, sin: shape ``[max_positions, rotary_dim / 2]``, float32, non-persistent buffers.

    Raises:
        TypeError, ValueError: as `dskernels.rope_table`.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.theta = theta
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.interleaved = interleaved
        self.scaling = None if scaling is None else dict(scaling)
        self._register_tables()

    def forward(self) -> RopeTable:
        """The table, as the ``rope`` argument of `dskernels.window_attention`."""
        return RopeTable(self.cos, self.sin, self.interleaved)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"{self.head_dim}, max_positions={self.max_positions}, theta={self.theta}, rotary_dim={self.rotary_dim}"

    def _build(self) -> dict[str, Tensor]:
        table = rope_table(
            self.head_dim,
            self.max_positions,
            theta=self.theta,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            scaling=self.scaling,
        )
        return {"cos": table.cos, "sin": table.sin}
