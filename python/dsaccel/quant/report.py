"""What was done to the layers of a model, and what was not and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerReport:
    """One layer, in the report of a function that replaces layers.

    Attributes:
        name: as in ``model.named_modules()``; the first one where a layer has several.
        kind: the class it had.
        became: what it is now, such as ``"int8_dynamic"``; None if it was kept.
        reason: why it was kept, or what is to be known about it; may be empty.
        bytes_before, bytes_after: of its parameters and buffers. Layers that share tensors count them each.
    """

    name: str
    kind: str
    became: str | None
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizationReport:
    """What became of every layer that has a matrix of weights; ``print`` shows a table.

    Attributes:
        layers: one entry for each such layer, in the order of ``model.named_modules()``.
        bytes_before, bytes_after: of all parameters and buffers of the model, shared ones counted once.
    """

    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the layers that were replaced."""
        return tuple(layer.name for layer in self.layers if layer.became is not None)

    @property
    def kept(self) -> dict[str, str]:
        """Name and reason of every layer that was not."""
        return {layer.name: layer.reason for layer in self.layers if layer.became is None}

    def __str__(self) -> str:
        heading = (
            f"{len(self.replaced)} replaced, {len(self.kept)} kept: {self.bytes_before} -> {self.bytes_after} bytes"
        )
        rows = [_cells(layer) for layer in self.layers]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [
            "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        return "\n".join([heading, *(line.rstrip() for line in lines)])


def bytes_of(module: nn.Module) -> int:
    """Bytes of the parameters and buffers of ``module`` and all within it, shared ones counted once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _cells(layer: LayerReport) -> tuple[str, str, str, str]:
    name = layer.name or "(the model itself)"
    if layer.became is None:
        return name, layer.kind, f"{layer.bytes_before}", f"kept: {layer.reason}"
    note = f" ({layer.reason})" if layer.reason else ""
    return name, layer.kind, f"{layer.bytes_before} -> {layer.bytes_after}", f"{layer.became}{note}"
