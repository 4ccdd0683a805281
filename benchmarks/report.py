"""Tables and a picture from results: ``python -m benchmarks.report RESULT... --readme README.md``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import SKIPPED, WRONG, Record, read
from benchmarks.summary import (
    CaseResult,
    LaneResult,
    describe_machine,
    duration,
    mebibytes,
    memory_ratio,
    ratio_text,
    summarize,
)


def markdown(records: Sequence[Record], brief: bool = False) -> str:
    """The tables of one run: times against peers, growth, and what did not take part; unless ``brief``, the targets."""
    results = summarize(records)
    head = records[0]
    parts = [f"**{describe_machine(head.machine)}, {head.date}.**"]
    against = [result for result in results if not result.is_sweep]
    if against:
        parts.append(_table_against_peers(against))
    parts += [_table_of_growth(result) for result in results if result.is_sweep]
    targets = [
        [result.head.case_title, check.what, check.reached_text, _loud(check.verdict, check.met is not True)]
        for result in results
        for check in result.checks
    ]
    if targets and not brief:
        parts.append(_table(["work", "target", "reached", "verdict"], targets))
    absent = _absences(results)
    if absent:
        parts.append("\n".join(absent))
    return "\n\n".join(parts)


def has_place(text: str, op: str) -> bool:
    """Whether ``text`` has a marker for the tables of ``op``."""
    return _begin(op) in text


def insert(text: str, op: str, table: str) -> str:
    """``text`` with what stands between the markers of ``op`` replaced.

    Raises:
        ValueError: the markers are not there exactly once, in order.
    """
    begin, end = _begin(op), "<!-- /benchmarks -->"
    if text.count(begin) != 1 or end not in text.split(begin)[1]:
        raise ValueError(f"expected one {begin} with an {end} after it")
    before, rest = text.split(begin)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n{table}\n{end}{after}"


def refresh(paths: Sequence[Path], readme: Path | None, picture: Path, brief: bool = False) -> None:
    """Writes the picture and, between the markers of ``readme``, the tables; without ``readme`` prints them.

    ``brief`` leaves the targets out of the tables, for readers to whom they mean nothing.

    Raises:
        ValueError: the results are of several operators, or the markers are missing.
    """
    runs = [read(path) for path in paths]
    ops = {record.op for run in runs for record in run}
    if len(ops) != 1:
        raise ValueError(f"expected results of one operator, got {', '.join(sorted(ops)) or 'none'}")
    (op,) = ops
    try:
        from benchmarks.plot import draw
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        draw(runs, picture)
        print(f"picture: {picture}")
    tables = "\n\n".join(markdown(run, brief) for run in runs)
    if readme is None:
        print(tables)
        return
    link = os.path.relpath(picture, readme.parent).replace(os.sep, "/")
    readme.write_text(insert(readme.read_text(), op, f"![{op}: times and growth]({link})\n\n{tables}"))
    print(f"table: {readme}")


def _begin(op: str) -> str:
    return f"<!-- benchmarks:{op} -->"


def _table_against_peers(results: list[CaseResult]) -> str:
    titles = {lane.record.name: lane.record.title for result in results for lane in result.lanes}
    kinds = dict.fromkeys(kind for result in results for kind in result.shares)
    rows = []
    for result in results:
        lanes = {lane.record.name: lane for lane in result.lanes}
        rate = f"{result.operations_per_second / 1e9:.0f}" if result.operations_per_second else ""
        shares = [f"{100 * result.shares[name].value:.0f} %" if name in result.shares else "" for name in kinds]
        rows.append([result.head.case_title, *(_cell(lanes.get(name)) for name in titles), rate, *shares])
    columns = ["useful GFLOP/s", *(f"of {kind}'s rate" for kind in kinds)]
    return _table(["work", *titles.values(), *columns], rows)


def _cell(lane: LaneResult | None) -> str:
    if lane is None:
        return ""
    if lane.time is None:
        return lane.record.status
    text = duration(lane.time.median)
    return f"{text} ({ratio_text(lane.ratio)})" if lane.ratio else f"**{text}**"


def _table_of_growth(result: CaseResult) -> str:
    lanes = {lane.record.name: lane for lane in result.lanes}
    rows = []
    for name, lane in lanes.items():
        record = lane.record
        memory = memory_ratio(lanes, name, result.head.baseline) if name != result.head.baseline else None
        rows.append(
            [
                name,
                duration(lane.time.median) if lane.time else record.status,
                ratio_text(lane.ratio) if lane.ratio else "",
                mebibytes(record.peak_bytes) if record.peak_bytes else "",
                ratio_text(memory) if memory else "",
                mebibytes(record.scratch_bytes) if record.scratch_bytes is not None else "",
            ]
        )
    return _table([result.head.case_title, "time", "", "peak memory", "", "of it neither input nor result"], rows)


def _absences(results: list[CaseResult]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for result in results:
        for lane in result.lanes:
            record = lane.record
            if record.status in (SKIPPED, WRONG):
                lines.setdefault(f"{record.title}, {record.status}: {record.reason}", []).append(record.case_title)
    return [f"- {text} (in: {'; '.join(cases)})" for text, cases in lines.items()]


def _loud(text: str, loud: bool) -> str:
    return f"**{text}**" if loud else text


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reports results that are on disk."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="files of one operator")
    parser.add_argument("--readme", type=Path, help="replace the table between its markers; default: print it")
    parser.add_argument("--picture", type=Path, help="default: OP.png beside the first result")
    parser.add_argument("--brief", action="store_true", help="leave the targets out of the tables")
    options = parser.parse_args(arguments)
    picture = options.picture or options.results[0].with_name(f"{read(options.results[0])[0].op}.png")
    try:
        refresh(options.results, options.readme, picture, options.brief)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
