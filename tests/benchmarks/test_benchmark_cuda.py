"""Running on a GPU, as far as it can be tested without one: selection, refusals, the clock's order, budget, records."""

import argparse
import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from benchmarks import cuda, machine, run
from benchmarks.case import OURS, TRITON, Competitor, Prepared, our_competitors
from benchmarks.ceilings import ceilings
from benchmarks.memory import Memory
from benchmarks.ops import cases_of, op_names
from benchmarks.report import markdown
from benchmarks.results import CEILING, Record, read
from benchmarks.run import main
from benchmarks.summary import describe_machine, summarize
from benchmarks.timing import HostClock
from dskernels import _registry

ROOT = Path(__file__).parents[2]
OPS = [op for op in op_names() if cases_of(op, device="cuda")]
GPU = {"name": "NVIDIA Example 80GB", "driver": "1.2", "cuda": "13.0"}
MACHINE = {"cpu": "Example CPU", "threads": 2, "cores": 4, "cpu_tier": "AVX2", "torch": "2.0", "gpu": GPU}
MACHINE["git"] = {"commit": None, "dirty": None}


def test_list_names_the_cases_of_a_gpu(capsys):
    assert main(["--list", "--device", "cuda"]) == 0
    listed = capsys.readouterr().out
    assert "window_attention  grouped-forward-backward-bf16 " in listed
    assert "lanes: dskernels, triton, flash_attn, flex, sdpa_causal, sdpa_mask, varlen_attn" in listed
    assert "lanes: dskernels, triton, linear, scaled_mm" in listed
    assert {line.strip() for line in listed.splitlines() if "targets" in line} == {"targets: none"}


@pytest.mark.parametrize("op", OPS)
def test_cases_of_a_gpu_are_told_apart_and_ours_come_first(op):
    cases = cases_of(op, device="cuda")
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert (case.device, case.targets, case.limits, case.seconds) == ("cuda", {}, {}, 2.0)
        assert all(lane.problem.device == "cuda" for lane in case.lanes)
        assert all("cuda" in lane.competitor.devices for lane in case.lanes)
        if not case.sweep:
            assert [lane.name for lane in case.lanes][:2] == [OURS, TRITON]
            assert all(lane.competitor.ours == (lane.name in (OURS, TRITON)) for lane in case.lanes)


def test_cases_of_the_cpu_have_no_lane_of_a_gpu():
    for op in op_names():
        for case in cases_of(op):
            assert case.device == "cpu"
            assert all(lane.problem.device == "cpu" for lane in case.lanes)
            assert TRITON not in [lane.name for lane in case.lanes]


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "is built without CUDA"), ("13.0", "(CUDA 13.0) finds no GPU")],
    ids=["cpu_build", "no_gpu"],
)
def test_without_a_gpu_one_line_says_so(capsys, monkeypatch, version, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    assert main(["--device", "cuda"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("benchmarks: --device cuda: torch ")
    assert line.endswith(reason)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "AVX2"], "only a CPU has tiers"),
        (["--peers", "onednn"], "unknown peer onednn"),
        (["--case", "grouped-forward-fp32"], "unknown case grouped-forward-fp32"),
    ],
    ids=["tier", "peer", "case"],
)
def test_what_a_gpu_does_not_have_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["--device", "cuda", *arguments])
    assert message in capsys.readouterr().err


