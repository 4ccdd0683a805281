"""The picture of what a model of the digits takes for what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsaccel.demo.plot import COLOURS, INK, STYLE
from dsaccel.examples.swin_digits import CLASSES, Digits, confusion

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WRONG_COLOUR = "#c62828"
# Of a class: so much read as one other is as red as it gets.
WORST = 0.2
SHOWN = (3, 4)


def margins(log_p: Tensor, labels: Tensor) -> Tensor:
    """By how much the right class leads, in log probability: below 0 where another was preferred. ``[n]``."""
    right = log_p.gather(1, labels[:, None])
    others = log_p.scatter(1, labels[:, None], -torch.inf)
    return (right - others.max(1, keepdim=True).values)[:, 0]


def plot_confusion(log_p: Tensor, digits: Digits, title: str, path: Path) -> None:
    """Draws the confusion matrix with its counts, and beside it the digits that gave most trouble.

    Args:
        log_p: log probabilities of the classes, ``[n, classes]``.
        digits: of which they are.
        title: above all.
        path: of the PNG; its folder is there.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    predicted = log_p.argmax(1)
    hardest = margins(log_p, digits.labels).argsort(stable=True)[: SHOWN[0] * SHOWN[1]].tolist()
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 5.2), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        parts: Any = figure.subfigures(1, 2, width_ratios=(1.15, 1))
        left, right = parts
        _draw_matrix(left.subplots(), confusion(predicted, digits.labels))
        right.suptitle("The hardest: what it is, and what it was read as if wrong", fontsize=10)
        for axes, index in zip(right.subplots(*SHOWN).flat, hardest, strict=True):
            axes.imshow(digits.images[index, 0].numpy(), cmap="gray_r", vmin=-1, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=True, color=COLOURS[2])
            label, found = int(digits.labels[index]), int(predicted[index])
            wrong = label != found
            text = f"{label}, read as {found}" if wrong else f"{label}"
            axes.set_title(text, fontsize=9, loc="center", color=WRONG_COLOUR if wrong else INK)
        figure.savefig(path)


def _draw_matrix(axes: Axes, counts: Tensor) -> None:
    # The diagonal would hide all else on a common scale; so what is wrong has a colour and a scale of its own.
    from matplotlib.colors import to_rgb

    diagonal = torch.eye(CLASSES, dtype=torch.bool)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    strength = torch.where(diagonal, 0.85 * shares, 0.2 + 0.65 * (shares / WORST).clamp(max=1))
    strength = strength.masked_fill(counts == 0, 0)[..., None]
    colour = torch.where(diagonal[..., None], torch.tensor(to_rgb(COLOURS[0])), torch.tensor(to_rgb(WRONG_COLOUR)))
    axes.imshow((1 - strength + strength * colour).numpy())
    for row, column in counts.nonzero().tolist():
        dark = strength[row, column, 0] > 0.5
        axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color="white" if dark else INK)
    axes.set(xticks=range(CLASSES), yticks=range(CLASSES), xlabel="read as", ylabel="digit")
    axes.set_xticks([i - 0.5 for i in range(1, CLASSES)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, CLASSES)], minor=True)
    axes.grid(which="minor", color=COLOURS[2], lw=0.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set(visible=True, color=COLOURS[2])
