"""From raw records to medians, ratios, rates and verdicts: what the terminal, the tables and the picture show."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple

from benchmarks.ceilings import COPY, SGEMM
from benchmarks.results import CEILING, LANE, TIMED, WRONG, Record
from benchmarks.stats import Ratio, Spread, paired_ratio, spread


class Check(NamedTuple):
    """What a case was held to, and what it reached.

    Attributes:
        what: the target in words.
        name: the lane or ceiling it speaks of.
        bound: the number it names.
        reached: what was measured, or None; ``reason`` says why.
        at_most: the bound is an upper one.
        percent: it is a share, to be shown in per cent.
    """

    what: str
    name: str
    bound: float
    reached: Ratio | None
    reason: str = ""
    at_most: bool = False
    percent: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the measured value keeps the bound; None without one."""
        if self.reached is None:
            return None
        return self.reached.value <= self.bound if self.at_most else self.reached.value >= self.bound

    @property
    def verdict(self) -> str:
        """``met``, ``MISSED`` or ``NOT MEASURED`` with the reason."""
        if self.met is None:
            return f"NOT MEASURED: {self.reason}"
        return "met" if self.met else "MISSED"

    @property
    def reached_text(self) -> str:
        """The value and its interval."""
        return "" if self.reached is None else ratio_text(self.reached, percent=self.percent)


@dataclass(frozen=True)
class LaneResult:
    """A lane's record, its time, and how many times the baseline's time that is."""

    record: Record
    time: Spread | None
    ratio: Ratio | None


@dataclass(frozen=True)
class CaseResult:
    """A case as a whole; rates are the baseline's, ``shares`` its part of the ceilings."""

    head: Record
    lanes: list[LaneResult]
    operations_per_second: float | None
    bytes_per_second: float | None
    ceilings: dict[str, float]
    shares: dict[str, Ratio]
    checks: list[Check]

    @property
    def is_sweep(self) -> bool:
        """Whether the lanes are sizes, not competitors."""
        return bool(self.head.sweep)

    @property
    def wrong(self) -> bool:
        """Whether a lane computed something else."""
        return any(lane.record.status == WRONG for lane in self.lanes)


def summarize(records: Iterable[Record]) -> list[CaseResult]:
    """One result for each case, in the order of the records."""
    return [_summarize_case(list(group)) for _, group in itertools.groupby(records, lambda r: (r.op, r.case))]


def _summarize_case(records: list[Record]) -> CaseResult:
    head = records[0]
    lanes = [record for record in records if record.kind == LANE]
    base = next((record for record in lanes if record.name == head.baseline and record.status == TIMED), None)
    results = [_lane(record, base) for record in lanes]
    best = _best_ceilings(records)
    if base is None:
        return CaseResult(head, results, None, None, {}, {}, _checks(head, results, {}))
    seconds = spread(base.turns).median
    shares = {
        kind: paired_ratio(record.turns, base.turns).times(_work(base, kind) / _work(record, kind))
        for kind, record in best.items()
    }
    ceilings = {kind: _rate(record, kind) for kind, record in best.items()}
    checks = _checks(head, results, shares)
    return CaseResult(head, results, base.operations / seconds, base.bytes / seconds, ceilings, shares, checks)


def _lane(record: Record, base: Record | None) -> LaneResult:
    if record.status != TIMED:
        return LaneResult(record, None, None)
    ratio = None if base is None or base is record else paired_ratio(record.turns, base.turns)
    return LaneResult(record, spread(record.turns), ratio)


def _work(record: Record, kind: str) -> int:
    return record.bytes if kind == COPY else record.operations


def _best_ceilings(records: list[Record]) -> dict[str, Record]:
    best: dict[str, Record] = {}
    for record in records:
        if record.kind == CEILING and record.status == TIMED:
            known = best.get(record.title)
            if known is None or _rate(record, record.title) > _rate(known, record.title):
                best[record.title] = record
    return best


def _rate(record: Record, kind: str) -> float:
    return _work(record, kind) / spread(record.turns).median


def _checks(head: Record, lanes: list[LaneResult], shares: dict[str, Ratio]) -> list[Check]:
    by_name = {lane.record.name: lane for lane in lanes}
    checks = []
    for name, bound in head.targets.items():
        if name in (SGEMM, COPY):
            what = f"≥ {100 * bound:g} % of {name}'s rate"
            reason = "" if name in shares else "neither side was timed"
            checks.append(Check(what, name, bound, shares.get(name), reason, percent=True))
        else:
            reached, reason = _ratio_of(by_name, name, head.baseline)
            checks.append(Check(f"≥ {bound:g}× as fast as {name}", name, bound, reached, reason))
    for name, bound in head.limits.items():
        reached, reason = _ratio_of(by_name, name, head.baseline)
        of = f"{name} ≤ {bound:g}× that of {head.baseline}"
        checks.append(Check(f"time of {of}", name, bound, reached, reason, at_most=True))
        if head.sweep:
            memory = memory_ratio(by_name, name, head.baseline)
            checks.append(Check(f"peak memory of {of}", name, bound, memory, "no memory figures", at_most=True))
    return checks


def _ratio_of(by_name: dict[str, LaneResult], name: str, baseline: str) -> tuple[Ratio | None, str]:
    lane = by_name.get(name)
    if lane is None:
        return None, f"{name} did not take part"
    if lane.ratio is None:
        return None, lane.record.reason or f"{baseline} was not timed"
    return lane.ratio, ""


def memory_ratio(by_name: dict[str, LaneResult], name: str, baseline: str) -> Ratio | None:
    """Peak memory of a lane over the baseline's; a single measurement, so the interval is a point."""
    peaks = [by_name[lane].record.peak_bytes if lane in by_name else None for lane in (name, baseline)]
    if not peaks[0] or not peaks[1]:
        return None
    return Ratio(*(peaks[0] / peaks[1],) * 3)


def ratio_text(ratio: Ratio, *, percent: bool = False, interval: bool = True) -> str:
    """``4.03× [3.98, 4.11]``; the interval is left out where there is none."""
    factor, unit = (100.0, " %") if percent else (1.0, "×")
    value, low, high = (_three_digits(factor * part) for part in ratio)
    around = f" [{low}, {high}]" if interval and ratio.low < ratio.high else ""
    return f"{value}{unit}{around}"


def duration(seconds: float) -> str:
    """Three digits and the unit."""
    return f"{_three_digits(seconds)} s" if seconds >= 1 else f"{_three_digits(1e3 * seconds)} ms"


def mebibytes(count: int) -> str:
    """Three digits and the unit."""
    return f"{_three_digits(count / 2**20)} MiB"


def _three_digits(value: float) -> str:
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}"


def describe_machine(machine: dict[str, Any]) -> str:
    """One line: what a table or a picture was measured on."""
    commit = machine["git"]["commit"]
    state = f"commit {commit[:10]}{' with changes' if machine['git']['dirty'] else ''}" if commit else "no commit"
    return f"{name_of(machine)}, torch {machine['torch']}, {state}"


def name_of(machine: dict[str, Any], longest: int | None = None) -> str:
    """The processor that did the work, with what it was set to; its own name takes ``longest`` characters at most."""
    gpu = machine.get("gpu")
    name = gpu["name"] if gpu else machine["cpu"]
    if longest is not None:
        name = shorten(name.replace("(R)", "").replace("(TM)", ""), longest)
    if gpu:
        return f"{name}, driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}"
    return f"{name}, {machine['threads']} threads on {machine['cores']} cores, CPU tier {machine['cpu_tier']}"
