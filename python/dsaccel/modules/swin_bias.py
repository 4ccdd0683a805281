"""The learned position biases of Swin: a table of offsets, and a network of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules._derived import DerivedTables
from dsaccel.modules._sizes import Pair, check_count, checked_pair

# SwinV2's coordinates run from -8 to 8 before the logarithm, whose base 8 takes them close to -1 and 1.
_COORDINATE_RANGE = 8.0


def relative_position_index(height: int, width: int) -> Tensor:
    """Which of the ``(2 height - 1) (2 width - 1)`` offsets lies between query ``n`` and key ``m`` of a window.

    Returns:
        int64, shape ``[N, N]`` with ``N = height * width``: ``(y_n - y_m + height - 1) * (2 * width - 1) + (x_n - x_m +
        width - 1)``.
    """
    y = torch.arange(height).repeat_interleave(width)
    x = torch.arange(width).repeat(height)
    rows, columns = y[:, None] - y + height - 1, x[:, None] - x + width - 1
    return rows * (2 * width - 1) + columns


def _by_pair(table: Tensor, index: Tensor) -> Tensor:
    """Rows of ``table [offsets, heads]`` for pairs ``index [N, N]``, as a bias ``[heads, N, N]``."""
    # index_select and its backward take a quarter of the time of indexing.
    rows: Tensor = table.index_select(0, index.flatten()).unflatten(0, index.shape)
    return rows.permute(2, 0, 1).contiguous()


class RelativePositionBias(DerivedTables):
    """A bias for each head and each offset between two tokens of a window (Swin v1).

    ``bias[head, n, m] = table[index[n, m], head]``, for the ``bias`` of `dskernels.swin_attention`.

    Args:
        window_size: ``w``, or ``(h, w)``.
        num_heads: heads.

    Attributes:
        table: parameter, ``[(2h - 1)(2w - 1), num_heads]``, offsets row by row, each a query's place less a key's; it
            starts from a normal distribution of standard deviation 0.02, as in the paper's code.
        index: `relative_position_index`, a buffer that is no part of the state dict.

    Raises:
        TypeError, ValueError: a size is no positive int.

    Source: Liu et al., "Swin Transformer", 2021, equation 4.
    """

    index: Tensor

    def __init__(self, window_size: Pair, num_heads: int) -> None:
        super().__init__()
        self.window_size = checked_pair("window_size", window_size)
        check_count("num_heads", num_heads)
        self.num_heads = num_heads
        height, width = self.window_size
        self.table = nn.Parameter(torch.empty((2 * height - 1) * (2 * width - 1), num_heads))
        self._register_tables()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws a new table."""
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self) -> Tensor:
        """The bias, ``[num_heads, h * w, h * w]`` in the dtype of the table; differentiable."""
        return _by_pair(self.table, self.index)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return f"window_size={self.window_size}, num_heads={self.num_heads}"

    def _build(self) -> dict[str, Tensor]:
        return {"index": relative_position_index(*self.window_size)}


