"""The two pictures of a run."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from dsaccel.demo.options import DemoError

INK, FAINT, COLOURS = "#222222", "#9db8d2", ("#1f6f3f", "#8a8f98", "#c9ccd1")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 10,
    "figure.dpi": 150,
    "legend.frameon": False,
}


def require_matplotlib() -> None:
    """Says before a run, rather than after it, that pictures cannot be drawn.

    Raises:
        DemoError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DemoError("the demo draws with matplotlib, which is not installed: pip install 'dskernels[accel]'")


def plot_loss(train: list[dict[str, Any]], validation: list[dict[str, Any]], path: Path) -> None:
    """Draws the losses over the steps.

    Args:
        train: events with ``step`` and ``loss``, in nats per byte.
        validation: the same, of the held-out text.
        path: of the PNG.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([e["step"] for e in train], [e["loss"] for e in train], color=FAINT, lw=0.9, label="training batch")
        steps, losses = [e["step"] for e in validation], [e["loss"] for e in validation]
        axes.plot(steps, losses, color=INK, lw=1.6, marker="o", ms=4, label="held-out text")
        first, last = math.exp(losses[0]), math.exp(losses[-1])
        axes.set(title=f"Learning to write Python's help, byte by byte: perplexity {first:.1f} to {last:.2f}")
        axes.set(xlabel="training step", ylabel="cross-entropy (nats per byte)", xlim=(0, None))
        axes.legend(loc="upper right")
        perplexity = axes.secondary_yaxis("right", functions=(_exp, _log))
        perplexity.set_ylabel("perplexity (per byte)")
        perplexity.spines["right"].set_visible(True)
        ticks = [
            t for t in (1, 2, 3, 5, 10, 20, 50, 100, 200) if axes.get_ylim()[0] <= math.log(t) <= axes.get_ylim()[1]
        ]
        perplexity.set_yticks(ticks, [str(t) for t in ticks])
        perplexity.minorticks_off()
        figure.savefig(path)


def _exp(x: Any) -> Any:
    import numpy as np

    return np.exp(x)


def _log(x: Any) -> Any:
    import numpy as np

    # The axis probes values outside its range, 0 included.
    return np.log(np.maximum(x, 1e-9))


def plot_comparison(rows: list[dict[str, Any]], length: int, window: int, path: Path) -> None:
    """Draws speed and memory side by side.

    Args:
        rows: of `dsaccel.demo.compare.compare`.
        length: tokens of the sequence.
        window: tokens that a layer sees.
        path: of the PNG.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [row["variant"] for row in rows]
    panels = (
        ("Speed: more is better", "tokens/s", [row["tokens_per_second"] for row in rows]),
        ("Memory of a step: less is better", "MiB at the peak", [row["peak_bytes"] / 2**20 for row in rows]),
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.3 + 0.45 * len(rows)), layout="constrained")
        figure.suptitle(f"One training step, {length:,} tokens, window {window:,}", x=0.01, ha="left", fontsize=11)
        for axes, (title, unit, values) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            bars = axes.barh(names, values, height=0.6, color=COLOURS[: len(rows)])
            axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4)
            axes.set(title=title, xlabel=unit, xlim=(0, 1.18 * max(*values, 1)))
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=5)
        figure.axes[0].invert_yaxis()
        figure.savefig(path)
