"""The command line: verifies each case, times its contestants in turn, prints and stores what came out."""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cuda, machine, report
from benchmarks.case import DEVICES, DTYPES, OURS, Case, Lane, Prepared
from benchmarks.ceilings import COPY, Ceiling, ceilings
from benchmarks.memory import peak_memory
from benchmarks.ops import cases_of, op_names
from benchmarks.peers import competitors_for
from benchmarks.results import CEILING, SKIPPED, WRONG, Record, new_path, write
from benchmarks.summary import CaseResult, describe_machine, duration, mebibytes, ratio_text, summarize
from benchmarks.timing import HostClock, take_turns
from benchmarks.verify import Expected, why_wrong

_ROOT = Path(__file__).parent.parent
_RESULTS = Path(__file__).parent / "results"
_QUICK_REPEATS = 3
_NO_PEERS = "none"
# A GPU is often lent for minutes.
_BUDGETS = {"cpu": None, "cuda": 480.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; the exit status is 1 if a contestant computes something wrong."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(arguments)
    machine.enter_tier(options.tier, arguments)
    torch.set_num_threads(options.threads)
    cases = _selected(options)
    if options.list:
        _print_list(cases)
        return 0
    if not cases:
        print(f"no cases for op {', '.join(options.ops)}, device {options.device}, dtype {','.join(options.dtype)}")
        return 0
    missing = cuda.why_no_cuda() if options.device == "cuda" else None
    if missing:
        print(f"benchmarks: --device cuda: {missing}", file=sys.stderr)
        return 1
    warning = machine.busy_warning()
    if warning:
        print(f"WARNING: {warning}", file=sys.stderr)
    about: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine.fingerprint(options.device)}
    print(describe_machine(about["machine"]))
    if options.quick:
        print("quick: tiny sizes, whose timings and verdicts mean nothing")
    ops = list(dict.fromkeys(case.op for case in cases))
    end = None if options.budget is None else time.monotonic() + options.budget
    wrong = []
    for index, op in enumerate(ops):
        # What one operator leaves of its share goes to those that follow.
        share = None if end is None else (end - time.monotonic()) / (len(ops) - index)
        wrong.append(_run_op(op, [case for case in cases if case.op == op], options, about, share))
    return 1 if any(wrong) else 0


