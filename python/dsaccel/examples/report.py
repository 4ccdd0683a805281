"""Results as Markdown, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsaccel.demo.plot import COLOURS, INK, STYLE

Row = Mapping[str, Any]
# By key of a row: the heading of its column, and the format of its numbers.
Columns = Mapping[str, tuple[str, str]]


def markdown_table(columns: Columns, rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown; a value that is None or missing shows as a dash."""
    lines = [
        "| " + " | ".join(heading for heading, _ in columns.values()) + " |",
        "| " + " | ".join("---:" if form else "---" for _, form in columns.values()) + " |",
    ]
    for row in rows:
        cells = ("–" if row.get(key) is None else format(row[key], form) for key, (_, form) in columns.items())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(out: Path, result: Mapping[str, Any], markdown: str) -> None:
    """Writes ``results.json`` and ``results.md`` into the folder ``out``, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "results.md").write_text(markdown + "\n")


def replace_section(text: str, name: str, section: str) -> str:
    """``text`` with what stands between the marks ``<!-- name -->`` and ``<!-- /name -->`` replaced.

    Raises:
        ValueError: the marks are not there once each, in order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"expected one {begin} with an {end} after it")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{section}\n{end}{rest.split(end)[1]}"


def publish(doc: Path, name: str, section: str, files: Mapping[str, Path]) -> None:
    """Puts results into a page of the documentation: the section ``name``, and files into the folder of that name.

    Args:
        doc: the page.
        name: of the section's marks, and of the folder beside the page.
        section: in Markdown.
        files: by the name that each gets.

    Raises:
        ValueError: the page has no place for the section.
    """
    doc.write_text(replace_section(doc.read_text(), name, section))
    folder = doc.parent / name
    folder.mkdir(exist_ok=True)
    for published, path in files.items():
        (folder / published).write_bytes(path.read_bytes())


def bars(rows: Sequence[Row], panels: Columns, title: str, path: Path) -> None:
    """Draws bars for each row, a panel for each column.

    Args:
        rows: with ``label``, ``peer`` (drawn in grey) and the keys of ``panels``.
        panels: title and format of each panel.
        title: above all.
        path: of the PNG; its folder is there.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [row["label"] for row in rows]
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 1.2 + 0.32 * len(rows)), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        for axes, (key, (heading, form)) in zip(
            figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True
        ):
            values = [row.get(key) or 0 for row in rows]
            drawn = axes.barh(names, values, height=0.62, color=[COLOURS[row["peer"]] for row in rows])
            labels = ["–" if row.get(key) is None else format(row[key], form) for row in rows]
            axes.bar_label(drawn, labels, padding=3, fontsize=8, color=INK)
            axes.set(title=heading, xlim=(min(0, 1.3 * min(values)), 1.3 * max(*values, 1e-9)))
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=4)
        figure.axes[0].invert_yaxis()
        figure.savefig(path)
