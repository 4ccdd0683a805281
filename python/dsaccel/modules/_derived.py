"""Buffers that follow from the arguments of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

_Module = TypeVar("_Module", bound="DerivedTables")


class DerivedTables(nn.Module):
    """A module with tables that its arguments determine: they are no part of the state dict, and keep their dtype.

    A subclass implements `_build` and calls `_register_tables` at the end of its ``__init__``. The tables follow
    ``.to(device)`` and stay as they are under ``.to(dtype)``, ``.half()`` and the like.
    """

    def _build(self) -> dict[str, Tensor]:
        """The tables by name, on torch's default device."""
        raise NotImplementedError

    def _register_tables(self) -> None:
        for name, table in self._build().items():
            self.register_buffer(name, table, persistent=False)

    def _apply(self: _Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Module:
        # Every .to(), .half() and .to_empty() ends here. Whatever they do to dtype and values, only the device is
        # followed; a table that was made on the meta device has no values yet and is built where it arrives.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        if any(table is not None and table.is_meta for table in before.values()):
            before.update(self._build())
        for name, table in before.items():
            moved = self._buffers[name]
            if table is not None and moved is not None:
                self._buffers[name] = table.to(moved.device)
        return self
