"""The competitors, one a file; each file has ``COMPETITORS``, from an operator's name to a `Competitor`."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.case import Competitor


def competitors_for(op: str, device: str = "cpu") -> list[Competitor]:
    """The peers of an operator on a device, in the order of their files' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    peers: list[Competitor] = [module.COMPETITORS[op] for module in modules if op in module.COMPETITORS]
    return [peer for peer in peers if device in peer.devices]
