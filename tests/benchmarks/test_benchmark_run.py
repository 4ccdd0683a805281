"""The command line on tiny sizes: verification, visible skips, results. No timing is judged."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.ops.clip_and_scale as clip_cases
import benchmarks.ops.clip_and_scale_step as step_cases
import benchmarks.ops.window_attention as cases
import benchmarks.ops.window_attention_decode as decode_cases
import benchmarks.ops.window_attention_varlen as varlen_cases
from benchmarks import machine, run
from benchmarks.case import OURS
from benchmarks.memory import Memory, peak_memory
from benchmarks.peers import competitors_for
from benchmarks.results import CEILING, read
from benchmarks.run import main

ROOT = Path(__file__).parents[2]
# One thread: tiny sizes gain nothing from two, and lose much where other tests run beside them.
QUICK = ["--quick", "--threads", "1", "--repeats", "2"]
each_op_but_the_first = pytest.mark.parametrize(
    "op", [decode_cases, varlen_cases, clip_cases, step_cases], ids=["decode", "varlen", "clip", "step"]
)


def _run(tmp_path, *arguments, op=cases):
    path = tmp_path / "results.jsonl"
    status = main([op.OP, *QUICK, "--out", str(path), *arguments])
    return status, read(path)


def _replace_competitor(monkeypatch, name, prepare, op=cases):
    """Puts another ``prepare`` into ours or a peer; it gets the original, the problem and the inputs."""

    def changed(competitor):
        original = competitor.prepare
        if competitor.name != name:
            return competitor
        return dataclasses.replace(competitor, prepare=lambda *arguments: prepare(original, *arguments))

    peers = [changed(competitor) for competitor in competitors_for(op.OP)]
    monkeypatch.setattr(op, "_OURS", changed(op._OURS))
    monkeypatch.setattr(op, "competitors_for", lambda name, device="cpu": peers)


def _one_key_too_many(original, problem, inputs):
    return original(dataclasses.replace(problem, seen=problem.seen + 1), inputs)


def _wrong_positions(original, problem, inputs):
    return original(problem, inputs._replace(cache_lengths=inputs.cache_lengths - 3))


def _half_the_threshold(original, problem, inputs):
    return original(problem, inputs._replace(thresholds=tuple(norm / 2 for norm in inputs.thresholds)))


def test_list_names_cases_targets_and_lanes(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "forward-fp32 " in listed
    assert "targets: flex ≥ 4, sdpa_mask ≥ 18, sgemm ≥ 0.95" in listed
    assert "lanes: dskernels, flex, sdpa_mask" in listed
    assert "clip_and_scale  tiny-fp32 " in listed
    assert "targets: unscale_clip ≥ 50" in listed
    assert main(["--list", "--dtype", "bf16", "--device", "cpu"]) == 0
    assert "fp32" not in capsys.readouterr().out


def test_every_case_runs_without_peers(tmp_path, capsys, monkeypatch):
    # A process for each of six lanes takes too long here; a test of its own measures one.
    monkeypatch.setattr(run, "peak_memory", lambda case, lane, *, quick: Memory(lane.problem.length, 1))
    status, records = _run(tmp_path, "--peers", "none")
    assert status == 0
    assert {record.case for record in records} == {case.name for case in cases.cases()}
    ours = [record for record in records if record.notes]
    assert all(record.status == "timed" and len(record.turns) == 2 for record in ours)
    assert {record.title for record in records if record.kind == CEILING} == {"sgemm", "copy"}
    growth = [record for record in records if record.case == "growth-forward-fp32" and record.kind != CEILING]
    assert [record.name for record in growth] == ["N=256", "N=512", "N=1024"]
    assert [record.peak_bytes for record in growth] == [256, 512, 1024]
    printed = capsys.readouterr().out
    assert "skipped  flex: not asked for (--peers)" in printed
    assert "target ≥ 4× as fast as flex: NOT MEASURED: not asked for (--peers)" in printed


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's counters of memory")
def test_peak_memory_holds_inputs_and_results():
    (case,) = (case for case in cases.cases(quick=True) if case.name == "growth-forward-fp32")
    lane = case.lanes[-1]
    memory = peak_memory(case, lane, quick=True)
    inputs = lane.problem.draw()
    held = sum(tensor.nbytes for tensor in (*inputs[:3], inputs.q))
    # Pages that were free before the inputs came are not counted, so a little less is right, too.
    assert memory.peak > 0.5 * held
    assert 0 <= memory.scratch < memory.peak


def test_every_peer_takes_part_or_says_why_not(tmp_path, capsys):
    status, records = _run(tmp_path, "--case", "forward-fp32", "forward-backward-fp32")
    assert status == 0
    lanes = {(record.case, record.name): record for record in records if record.kind != CEILING}
    for name in (OURS, "sdpa_mask"):
        assert lanes["forward-fp32", name].status == lanes["forward-backward-fp32", name].status == "timed"
    # Without a C++ compiler Flex cannot be compiled, which is a reason, too.
    assert lanes["forward-fp32", "flex"].status == "timed" or lanes["forward-fp32", "flex"].reason
    assert lanes["forward-backward-fp32", "flex"].status == "skipped"
    assert "skipped  flex: FlexAttention has no backward on the CPU" in capsys.readouterr().out


@each_op_but_the_first
def test_every_case_runs_with_all_peers(tmp_path, op):
    status, records = _run(tmp_path, op=op)
    assert status == 0
    lanes = {(record.case, record.name): record.status for record in records if record.kind != CEILING}
    names = [OURS, *(peer.name for peer in competitors_for(op.OP))]
    assert len(names) > 1
    assert lanes == {(case.name, name): "timed" for case in op.cases() for name in names}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--repeats", "1"], (7.0, 1)), (["--seconds", "0.5"], (0.5, None)), ([], (7.0, None))],
    ids=["repeats", "seconds", "default"],
)
def test_cases_say_how_long_they_are_timed_unless_told(monkeypatch, arguments, expected):
    (case,) = (case for case in cases.cases(quick=True) if case.name == "forward-fp32")
    given = []
    monkeypatch.setattr(
        run, "take_turns", lambda runs, *, clock, seconds, repeats, own_threads: given.append((seconds, repeats)) or {}
    )
    options = run._options(["--peers", "none", *arguments])
    options.quick = True
    run.run_case(dataclasses.replace(case, seconds=7.0), options, {})
    assert given == [expected]


def test_records_say_where_they_come_from(tmp_path):
    _, records = _run(tmp_path, "--case", "forward-bf16", "--peers", "sdpa_mask")
    for record in records:
        assert record.machine["threads"] == 1
        assert {"cpu", "flags", "cpu_tier", "load_average", "torch", "torch_parallel", "git"} <= record.machine.keys()
        assert str(ROOT) not in str(record)


def test_broken_operator_is_caught_and_not_timed(tmp_path, capsys, monkeypatch):
    _replace_competitor(monkeypatch, OURS, _one_key_too_many)
    status, records = _run(tmp_path, "--case", "forward-fp32", "--peers", "sdpa_mask")
    assert status == 1
    assert records[0].status == "wrong"
    assert "out: largest error" in records[0].reason
    assert not any(record.turns for record in records)
    assert "WRONG    dskernels" in capsys.readouterr().out


def _wrong_last_gradient(original, problem, inputs):
    prepared = original(problem, inputs)

    def run():
        *others, last = prepared.run()
        return [*others, last * 1.01]

    return dataclasses.replace(prepared, run=run)


def test_broken_gradient_is_caught(tmp_path, monkeypatch):
    _replace_competitor(monkeypatch, OURS, _wrong_last_gradient)
    status, records = _run(tmp_path, "--case", "forward-backward-fp32", "--peers", "none")
    assert status == 1
    assert "grad_v" in records[0].reason


@pytest.mark.parametrize(
    ("op", "name", "case", "fault", "reason"),
    [
        (decode_cases, OURS, "decode-b4-bf16", _wrong_positions, "out: largest error"),
        (decode_cases, "sdpa", "ungrouped-decode-b1-fp32", _wrong_positions, "out: relative root"),
        (decode_cases, "sdpa", "decode-b4-bf16", _wrong_positions, "out: relative root"),
        (varlen_cases, OURS, "packed-forward-fp32", _one_key_too_many, "out: largest error"),
        (varlen_cases, "padded", "packed-forward-fp32", _one_key_too_many, "out: relative root"),
        (varlen_cases, "sdpa_mask", "packed-forward-fp32", _one_key_too_many, "out: relative root"),
        (varlen_cases, "padded", "packed-forward-backward-fp32", _wrong_last_gradient, "grad_v: relative root"),
        (clip_cases, OURS, "tiny-bf16", _half_the_threshold, "grads: largest error"),
        (clip_cases, "flat", "small-fp32", _half_the_threshold, "grads: relative root"),
        (clip_cases, "unscale_clip", "large-fp16", _half_the_threshold, "grads: relative root"),
        (step_cases, OURS, "small-fp32", _half_the_threshold, "exp_avg: largest error"),
        (step_cases, "unscale_clip", "tiny-fp32", _half_the_threshold, "exp_avg: relative root"),
        (step_cases, OURS, "training-fp32", _wrong_last_gradient, "total_norm: largest error"),
    ],
    ids=[
        *("decode", "sdpa", "sdpa_bf16", "varlen", "padded", "padded_sdpa", "padded_gradient"),
        *("clip", "flat", "unscale_clip", "step", "unscale_clip_step", "training"),
    ],
)
def test_other_work_is_caught_in_every_op(tmp_path, monkeypatch, op, name, case, fault, reason):
    _replace_competitor(monkeypatch, name, fault, op)
    status, records = _run(tmp_path, "--case", case, op=op)
    assert status == 1
    wrong = {record.name: record.reason for record in records if record.status == "wrong"}
    assert wrong.keys() == {name}
    assert reason in wrong[name]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_peer_that_does_other_work_is_caught_and_not_timed(tmp_path, monkeypatch, dtype):
    _replace_competitor(monkeypatch, "sdpa_mask", _one_key_too_many)
    status, records = _run(tmp_path, "--case", f"forward-{dtype}", "--peers", "sdpa_mask")
    assert status == 1
    by_name = {record.name: record for record in records}
    assert by_name["sdpa_mask"].status == "wrong"
    assert by_name[OURS].status == "timed"


def test_peer_that_raises_is_skipped_with_the_reason(tmp_path, capsys, monkeypatch):
    def broken(original, problem, inputs):
        raise RuntimeError("no such library\nand a long trace")

    _replace_competitor(monkeypatch, "sdpa_mask", broken)
    status, records = _run(tmp_path, "--case", "forward-fp32", "--peers", "sdpa_mask")
    assert status == 0
    assert {record.name: record.reason for record in records}["sdpa_mask"] == "RuntimeError: no such library"
    assert "skipped  sdpa_mask: RuntimeError: no such library" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown op nothing"),
        (["--case", "nothing"], "unknown case nothing"),
        (["--dtype", "fp8"], "unknown dtype fp8"),
        (["--peers", "nobody,flex"], "unknown peer nobody"),
        (["--quick", "--report"], "timings of --quick mean nothing"),
        (["--threads", "0"], "expected a positive number"),
    ],
    ids=["op", "case", "dtype", "peer", "report", "threads"],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_tier_starts_again_with_every_library_on_it(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append((command, environment)))
    for name in machine._TIER_ENVIRONMENT["AVX2"]:
        monkeypatch.delenv(name, raising=False)
    import torch._inductor.config as inductor

    machine.enter_tier("AVX2", ["--tier", "AVX2"])
    ((command, environment),) = started
    assert command[1:] == ["-m", "benchmarks", "--tier", "AVX2"]
    assert environment["DSKERNELS_CPU_TIER"] == "AVX2"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    for name, value in machine._TIER_ENVIRONMENT["AVX2"].items():
        monkeypatch.setenv(name, value)
    # Torch's own way to put a setting back: undone by monkeypatch it would be deleted.
    with inductor.patch({"cpp.simdlen": None}):
        machine.enter_tier("AVX2", [])
        assert inductor.cpp.simdlen == 256
    assert len(started) == 1


def test_busy_machine_is_told(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.9, 0.0, 0.0))
    assert machine.busy_warning() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (1.1, 0.0, 0.0))
    assert "load average is 1.10 on 4 cores" in machine.busy_warning()


def test_slug_is_a_short_file_name():
    for cpu, expected in (
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "intel-xeon-platinum-8375c-avx2"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-avx2"),
    ):
        assert machine.slug({"cpu": cpu, "cpu_tier": "AVX2"}) == expected


def test_module_can_be_run():
    command = [sys.executable, "-m", "benchmarks", "--list", "--case", "grouped-forward-fp32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("window_attention  grouped-forward-fp32")