def test_nothing_but_torch_is_needed():
    program = """
import sys
for name in ("hypothesis", "matplotlib", "numpy", "onnx", "onnxruntime", "torchao", "torchvision"):
    sys.modules[name] = None
from benchmarks.run import main
from benchmarks.stats import paired_ratio, spread
assert paired_ratio([[2.0, 2.0]], [[1.0]]) == (2.0, 2.0, 2.0)
main(["--list", "--device", "cuda"])
status = main(["window_attention", "--case", "forward-fp32", "--quick", "--repeats", "1", "--peers", "none"])
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified dskernels" in done.stdout


def test_lane_of_triton_prepares_and_runs_on_triton():
    seen = []

    def prepare(problem, inputs):
        seen.append(_registry._choice.backend)
        return Prepared(lambda: seen.append(_registry._choice.backend) or [], {"problem": problem})

    ours = Competitor(name=OURS, title="ours", refuses=lambda problem: None, prepare=prepare)
    assert our_competitors(ours, "cpu") == [ours]
    first, second = our_competitors(ours, "cuda")
    assert first is ours
    assert (second.name, second.title, second.ours) == (TRITON, "ours, Triton", True)
    prepared = second.prepare("a problem", None)
    assert prepared.notes == {"problem": "a problem"}
    assert prepared.run() == []
    assert seen == [TRITON, TRITON]
    assert _registry._choice.backend is None


def test_files_and_tables_are_named_after_the_gpu():
    assert machine.slug(MACHINE) == "nvidia-example-80gb"
    assert describe_machine(MACHINE) == "NVIDIA Example 80GB, driver 1.2, CUDA 13.0, torch 2.0, no commit"
    no_driver = {**MACHINE, "gpu": {**GPU, "driver": None}}
    assert "driver unknown" in describe_machine(no_driver)


def test_picture_is_entitled_with_the_gpu():
    pytest.importorskip("matplotlib")
    from benchmarks.plot import _title

    record = Record(
        op="a", case="b", case_title="c", dtype="bf16", name="d", title="e", machine=MACHINE, date="2000-01-01"
    )
    assert _title(record) == "a on NVIDIA Example 80GB, driver 1.2, CUDA 13.0, torch 2.0, 2000-01-01"


def test_fault_that_stays_ends_no_later_case(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    (case, *_) = cases_of("window_attention", device="cuda", quick=True)
    assert run._guarded(case, argparse.Namespace(), {})[0].status == "wrong"


def test_ceilings_of_every_format_are_shares():
    def record(name, seconds, **fields):
        case = {"op": "quantized_matmul", "case": "a", "case_title": "int8", "dtype": "bf16", "baseline": OURS}
        sizes = {"operations": 2 * 10**9, "bytes": 10**7, **fields}
        return Record(**case, name=name, **{"title": name, **sizes}, turns=[[seconds]] * 3, machine=MACHINE)

    records = [record(OURS, 0.02)]
    records += [record(f"{kind}-64", 0.01, title=kind, kind=CEILING) for kind in ("int8", "bf16", "copy")]
    records[2].turns = [[0.005]] * 3
    (case,) = summarize(records)
    assert {kind: share.value for kind, share in case.shares.items()} == pytest.approx(
        {"int8": 0.5, "bf16": 0.25, "copy": 0.5}
    )
    assert case.ceilings == pytest.approx({"int8": 2e11, "bf16": 4e11, "copy": 1e9})
    text = markdown(records)
    assert "| useful GFLOP/s | of int8's rate | of bf16's rate | of copy's rate |" in text
    assert "**20.0 ms** | 100 | 50 % | 25 % | 50 % |" in text


@pytest.mark.parametrize("kind", ["sgemm", "tf32", "bf16", "fp16", "int8", "fp8", "copy"])
def test_ceilings_run_and_count_what_they_do(kind):
    before = torch.backends.cuda.matmul.fp32_precision
    (top,) = ceilings([kind], quick=True)
    top.run()
    assert torch.backends.cuda.matmul.fp32_precision == before
    width = {"sgemm": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}.get(kind)
    assert top.kind == kind
    if kind == "copy":
        assert (top.operations, top.bytes) == (0, 2 * 2**20)
    else:
        assert (top.operations, top.bytes) == (2 * 64**3, 3 * width * 64**2)


def _options(*arguments):
    return run._options(["window_attention", "--device", "cuda", "--quick", *arguments])


def test_ceiling_that_does_not_run_is_skipped():
    (top,) = ceilings(["bf16"], quick=True)

    def refused():
        raise RuntimeError("no such format\nand a trace")

    record = Record(op="a", case="b", case_title="c", dtype="bf16", name="d", title="e")
    assert run._runs(top, record)
    assert not run._runs(top._replace(run=refused), record)
    assert (record.status, record.reason) == ("skipped", "no such format")


@pytest.mark.parametrize(("budget", "begun"), [("30", 3), ("300", 6)], ids=["short", "enough"])
def test_budget_is_shared_among_operators_and_late_cases_are_skipped(tmp_path, monkeypatch, budget, begun):
    now = [0.0]
    started = []

    def ten_seconds(case, options, about):
        started.append((case.op, case.name))
        now[0] += 10.0
        return run._without_times(case, about, "timed", "")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "_guarded", ten_seconds)
    monkeypatch.setattr(cuda, "why_no_cuda", lambda: None)
    monkeypatch.setattr(machine, "fingerprint", lambda device: MACHINE)
    monkeypatch.setattr(run, "_RESULTS", tmp_path)
    monkeypatch.setattr(run, "summarize", lambda records: [SimpleNamespace(wrong=False)])
    monkeypatch.setattr(run, "_print_result", lambda result: None)
    ops = ["window_attention_varlen", "window_attention_decode"]
    assert main([*ops, "--device", "cuda", "--budget", budget]) == 0
    assert len(started) == begun
    records = [record for path in sorted(tmp_path.iterdir()) for record in read(path)]
    assert len({(record.op, record.case) for record in records}) == 6
    late = {(record.op, record.case) for record in records if record.reason and "--budget" in record.reason}
    assert len(late) == 6 - begun
    assert not late & set(started)
    # Each had its turn.
    assert {op for op, _ in started} == set(ops)


def test_default_budget_is_that_of_a_gpu():
    assert _options().budget == 480.0
    assert _options("--budget", "20").budget == 20.0
    assert run._options([]).budget is None


def test_fault_ends_its_case_alone(capsys, monkeypatch):
    def broken(case, options, about):
        raise RuntimeError("an illegal memory access\nwith details")

    monkeypatch.setattr(run, "run_case", broken)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    (case, *_) = cases_of("window_attention", device="cuda", quick=True)
    records = run._guarded(case, argparse.Namespace(), {})
    status = {record.name: record.status for record in records}
    assert status.pop(OURS) == "wrong"
    assert set(status.values()) == {"skipped"}
    assert {record.reason for record in records} == {"RuntimeError: an illegal memory access"}
    (result,) = summarize(records)
    assert result.wrong
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="illegal"):
        run._guarded(dataclasses.replace(case, device="cpu"), argparse.Namespace(), {})


class HostAsGpu(HostClock):
    """Takes the place of a GPU's clock, and says how it was asked for."""

    launches: ClassVar[list] = []

    def __init__(self, launch):
        self.launches.append(launch)


