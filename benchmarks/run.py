"""The command line: verifies each case, times its contestants in turn, prints and stores what came out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, report
from benchmarks.case import DTYPES, OURS, Case, Lane, Prepared
from benchmarks.ceilings import Ceiling, ceilings
from benchmarks.memory import peak_memory
from benchmarks.ops import cases_of, op_names
from benchmarks.peers import competitors_for
from benchmarks.results import CEILING, SKIPPED, WRONG, Record, new_path, write
from benchmarks.summary import CaseResult, describe_machine, duration, mebibytes, ratio_text, summarize
from benchmarks.timing import take_turns
from benchmarks.verify import Expected, why_wrong

_ROOT = Path(__file__).parent.parent
_RESULTS = Path(__file__).parent / "results"
_QUICK_REPEATS = 3
_NO_PEERS = "none"


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
    warning = machine.busy_warning()
    if warning:
        print(f"WARNING: {warning}", file=sys.stderr)
    about: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine.fingerprint()}
    print(describe_machine(about["machine"]))
    if options.quick:
        print("quick: tiny sizes, whose timings and verdicts mean nothing")
    ops = dict.fromkeys(case.op for case in cases)
    wrong = [_run_op(op, [case for case in cases if case.op == op], options, about) for op in ops]
    return 1 if any(wrong) else 0


def _run_op(op: str, cases: list[Case], options: argparse.Namespace, about: dict[str, Any]) -> bool:
    """Runs and stores the cases of an operator; whether a contestant was wrong."""
    path = options.out
    if path is None and not options.quick:
        path = new_path(_RESULTS, f"{about['date']}-{op}-{machine.slug(about['machine'])}")
    wrong = False
    for index, case in enumerate(cases):
        records = run_case(case, options, about)
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--peers", type=_listed, metavar="P,P", help=f"only these peers; {_NO_PEERS}: ourselves alone")
    parser.add_argument("--list", action="store_true", help="list the cases with their targets and stop")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s, as for the targets")
    parser.add_argument("--tier", choices=machine.TIERS, help="put us and all peers on this CPU tier")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--repeats", type=int, help="rounds a case")
    length.add_argument("--seconds", type=float, help="time a case; default: what the case says")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: a new file in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the harness; stored only with --out")
    parser.add_argument("--report", action="store_true", help="then refresh README.md's table, if any, and the picture")
    options = parser.parse_args(arguments)
    options.ops = options.ops or op_names()
    if options.quick and options.repeats is None:
        options.repeats = _QUICK_REPEATS
    _check(options, parser)
    return options


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with a message if an option is wrong."""
    _check_names(parser, "op", options.ops, op_names())
    _check_names(parser, "dtype", options.dtype, list(DTYPES))
    _check_names(parser, "case", options.case, [case.name for op in options.ops for case in cases_of(op)])
    peers = {peer.name for op in options.ops for peer in competitors_for(op)}
    _check_names(parser, "peer", options.peers, [*sorted(peers), _NO_PEERS])
    if options.out and len(set(options.ops)) > 1:
        parser.error("--out takes the results of one operator; name it")
    if options.report and options.quick:
        parser.error("--report: the timings of --quick mean nothing")
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
        for case in cases_of(op, quick=options.quick)
        if case.device == options.device
        and case.dtype in options.dtype
        and (options.case is None or case.name in options.case)
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
    tops = {top.name: top for top in ceilings(quick=options.quick)}
    records |= {name: _ceiling_record(case, top, about) for name, top in tops.items()}
    runs |= {name: top.run for name, top in tops.items()}
    length: dict[str, Any] = {"seconds": case.seconds if options.seconds is None else options.seconds}
    length |= {"repeats": options.repeats, "own_threads": own_threads}
    for name, turns in take_turns(runs, **length).items():
        records[name].turns = turns
    del runs, tops
    if case.limits and case.sweep:
        _measure_memory(case, records, options.quick)
    return list(records.values())


def _takes_part(lane: Lane, record: Record, wanted: list[str] | None) -> bool:
    """Whether the lane can take its problem and was asked for; else its record says why not."""
    reason = lane.competitor.refuses(lane.problem)
    if reason is None and lane.competitor.name != OURS and wanted is not None and lane.competitor.name not in wanted:
        reason = "not asked for (--peers)"
    if reason is not None:
        _skip(lane, record, reason)
    return reason is None


def _skip(lane: Lane, record: Record, reason: str) -> None:
    record.status, record.reason = SKIPPED, reason
    print(f"  skipped  {lane.name}: {reason}")


def _prepared(lane: Lane, inputs: Any, expected: Expected, record: Record) -> Prepared | None:
    """The lane, ready and found right; else None, with the reason in its record."""
    try:
        prepared = lane.competitor.prepare(lane.problem, inputs)
        results = prepared.comparable(prepared.run())
    except Exception as error:
        # A peer that cannot run here is a line in the report. We must run, or say in full why not.
        if lane.competitor.name == OURS:
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        _skip(lane, record, f"{type(error).__name__}: {first_line}")
        return None
    record.notes = dict(prepared.notes)
    fault = why_wrong(lane, results, expected)
    if fault is not None:
        record.status, record.reason = WRONG, fault
        print(f"  WRONG    {lane.name}: {fault}")
        return None
    print(f"  verified {lane.name}{''.join(f', {key} {value}' for key, value in record.notes.items())}")
    return prepared


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
        rate, unit = result.ceilings[name] / 1e9, "GFLOP/s" if name == "sgemm" else "GB/s"
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
