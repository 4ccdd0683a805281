"""Rotary positions inside the windows of an image: axial ones, and learned frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dsaccel.modules._derived import DerivedTables
from dsaccel.modules._sizes import Pair, check_count, checked_pair
from dskernels import RopeTable, rope_table_2d
from dskernels.checks import is_number, shape_of, wrong_type, wrong_value


class AxialRope2d(DerivedTables):
    """Holds the table of `dskernels.rope_table_2d` for the tokens of a window.

    The table follows ``.to(device)`` and stays float32 under ``.to(dtype)``, ``.half()`` and the like. It is no part of
    the state dict: it follows from the arguments.

    Args:
        head_dim: components of a head, a multiple of 4.
        window_size: ``w``, or ``(h, w)``.
        theta: base of the frequencies. Default: 100.

    Attributes:
        cos, sin: shape ``[h * w, head_dim / 2]``, float32, non-persistent buffers.

    Raises:
        TypeError, ValueError: as `dskernels.rope_table_2d`.

    Source: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024, section 3.2 (axial frequency).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, window_size: Pair, *, theta: float = 100.0) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.window_size = checked_pair("window_size", window_size)
        self.theta = theta
        self._register_tables()

    def table(self) -> RopeTable:
        """The table, as the ``rope`` argument of `dskernels.swin_attention`."""
        return RopeTable(self.cos, self.sin)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"{self.head_dim}, window_size={self.window_size}, theta={self.theta}"

    def _build(self) -> dict[str, Tensor]:
        table = rope_table_2d(self.head_dim, *self.window_size, theta=self.theta)
        return {"cos": table.cos, "sin": table.sin}