@pytest.mark.parametrize(
    ("op", "name", "launch"),
    [
        ("window_attention", "forward-fp32", "flushed"),
        ("window_attention", "growth-forward-backward-bf16", "flushed"),
        ("window_attention_decode", "decode-b1-bf16", "queued"),
        ("clip_and_scale", "tiny-fp32", "eager"),
        ("quantized_matmul", "int8_dynamic-m1-cold-bf16", "queued"),
    ],
    ids=["window", "growth", "decode", "clip", "matmul"],
)
def test_case_goes_the_whole_way(monkeypatch, capsys, op, name, launch):
    """Its tensors on the CPU, and everything else as on a GPU."""
    (case,) = (case for case in cases_of(op, device="cuda", quick=True) if case.name == name)
    on_cpu = [dataclasses.replace(lane, problem=dataclasses.replace(lane.problem, device="cpu")) for lane in case.lanes]
    asked = []
    monkeypatch.setattr(
        run, "ceilings", lambda kinds, device, quick: asked.append(device) or ceilings(kinds, quick=quick)
    )
    monkeypatch.setattr(cuda, "CudaClock", HostAsGpu)
    monkeypatch.setattr(run, "peak_memory", lambda case, lane, quick: Memory(lane.problem.length, 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    HostAsGpu.launches.clear()
    options = _options("--repeats", "2", "--peers", "none")
    records = run._guarded(dataclasses.replace(case, lanes=on_cpu), options, {"machine": MACHINE})
    assert (asked, HostAsGpu.launches) == (["cuda"], [launch])
    timed = {record.name for record in records if record.status == "timed"}
    kinds = {record.title for record in records if record.kind == CEILING and record.status == "timed"}
    assert kinds == set(case.ceilings)
    assert case.baseline in timed
    assert all(len(record.turns) == 2 for record in records if record.name in timed)
    if case.sweep:
        assert [record.peak_bytes for record in records if record.kind != CEILING] == list(case.sweep[1])
    else:
        skipped = {record.name: record.reason for record in records if record.status == "skipped"}
        # Triton serves tensors of the CPU under its interpreter only.
        assert TRITON in timed or "backend 'triton'" in skipped.pop(TRITON)
        assert skipped.keys() == {lane.name for lane in case.lanes} - timed - {TRITON}
    (result,) = summarize(records)
    run._print_result(result)
    assert "GB/s)" in capsys.readouterr().out