class ContinuousPositionBias(DerivedTables):
    """A bias for each head from a small network of the offset between two tokens (Swin v2).

    With ``p, q = 8 dy / (h' - 1), 8 dx / (w' - 1)`` for the offset ``dy, dx`` and the window ``h' x w'`` of training::

        c    = sign(p) log8(1 + |p|), sign(q) log8(1 + |q|)
        bias = 16 sigmoid(output_weight @ relu(hidden_weight @ c + hidden_bias))

    so that a model takes a window of another size without new parameters. Computed in float32 (float64 for float64
    parameters), also under autocast: half precision would blur a bias of up to 16 by as much as 0.06.

    Args:
        window_size: ``w``, or ``(h, w)``.
        num_heads: heads.
        hidden: components of the hidden layer. Default: 512.
        pretrained_window_size: the window by which offsets are measured, ``w'`` or ``(h', w')``: that with which the
            parameters were trained. Default: ``window_size``.

    Attributes:
        hidden_weight, hidden_bias, output_weight: parameters, ``[hidden, 2]``, ``[hidden]``, ``[num_heads, hidden]``;
            the weights start from a normal distribution of standard deviation 0.02, the bias from 0. No ``nn.Linear``
            holds them: they are too few to be worth quantizing, and what they give is not a token.
        coordinates: ``c`` of each offset, ``[(2h - 1)(2w - 1), 2]``, float32, and ``index``, `relative_position_index`:
            buffers that are no part of the state dict.

    Raises:
        TypeError, ValueError: a size is no positive int.

    Source: Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", 2022, equations 3 and 4, with the
    constants of its code.
    """

    coordinates: Tensor
    index: Tensor

    def __init__(
        self, window_size: Pair, num_heads: int, *, hidden: int = 512, pretrained_window_size: Pair | None = None
    ) -> None:
        super().__init__()
        self.window_size = checked_pair("window_size", window_size)
        self.pretrained_window_size = (
            self.window_size
            if pretrained_window_size is None
            else checked_pair("pretrained_window_size", pretrained_window_size)
        )
        check_count("num_heads", num_heads)
        check_count("hidden", hidden)
        self.num_heads = num_heads
        self.hidden_weight = nn.Parameter(torch.empty(hidden, 2))
        self.hidden_bias = nn.Parameter(torch.empty(hidden))
        self.output_weight = nn.Parameter(torch.empty(num_heads, hidden))
        self._register_tables()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights, and sets the bias of the hidden layer to 0."""
        nn.init.trunc_normal_(self.hidden_weight, std=0.02)
        nn.init.trunc_normal_(self.output_weight, std=0.02)
        nn.init.zeros_(self.hidden_bias)

    def forward(self) -> Tensor:
        """The bias, ``[num_heads, h * w, h * w]``, float32 or float64; differentiable."""
        dtype = torch.promote_types(self.hidden_weight.dtype, torch.float32)
        with torch.autocast(self.coordinates.device.type, enabled=False):
            hidden = F.linear(self.coordinates.to(dtype), self.hidden_weight.to(dtype), self.hidden_bias.to(dtype))
            table = 16 * F.linear(hidden.relu(), self.output_weight.to(dtype)).sigmoid()
        return _by_pair(table, self.index)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        said = f"window_size={self.window_size}, num_heads={self.num_heads}, hidden={self.hidden_bias.shape[0]}"
        if self.pretrained_window_size != self.window_size:
            said += f", pretrained_window_size={self.pretrained_window_size}"
        return said

    def _build(self) -> dict[str, Tensor]:
        axes = []
        for size, pretrained in zip(self.window_size, self.pretrained_window_size, strict=True):
            offsets = torch.arange(1 - size, size, dtype=torch.float64)
            # A window of one token has no extent; its only offset is 0, whatever it is measured by.
            scaled = offsets * (_COORDINATE_RANGE / max(pretrained - 1, 1))
            axes.append(scaled.sign() * (1 + scaled.abs()).log2() / 3)
        coordinates = torch.cartesian_prod(*axes).float()
        return {"coordinates": coordinates, "index": relative_position_index(*self.window_size)}


def resized_bias_table(table: Tensor, window_size: Pair, new_window_size: Pair) -> Tensor:
    """The table of a `RelativePositionBias` for windows of another size, interpolated between its offsets.

    Each head's table is a picture of ``(2h - 1) x (2w - 1)`` offsets, which is scaled bicubically to ``(2h' - 1) x (2w'
    - 1)``, in float32 (float64 for float64). For the same size the table comes back as it is.

    Args:
        table: ``[(2h - 1)(2w - 1), num_heads]``, floating point.
        window_size: ``(h, w)``, that of ``table``.
        new_window_size: ``(h', w')``.

    Returns:
        ``[(2h' - 1)(2w' - 1), num_heads]``, dtype of ``table``.

    Source: the code of Liu et al., "Swin Transformer", 2021, which loads its checkpoints that way.
    """
    old = [2 * size - 1 for size in checked_pair("window_size", window_size)]
    new = [2 * size - 1 for size in checked_pair("new_window_size", new_window_size)]
    if old == new:
        return table
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    image = F.interpolate(wide.T.unflatten(1, old).unsqueeze(0), size=new, mode="bicubic")
    return image[0].flatten(1).T.to(table.dtype).contiguous()