def _run_op(
    op: str, cases: list[Case], options: argparse.Namespace, about: dict[str, Any], share: float | None
) -> bool:
    """Runs and stores the cases of an operator that begin within ``share`` seconds; whether a contestant was wrong."""
    path = options.out
    if path is None and not options.quick:
        path = new_path(_RESULTS, f"{about['date']}-{op}-{machine.slug(about['machine'])}")
    wrong = False
    end = None if share is None else time.monotonic() + share
    for index, case in enumerate(cases):
        late = end is not None and time.monotonic() >= end
        records = _too_late(case, about) if late else _guarded(case, options, about)
        (result,) = summarize(records)
        wrong |= result.wrong
        _print_result(result)
        if path is not None:
            # Case by case: whoever interrupts a long run keeps what is there.
            write(path, records, append=index > 0)
    if path is not None:
        print(f"\nresults: {path}")
    if options.report and path is not None:
        readme = _ROOT / "README.md"
        # Not every operator has a place there; the tables of the others are printed.
        place = readme if report.has_place(readme.read_text(), op) else None
        report.refresh([path], place, _RESULTS / f"{op}.png")
    return wrong


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"operators: {', '.join(op_names())}; default: all")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these cases")
    parser.add_argument("--dtype", type=_listed, default=list(DTYPES), metavar="D,D", help=f"of {','.join(DTYPES)}")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    parser.add_argument("--peers", type=_listed, metavar="P,P", help=f"only these peers; {_NO_PEERS}: ourselves alone")
    parser.add_argument("--list", action="store_true", help="list the cases with their targets and stop")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s, as for the targets")
    parser.add_argument("--tier", choices=machine.TIERS, help="put us and all peers on this CPU tier")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--repeats", type=int, help="rounds a case")
    length.add_argument("--seconds", type=float, help="time a case; default: what the case says")
    parser.add_argument(
        "--budget", type=float, help="seconds for all cases: none begins later; default: 480 on cuda, else no end"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the harness; stored only with --out")
    parser.add_argument("--report", action="store_true", help="then refresh README.md's table, if any, and the picture")
    options = parser.parse_args(arguments)
    options.ops = options.ops or op_names()
    if options.quick and options.repeats is None:
        options.repeats = _QUICK_REPEATS
    if options.budget is None:
        options.budget = _BUDGETS[options.device]
    _check(options, parser)
    return options


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with a message if an option is wrong."""
    _check_names(parser, "op", options.ops, op_names())
    _check_names(parser, "dtype", options.dtype, list(DTYPES))
    known = [case.name for op in options.ops for case in cases_of(op, device=options.device)]
    _check_names(parser, "case", options.case, known)
    peers = {peer.name for op in options.ops for peer in competitors_for(op, options.device)}
    _check_names(parser, "peer", options.peers, [*sorted(peers), _NO_PEERS])
    if options.out and len(set(options.ops)) > 1:
        parser.error("--out takes the results of one operator; name it")
    if options.report and options.quick:
        parser.error("--report: the timings of --quick mean nothing")
    if options.tier and options.device != "cpu":
        parser.error("--tier: only a CPU has tiers")
    if options.threads < 1 or (options.repeats is not None and options.repeats < 1):
        parser.error("--threads and --repeats: expected a positive number")


def _check_names(parser: argparse.ArgumentParser, kind: str, given: list[str] | None, known: list[str]) -> None:
    unknown = [name for name in given or () if name not in known]
    if unknown:
        parser.error(f"unknown {kind} {', '.join(unknown)}; there are {', '.join(known)}")


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _selected(options: argparse.Namespace) -> list[Case]:
    return [
        case
        for op in options.ops
        for case in cases_of(op, device=options.device, quick=options.quick)
        if case.dtype in options.dtype and (options.case is None or case.name in options.case)
    ]


def run_case(case: Case, options: argparse.Namespace, about: dict[str, Any]) -> list[Record]:
    """The records of a case: its lanes, verified and timed or with the reason why not, and the ceilings."""
    print(f"\n{case.name}: {case.title}")
    records: dict[str, Record] = {lane.name: _record(case, lane, about) for lane in case.lanes}
    runs: dict[str, Callable[[], Any]] = {}
    own_threads = set()
    lanes = [lane for lane in case.lanes if _takes_part(lane, records[lane.name], options.peers)]
    for problem in dict.fromkeys(lane.problem for lane in lanes):
        inputs = problem.draw()
        expected = Expected(problem, inputs)
        for lane in lanes:
            if lane.problem != problem:
                continue
            prepared = _prepared(lane, inputs, expected, records[lane.name])
            if prepared is not None:
                runs[lane.name] = prepared.run
                own_threads |= {lane.name} if prepared.own_threads else set()
        # The sizes of a sweep need their memory one after the other.
        del expected
    if case.baseline not in runs:
        reason = f"{case.baseline}, with which it is compared, was not timed"
        for name in runs:
            records[name].status, records[name].reason = SKIPPED, reason
        return list(records.values())
    for top in ceilings(case.ceilings, case.device, quick=options.quick):
        records[top.name] = _ceiling_record(case, top, about)
        if _runs(top, records[top.name]):
            runs[top.name] = top.run
    how: dict[str, Any] = {"seconds": case.seconds if options.seconds is None else options.seconds}
    how |= {"repeats": options.repeats, "own_threads": own_threads}
    how["clock"] = HostClock() if case.device == "cpu" else cuda.CudaClock(case.launch)
    for name, turns in take_turns(runs, **how).items():
        records[name].turns = turns
    del runs, prepared, inputs, top
    if case.sweep:
        _measure_memory(case, records, options.quick)
    return list(records.values())


def _guarded(case: Case, options: argparse.Namespace, about: dict[str, Any]) -> list[Record]:
    """`run_case`; a GPU may not be there for a second run, so what is raised ends only the case there."""
    if case.device == "cpu":
        return run_case(case, options, about)
    try:
        # What earlier cases leave would be missing to the largest ones.
        gc.collect()
        torch.cuda.empty_cache()
        return run_case(case, options, about)
    except Exception as error:
        traceback.print_exc()
        return _without_times(case, about, WRONG, f"{type(error).__name__}: {_first_line(error)}")


def _too_late(case: Case, about: dict[str, Any]) -> list[Record]:
    print(f"\n{case.name}: {case.title}\n  skipped: the time of the run was over")
    return _without_times(case, about, SKIPPED, "the time of the run was over (--budget)")


def _without_times(case: Case, about: dict[str, Any], status: str, reason: str) -> list[Record]:
    records = [_record(case, lane, about) for lane in case.lanes]
    for record in records:
        record.status, record.reason = (status if record.name == case.baseline else SKIPPED), reason
    return records


def _takes_part(lane: Lane, record: Record, wanted: list[str] | None) -> bool:
    """Whether the lane can take its problem and was asked for; else its record says why not."""
    reason = lane.competitor.refuses(lane.problem)
    if reason is None and not lane.competitor.ours and wanted is not None and lane.competitor.name not in wanted:
        reason = "not asked for (--peers)"
    if reason is not None:
        _skip(lane, record, reason)
    return reason is None


def _skip(lane: Lane, record: Record, reason: str) -> None:
    record.status, record.reason = SKIPPED, reason
    print(f"  skipped  {lane.name}: {reason}")


def _runs(top: Ceiling, record: Record) -> bool:
    """Whether a ceiling can be measured here: not every GPU has every format."""
    try:
        top.run()
    except RuntimeError as error:
        record.status, record.reason = SKIPPED, _first_line(error)
    return record.status != SKIPPED


def _prepared(lane: Lane, inputs: Any, expected: Expected, record: Record) -> Prepared | None:
    """The lane, ready and found right; else None, with the reason in its record."""
    try:
        prepared = lane.competitor.prepare(lane.problem, inputs)
        results = prepared.comparable(prepared.run())
    except Exception as error:
        # A peer that cannot run here is a line in the report. We must run, or say in full why not.
        if lane.competitor.name == OURS:
            raise
        _skip(lane, record, f"{type(error).__name__}: {_first_line(error)}")
        return None
    record.notes = dict(prepared.notes)
    fault = why_wrong(lane, results, expected)
    del results
    if fault is not None:
        record.status, record.reason = WRONG, fault
        print(f"  WRONG    {lane.name}: {fault}")
        return None
    if lane.problem.device == "cuda":
        record.scratch_bytes = cuda.scratch_bytes(prepared.run)
    print(f"  verified {lane.name}{''.join(f', {key} {value}' for key, value in record.notes.items())}")
    return prepared


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _record(case: Case, lane: Lane, about: dict[str, Any]) -> Record:
    return Record(
        **_case_fields(case),
        name=lane.name,
        title=lane.title,
        operations=lane.problem.operations,
        bytes=lane.problem.compulsory_bytes,
        **about,
    )


def _ceiling_record(case: Case, top: Ceiling, about: dict[str, Any]) -> Record:
    return Record(
        **_case_fields(case),
        name=top.name,
        title=top.kind,
        kind=CEILING,
        operations=top.operations,
        bytes=top.bytes,
        **about,
    )


def _case_fields(case: Case) -> dict[str, Any]:
    sweep = {"axis": case.sweep[0], "values": list(case.sweep[1])} if case.sweep else {}
    fields = {"op": case.op, "case": case.name, "case_title": case.title, "dtype": case.dtype}
    return {
        **fields,
        "baseline": case.baseline,
        "targets": dict(case.targets),
        "limits": dict(case.limits),
        "sweep": sweep,
    }


def _measure_memory(case: Case, records: dict[str, Record], quick: bool) -> None:
    for lane in case.lanes:
        record = records[lane.name]
        try:
            memory = peak_memory(case, lane, quick=quick)
        except RuntimeError as error:
            print(f"  no memory figures: {error}")
            return
        record.peak_bytes, record.scratch_bytes = memory
        print(f"  memory   {lane.name}: peak {mebibytes(memory.peak)}, scratch {mebibytes(memory.scratch)}")


def _print_result(result: CaseResult) -> None:
    for lane in result.lanes:
        if lane.time is not None:
            ratio = f"  {ratio_text(lane.ratio)}" if lane.ratio else ""
            spread = f"[{duration(lane.time.lower)}, {duration(lane.time.upper)}]"
            print(
                f"  {lane.record.name:<10} {duration(lane.time.median):>9} {spread} "
                f"of {len(lane.record.turns)} turns{ratio}"
            )
    if result.operations_per_second and result.bytes_per_second:
        print(
            f"  {result.head.baseline} does {result.operations_per_second / 1e9:.1f} useful GFLOP/s and "
            f"{result.bytes_per_second / 1e9:.2f} compulsory GB/s"
        )
    for name, share in result.shares.items():
        rate, unit = result.ceilings[name] / 1e9, "GB/s" if name == COPY else "GFLOP/s"
        print(f"    {ratio_text(share, percent=True)} of {name} ({rate:.1f} {unit})")
    for check in result.checks:
        print(f"  target {check.what}: {f'{check.reached_text} {check.verdict}'.strip()}")


def _print_list(cases: list[Case]) -> None:
    for case in cases:
        print(f"{case.op}  {case.name:<28} {case.title}")
        bounds = [f"{name} ≥ {bound:g}" for name, bound in case.targets.items()]
        bounds += [f"{name} ≤ {bound:g}× {case.baseline}" for name, bound in case.limits.items()]
        print(f"    targets: {', '.join(bounds) or 'none'}")
        print(f"    lanes: {', '.join(lane.name for lane in case.lanes)}")