class MixedRope2d(nn.Module):
    """Rotary positions of a window whose frequencies are learned, for each head and along both axes at once.

    The pair ``i`` of a head at place ``(y, x)`` of its window is rotated by ``x * frequencies[0, head, i] + y *
    frequencies[1, head, i]``. Where no gradient of the frequencies is wanted, `table` is for the ``rope`` argument of
    `dskernels.swin_attention`, which rotates inside the op; in training the module rotates queries and keys itself
    (calling it), in plain PyTorch, and the op gets no ``rope``. `dsaccel.modules.SwinAttention` chooses.

    Args:
        head_dim: components of a head, a multiple of 4.
        window_size: ``w``, or ``(h, w)``.
        num_heads: heads.
        theta: base of the frequencies that training starts from. Default: 10.
        interleaved: pairs ``(2i, 2i + 1)``, as in the paper's code, instead of ``(i, i + head_dim / 2)``. Default:
            False.

    Attributes:
        frequencies: parameter, ``[2, num_heads, head_dim / 2]``: along the columns, and along the rows. They start
            from axial ones that are turned by a random angle for each head: with magnitudes ``theta ** (-4 i /
            head_dim)``, the first half of the pairs looks into that direction and the second at right angles to it.

    Raises:
        TypeError, ValueError: a size is no positive int, ``head_dim`` no multiple of 4, or ``theta`` not positive.

    Source: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024, section 3.2, equation 14 (mixed
    frequency), and its code for the start.
    """

    def __init__(
        self, head_dim: int, window_size: Pair, num_heads: int, *, theta: float = 10.0, interleaved: bool = False
    ) -> None:
        super().__init__()
        check_count("head_dim", head_dim)
        if head_dim % 4:
            raise wrong_value("head_dim", "a multiple of 4", head_dim)
        check_count("num_heads", num_heads)
        if not is_number(theta):
            raise wrong_type("theta", "a number", theta)
        if not theta > 0:
            raise wrong_value("theta", "a positive number", theta)
        self.head_dim = head_dim
        self.window_size = checked_pair("window_size", window_size)
        self.num_heads = num_heads
        self.theta = theta
        self.interleaved = interleaved
        self.frequencies = nn.Parameter(torch.empty(2, num_heads, head_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Turns the axial frequencies of each head by a new random angle."""
        device, dtype = self.frequencies.device, self.frequencies.dtype
        angle = 2 * math.pi * torch.rand(self.num_heads, 1, device=device, dtype=dtype)
        pair = torch.arange(self.head_dim // 4, device=device, dtype=dtype)
        magnitude = self.theta ** (pair * (-4 / self.head_dim))
        for axis, turn in enumerate((torch.cos, torch.sin)):
            halves = [magnitude * turn(angle), magnitude * turn(angle + math.pi / 2)]
            self.frequencies[axis].copy_(torch.cat(halves, 1))

    @property
    def learns(self) -> bool:
        """Whether a gradient of the frequencies is wanted: if not, the op can rotate by `table`."""
        return torch.is_grad_enabled() and self.frequencies.requires_grad

    def table(self) -> RopeTable:
        """The frequencies of now as a table ``[num_heads, h * w, head_dim / 2]``, float32, without gradient."""
        cos, sin = (x.detach().permute(2, 0, 1, 3).flatten(1, 2).float() for x in self._turns(torch.float32))
        return RopeTable(cos, sin, self.interleaved)

    def forward(self, qkv: Tensor, *, shift: Pair = 0) -> Tensor:
        """Rotates queries and keys by their places in their windows; differentiable in both and the frequencies.

        Args:
            qkv: shape ``[B, H, W, 3 * num_heads * head_dim]``, as for `dskernels.swin_attention`.
            shift: of the grid of windows, as there: the token ``(y, x)`` has the place ``((y - shift) mod h, (x -
                shift) mod w)``. Default: 0.

        Returns:
            Shape and dtype of ``qkv``; computed in float32 (float64 for float64), also under autocast. What is cosine
            attention afterwards gives the same as if it were rotated after normalization.

        Raises:
            ValueError: ``qkv`` has another shape.
        """
        dim = self.num_heads * self.head_dim
        if qkv.dim() != 4 or qkv.shape[3] != 3 * dim:
            raise wrong_value("qkv", f"shape [B, H, W, {3 * dim}]", f"shape {shape_of(qkv)}")
        shifts = checked_pair("shift", shift, least=0)
        with torch.autocast(qkv.device.type, enabled=False):
            dtype = torch.promote_types(qkv.dtype, torch.float32)
            cos, sin = (self._of_tokens(x, qkv, shifts) for x in self._turns(dtype))
            queries_and_keys, values = qkv.split((2 * dim, dim), 3)
            x = queries_and_keys.unflatten(3, (2, self.num_heads, self.head_dim)).to(dtype)
            a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
            rotated = (a * cos - b * sin, b * cos + a * sin)
            x = torch.stack(rotated, -1).flatten(-2) if self.interleaved else torch.cat(rotated, -1)
            return torch.cat((x.flatten(3).to(qkv.dtype), values), 3)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        said = f"{self.head_dim}, window_size={self.window_size}, num_heads={self.num_heads}, theta={self.theta}"
        return said + (", interleaved=True" if self.interleaved else "")

    def _turns(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Cosines and sines of a window, [h, w, heads, D / 2].
        with torch.autocast(self.frequencies.device.type, enabled=False):
            by_column, by_row = self.frequencies.to(torch.promote_types(self.frequencies.dtype, dtype))
            y, x = (torch.arange(n, device=by_row.device, dtype=by_row.dtype) for n in self.window_size)
            angles = y[:, None, None, None] * by_row + x[:, None, None] * by_column
            return angles.cos().to(dtype), angles.sin().to(dtype)

    def _of_tokens(self, window: Tensor, qkv: Tensor, shifts: tuple[int, int]) -> Tensor:
        # [h, w, heads, D / 2] of a window as [H, W, 1, heads, D / 2] of an image.
        for axis, (size, shift) in enumerate(zip(self.window_size, shifts, strict=True)):
            places = (torch.arange(qkv.shape[axis + 1], device=qkv.device) - shift) % size
            window = window.index_select(axis, places)
        return window.unsqueeze(2)
