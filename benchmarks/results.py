"""Results on disk: one JSON line for each case and contestant, with the raw samples and the machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
TIMED, SKIPPED, WRONG = "timed", "skipped", "wrong"
LANE, CEILING = "lane", "ceiling"


@dataclass(kw_only=True)
class Record:
    """One contestant of one case.

    Attributes:
        op, case, case_title, dtype: the case.
        name, title: the lane; ``kind`` is ``"lane"`` or ``"ceiling"``.
        status: ``"timed"``, ``"skipped"`` or ``"wrong"`` (its results are, so it was not timed); ``reason`` says why.
        turns: seconds of every call, by turns; turn ``i`` of all records of a case ran in the same round.
        operations, bytes: of one call, by formula.
        peak_bytes, scratch_bytes: memory of one call, where it was measured.
        baseline, targets, limits, sweep: of the case.
        notes: what the contestant says of itself.
        machine: see `benchmarks.machine.fingerprint`.
    """

    op: str
    case: str
    case_title: str
    dtype: str
    name: str
    title: str
    kind: str = LANE
    status: str = TIMED
    reason: str | None = None
    turns: list[list[float]] = field(default_factory=list)
    operations: int = 0
    bytes: int = 0
    peak_bytes: int | None = None
    scratch_bytes: int | None = None
    baseline: str = ""
    targets: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    schema: int = SCHEMA


def write(path: Path, records: Iterable[Record], *, append: bool = False) -> None:
    """Writes a new file, one line a record, or adds to one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w") as file:
        file.writelines(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)


def read(path: Path) -> list[Record]:
    """Reads a file of `write`.

    Raises:
        ValueError: a line is of another schema.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        values = json.loads(line)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"{path}, line {number}: schema {values.get('schema')}, expected {SCHEMA}")
        records.append(Record(**values))
    return records


def new_path(folder: Path, stem: str) -> Path:
    """A path in ``folder`` that does not exist yet: earlier results are kept."""
    path, count = folder / f"{stem}.jsonl", 1
    while path.exists():
        count += 1
        path = folder / f"{stem}-{count}.jsonl"
    return path
