"""Tables of rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dskernels._rope_scaling import Rope, check_scaling, stretched
from dskernels.checks import is_integer, is_number, is_readable, shape_of, wrong_type, wrong_value


class RopeTable(NamedTuple):
    """Cosines and sines of rotary position embeddings; row ``p`` belongs to position ``p``.

    Attributes:
        cos: shape ``[P, rotary_dim / 2]``, float32; for `swin_attention` also ``[heads, P, rotary_dim / 2]``.
        sin: shape of ``cos``, float32.
        interleaved: which components form the pairs: ``(2i, 2i + 1)`` if true, else ``(i, i + rotary_dim / 2)``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many of the first components of a head are rotated."""
        return 2 * self.cos.shape[-1]

    @property
    def max_positions(self) -> int:
        """How many positions the table holds."""
        return self.cos.shape[-2]

    def rotate(self, x: Tensor, positions: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Tokens rotated at their positions as the ops do it inside; for keys that a cache keeps rotated.

        Pair ``(a, b)`` at position ``p`` becomes ``(a * cos[p] - b * sin[p], b * cos[p] + a * sin[p])``; components
        past ``rotary_dim`` pass unchanged. Computed in float32 (float64 for float64). Differentiable in ``x``.

        Args:
            x: shape ``[B, H, N, D]``, floating point.
            positions: int64, shape ``[N]`` or ``[B, N]``.
            dtype: of the result, floating point. Default: that of ``x``.

        Returns:
            Shape of ``x``.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: shapes, dtypes or devices do not fit each other, or the table has a part for each head.
            IndexError: a position is outside the table.
        """
        if self.cos.dim() != 2:
            raise wrong_value("table", "[P, rotary_dim / 2], one for all heads", f"shape {shape_of(self.cos)}")
        for name, tensor in (("x", x), ("positions", positions)):
            if not isinstance(tensor, Tensor):
                raise wrong_type(name, "a tensor", tensor)
        if x.dim() != 4 or not x.is_floating_point() or x.shape[3] < self.rotary_dim:
            expected = f"floating point [B, H, N, D] with D at least rotary_dim = {self.rotary_dim}"
            raise wrong_value("x", expected, f"shape {shape_of(x)}, {x.dtype}")
        if positions.dtype != torch.int64 or positions.shape not in (x.shape[2:3], (x.shape[0], x.shape[2])):
            expected = f"int64, shape [N] or [B, N] = [{x.shape[0]}, {x.shape[2]}]"
            raise wrong_value("positions", expected, f"shape {shape_of(positions)}, {positions.dtype}")
        for name, tensor in (("x", x), ("positions", positions)):
            if tensor.device != self.cos.device:
                raise wrong_value(name, f"the device of the table, {self.cos.device}", tensor.device)
        if dtype is not None and not dtype.is_floating_point:
            raise wrong_value("dtype", "a floating point dtype or None", dtype)
        check_in_table(positions, self)
        wide = torch.promote_types(x.dtype, torch.float32)
        # index_select refuses a negative position, at which plain indexing would count from the end.
        rows = (table.index_select(0, positions.flatten()) for table in (self.cos, self.sin))
        cos, sin = (row.view(*positions.shape, -1).unsqueeze(-3).to(wide) for row in rows)
        return rotate(x.to(wide), cos, sin, self.interleaved).to(x.dtype if dtype is None else dtype)

    def to(self, device: torch.device | str | int) -> RopeTable:
        """The same table on another device. Always float32: half precision cannot tell late positions apart."""
        return RopeTable(self.cos.to(device), self.sin.to(device), self.interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the pairs of the first ``2 * cos.shape[-1]`` components; with ``-sin`` it rotates them back."""
    rotary_dim = 2 * cos.shape[-1]
    rotary, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, -1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    rotary = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat((rotary, tail), -1)


def check_in_table(positions: Tensor, rope: RopeTable) -> None:
    """Whether the table holds all positions, where they can be looked at; elsewhere the kernels have to see to it."""
    if not is_readable(positions) or positions.numel() == 0:
        return
    low, high = (int(x) for x in positions.aminmax())
    if low < 0 or high >= rope.max_positions:
        found = low if low < 0 else high
        raise IndexError(f"positions: position {found} is outside the table of {rope.max_positions} positions")


def rope_table(
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> RopeTable:
    """Builds the table of rotary position embeddings.

    Pair ``i`` of a head at position ``p`` is rotated by ``p * theta ** (-2 i / rotary_dim)``. Angles, cosines and
    sines are computed in float64 and stored in float32.

    Args:
        head_dim: components of a head.
        max_positions: rows of the table: positions ``0`` to ``max_positions - 1``.
        theta: the base of the frequencies. Default: 10000.
        rotary_dim: how many of the first components are rotated, an even number up to ``head_dim``; the rest pass
            unchanged. Default: ``head_dim``.
        interleaved: pairs ``(2i, 2i + 1)`` as in RoFormer and GPT-J, instead of ``(i, i + rotary_dim / 2)`` as in
            GPT-NeoX and Llama. Default: False.
        scaling: how a model is stretched beyond the length it was trained on: None, or a mapping with Hugging Face's
            keys, as in the ``rope_scaling`` of a model's configuration. ``rope_type`` is one of

            - ``"default"``: nothing is stretched;
            - ``"linear"``: positions are divided by ``factor``;
            - ``"dynamic"``: the base grows with the table's length, ``max_positions``, over
              ``original_max_position_embeddings`` (NTK);
            - ``"llama3"``: by wave length, with ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
              ``original_max_position_embeddings``;
            - ``"yarn"``: by wave length, with ``factor``, ``original_max_position_embeddings`` and optionally
              ``beta_fast``, ``beta_slow``, ``truncate``, ``attention_factor``, ``mscale``, ``mscale_all_dim``. Its
              attention factor is in the table, so the rotated part of a score carries its square.

    Returns:
        A `RopeTable` on torch's default device.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a size is not positive, ``rotary_dim`` is odd or above ``head_dim``, ``theta`` is not positive, or
            the scaling is not supported.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equations 14, 15 and 34.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    _check_sizes(head_dim=head_dim, max_positions=max_positions, rotary_dim=rotary_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise wrong_value("rotary_dim", f"an even number up to head_dim = {head_dim}", rotary_dim)
    _check_rotation(theta, interleaved)
    check_scaling(scaling)
    frequencies = float(theta) ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / -rotary_dim)
    frequencies, factor = stretched(Rope(frequencies, float(theta), max_positions), scaling)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
    return RopeTable((factor * angles.cos()).float(), (factor * angles.sin()).float(), interleaved)


def rope_table_2d(
    head_dim: int,
    height: int,
    width: int,
    *,
    theta: float = 100.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> RopeTable:
    """Builds the table of axial rotary position embeddings for the tokens of a ``height`` x ``width`` window.

    Row ``y * width + x`` belongs to the token in row ``y`` and column ``x``. Of its ``rotary_dim / 2`` pairs the first
    half turns with the row and the second with the column: pairs ``i`` and ``i + rotary_dim / 4`` are rotated by ``y *
    f[i]`` and ``x * f[i]``, where ``f[i] = theta ** (-4 i / rotary_dim)``. Angles, cosines and sines are computed in
    float64 and stored in float32.

    Args:
        head_dim: components of a head.
        height: rows of the window.
        width: columns of the window.
        theta: the base of the frequencies. Default: 100, for positions far fewer than those of a text.
        rotary_dim: how many of the first components are rotated, a multiple of 4 up to ``head_dim``; the rest pass
            unchanged. Default: ``head_dim``.
        interleaved: pairs ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``. Default: False.

    Returns:
        A `RopeTable` of ``height * width`` positions on torch's default device.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a size is not positive, ``rotary_dim`` is no multiple of 4 or above ``head_dim``, or ``theta`` is
            not positive.

    Source: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024, section 3.2 (axial frequency), with
    the pairs of an axis side by side instead of in turns.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    _check_sizes(head_dim=head_dim, height=height, width=width, rotary_dim=rotary_dim)
    if rotary_dim % 4 or rotary_dim > head_dim:
        raise wrong_value("rotary_dim", f"a multiple of 4 up to head_dim = {head_dim}", rotary_dim)
    _check_rotation(theta, interleaved)
    frequencies = float(theta) ** (torch.arange(0, rotary_dim, 4, dtype=torch.float64) / -rotary_dim)
    by_row, by_column = (torch.outer(torch.arange(n, dtype=torch.float64), frequencies) for n in (height, width))
    angles = torch.cat((by_row.repeat_interleave(width, 0), by_column.repeat(height, 1)), 1)
    return RopeTable(angles.cos().float(), angles.sin().float(), interleaved)


def check_rope(rope: RopeTable, tensor: Tensor, name: str, head_dim: int) -> None:
    """Whether ``rope`` is a table that can rotate heads of ``tensor``, which messages call ``name``."""
    if not isinstance(rope, RopeTable):
        raise wrong_type("rope", "a RopeTable, as made by rope_table or rope_table_2d, or None", rope)
    for part, table in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        if table.dtype != torch.float32:
            raise wrong_value(part, "dtype float32 (a module's .to(dtype) converts its buffers too)", table.dtype)
        if table.device != tensor.device:
            raise wrong_value(part, f"the device of {name}, {tensor.device}", table.device)
        if table.requires_grad:
            raise wrong_value(part, "a table without gradient", "requires_grad=True")
    if rope.cos.dim() not in (2, 3) or rope.sin.shape != rope.cos.shape:
        expected = "cos and sin of one shape [P, rotary_dim / 2]"
        raise wrong_value("rope", expected, f"{shape_of(rope.cos)}, {shape_of(rope.sin)}")
    if rope.rotary_dim > head_dim:
        raise wrong_value("rope", f"rotary_dim up to the head dimension {head_dim}", rope.rotary_dim)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not is_integer(value):
            raise wrong_type(name, "an int", value)
        if value < 1:
            raise wrong_value(name, "a positive number", value)


def _check_rotation(theta: float, interleaved: bool) -> None:
    if not is_number(theta):
        raise wrong_type("theta", "a number", theta)
    if not theta > 0:
        raise wrong_value("theta", "a positive number", theta)
    if not isinstance(interleaved, bool):
        raise wrong_type("interleaved", "a bool", interleaved)
