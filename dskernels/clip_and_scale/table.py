"""The operators over a table of memory runs, and how a list of tensors becomes one.

Handing thousands of tensors to an operator one by one costs more than to add up what they hold. So the CPU kernels take
a table: the place, length, stride and type of each piece of memory, int64 ``[runs, 4]``, read from the list in one pass
by ``dskernels._C``. It is made anew for each call: reading it costs less than making sure that an old one still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dskernels._library import compiled_module, define

# Only eager code reaches these: a table is the memory of one moment. They have no default, as nothing but a compiled
# kernel can follow an address.
table_power_sum_op = define("table_power_sum", "(Tensor table, float power) -> (float, bool)")
table_scale_op = define("table_scale", "(Tensor table, float factor) -> ()")


class Table(NamedTuple):
    """The memory of a list of tensors.

    Attributes:
        runs: int64 ``[runs, 4]``; points into the tensors, which the caller keeps alive.
        tensors: these tensors, each object once.
        rest: the places in the list of what the table cannot hold.
    """

    runs: Tensor
    tensors: list[Tensor]
    rest: list[int]


def tensor_table(tensors: Sequence[Tensor | None]) -> Table:
    """The table of all plain tensors of a list that are dense floats on the CPU."""
    data, held, rest = compiled_module().tensor_table(tensors, Tensor)
    runs = torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)
    return Table(runs.view(-1, 4), held, rest)
