"""The picture of a result: a row a run, with times against peers and, where there are sweeps, growth."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.case import OURS
from benchmarks.ceilings import COPY, SGEMM
from benchmarks.results import Record
from benchmarks.summary import CaseResult, LaneResult, duration, name_of, ratio_text, summarize

_OUR_COLOUR = "#1b6ca8"
_PEER_COLOURS = ("#e0912f", "#7a9a57", "#9573a8", "#b0b0b0", "#c9a227", "#5fa3a3")
_MISSED_COLOUR = "#c62828"
_LEGEND_COLUMNS = 4
_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw(runs: Sequence[Sequence[Record]], path: Path) -> None:
    """Writes a PNG with one row for each run."""
    summaries = [summarize(run) for run in runs]
    lanes = max(sum(len(c.lanes) + 1 for c in cases if not c.is_sweep) for cases in summaries)
    sweeps = any(case.is_sweep for cases in summaries for case in cases)
    height = max(3.6, 0.24 * lanes + 1.2)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13.0 if sweeps else 9.0, height * len(runs)), layout="constrained")
        rows = figure.subfigures(len(runs), 1, squeeze=False)[:, 0]
        for row, run, cases in zip(rows, runs, summaries, strict=True):
            row.suptitle(_title(run[0]), fontsize=10, fontweight="bold")
            _draw_row(row, cases, sweeps)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _title(record: Record) -> str:
    return f"{record.op} on {name_of(record.machine, 50)}, torch {record.machine['torch']}, {record.date}"


def _draw_row(row: Figure, cases: list[CaseResult], sweeps: bool) -> None:
    if not sweeps:
        _draw_bars(row.subplots(), [case for case in cases if not case.is_sweep])
        return
    panels = row.subplot_mosaic([["bars", "time"], ["bars", "memory"]], width_ratios=(1.8, 1))
    _draw_bars(panels["bars"], [case for case in cases if not case.is_sweep])
    grown = [case for case in cases if case.is_sweep]
    _draw_growth(panels["time"], grown, "time of a call (ms)", lambda lane: lane.time and 1e3 * lane.time.median)
    _draw_growth(panels["memory"], grown, "peak memory of a call (MiB)", lambda lane: _peak_mebibytes(lane.record))


def _peak_mebibytes(record: Record) -> float | None:
    return None if record.peak_bytes is None else record.peak_bytes / 2**20


def _draw_bars(axes: Axes, cases: list[CaseResult]) -> None:
    colours = _colours(cases)
    y, ticks, labels = 0.0, [], []
    times = [lane.time.median for case in cases for lane in case.lanes if lane.time]
    if not times:
        axes.set_axis_off()
        return
    left = 10 ** math.floor(math.log10(1e3 * min(times)) - 0.3)
    for case in cases:
        top = y
        for lane in case.lanes:
            record = lane.record
            if lane.time is None:
                axes.text(left * 1.1, y, f"{record.title}: {record.reason}", va="center", fontsize=7, color="grey")
            else:
                value = 1e3 * lane.time.median
                axes.barh(y, value - left, left=left, height=0.85, color=colours[record.name])
                text, missed = _bar_label(case, lane)
                colour = _MISSED_COLOUR if missed else "black"
                axes.text(value * 1.06, y, text, va="center", fontsize=8, color=colour)
            y += 1.0
        ticks.append((top + y - 1.0) / 2)
        labels.append(re.sub(r", (?=[BM]\d)", "\n", case.head.case_title))
        y += 0.7
    _finish_bars(axes, cases, colours, ticks, labels, (left, 1e3 * max(times)))


def _bar_label(case: CaseResult, lane: LaneResult) -> tuple[str, bool]:
    """What stands at the end of a bar, and whether a target was missed there."""
    parts = [duration(lane.time.median)] if lane.time else []
    if lane.ratio is not None:
        parts.append(ratio_text(lane.ratio, interval=False))
        checks = [check for check in case.checks if check.name == lane.record.name]
    else:
        parts += _rates(case)
        checks = [check for check in case.checks if check.name in case.shares]
    missed = [check for check in checks if check.met is False]
    parts += [f"(MISSED: {check.what})" for check in missed]
    return "   ".join(parts), bool(missed)


def _rates(case: CaseResult) -> list[str]:
    """Our rate, in the unit of the ceiling that it is nearest to, and the share of that ceiling."""
    nearest = max(case.shares, key=lambda kind: case.shares[kind].value, default=SGEMM)
    per_second, unit = case.operations_per_second, "GFLOP/s"
    if nearest == COPY:
        per_second, unit = case.bytes_per_second, "GB/s"
    parts = [] if per_second is None else [f"{per_second / 1e9:.0f} {unit}"]
    if nearest in case.shares:
        parts.append(f"{ratio_text(case.shares[nearest], percent=True, interval=False)} of {nearest}")
    return parts


def _finish_bars(
    axes: Axes,
    cases: list[CaseResult],
    colours: dict[str, str],
    ticks: list[float],
    labels: list[str],
    extent: tuple[float, float],
) -> None:
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xscale("log")
    # Room for the labels at the ends of the longest bars.
    axes.set_xlim(extent[0], extent[1] * (extent[1] / extent[0]) ** 0.3)
    axes.set_xlabel("median time of a call (ms, log scale); × is the time over the bar without ×, paired by round")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    titles = {lane.record.name: lane.record.title for case in cases for lane in case.lanes}
    handles = [matplotlib.patches.Patch(color=colours[name], label=title) for name, title in titles.items()]
    columns = min(len(handles), _LEGEND_COLUMNS)
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, frameon=False)


def _colours(cases: list[CaseResult]) -> dict[str, str]:
    names = dict.fromkeys(lane.record.name for case in cases for lane in case.lanes)
    peers = [name for name in names if name != OURS]
    return {OURS: _OUR_COLOUR, **{name: _PEER_COLOURS[i % len(_PEER_COLOURS)] for i, name in enumerate(peers)}}


def _draw_growth(
    axes: Axes, cases: list[CaseResult], label: str, value_of: Callable[[LaneResult], float | None]
) -> None:
    for case, marker, colour in zip(cases, "os^v", (_OUR_COLOUR, *_PEER_COLOURS), strict=False):
        values = case.head.sweep["values"]
        points = [(x, value_of(lane)) for x, lane in zip(values, case.lanes, strict=True) if value_of(lane)]
        if len(points) < 2:
            continue
        x, y = zip(*points, strict=True)
        slope = math.log(y[-1] / y[0]) / math.log(x[-1] / x[0])
        title = ", ".join(case.head.case_title.split(", ")[:2])
        axes.plot(x, y, marker=marker, color=colour, label=f"{title}: {y[-1] / y[0]:.2f}×, exponent {slope:.2f}")
        linear = [y[0] * value / x[0] for value in x]
        axes.plot(x, linear, linestyle=":", linewidth=1, color=colour, alpha=0.7)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if cases:
        sweep = cases[0].head.sweep
        axes.set_xticks(sweep["values"], [str(value) for value in sweep["values"]])
        axes.set_xlabel(f"{sweep['axis']} (dotted: linear)")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(label, fontsize=9)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, fontsize=7, loc="upper left")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.25)
