"""Records on disk, verdicts, and the tables and picture made of them."""

import dataclasses

import pytest

from benchmarks import run
from benchmarks.report import insert, main, markdown
from benchmarks.results import CEILING, SKIPPED, Record, new_path, read, write
from benchmarks.summary import summarize

MACHINE = {
    "cpu": "Example CPU",
    "threads": 2,
    "cores": 4,
    "cpu_tier": "AVX2",
    "torch": "2.0",
    "git": {"commit": "0123456789abcdef", "dirty": True},
}


def _record(name, seconds=None, **fields):
    fields = {"title": name, "operations": 2 * 10**9, "bytes": 10**7, **fields}
    turns = [[seconds * factor] for factor in (1.0, 1.1, 0.9, 1.0)] if seconds else []
    case = {"op": "window_attention", "case": "forward", "case_title": "forward, fp32", "dtype": "fp32"}
    case = {**case, "baseline": "dskernels", "machine": MACHINE, "date": "2000-01-01"}
    return Record(**{**case, "name": name, "turns": turns, **fields})


def _against_peers(**targets):
    return [
        _record("dskernels", 0.02, targets=targets, notes={"tier": "AVX2"}),
        _record("flex", 0.1, title="FlexAttention"),
        _record("absent", title="An absent peer", status=SKIPPED, reason="not installed"),
        _record("sgemm-64", 0.01, title="sgemm", kind=CEILING),
        _record("copy-1MiB", 0.01, title="copy", kind=CEILING, operations=0, bytes=10**8),
    ]


def _growth(peaks, limit=4.4):
    fields = {
        "case": "growth",
        "case_title": "forward, fp32, N8 to 16",
        "baseline": "N=8",
        "limits": {"N=16": limit},
        "sweep": {"axis": "N", "values": [8, 16]},
    }
    return [
        _record(name, seconds, peak_bytes=peak, scratch_bytes=1024, **fields)
        for name, seconds, peak in zip(("N=8", "N=16"), (0.01, 0.02), peaks, strict=True)
    ]


def test_records_survive_the_disk(tmp_path):
    records = [*_against_peers(flex=4.0), *_growth((2**20, 2**21))]
    path = tmp_path / "new" / "results.jsonl"
    write(path, records)
    assert len(path.read_text().splitlines()) == len(records)
    assert read(path) == records


def test_other_schema_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    write(path, [dataclasses.replace(_record("dskernels", 1.0), schema=0)])
    with pytest.raises(ValueError, match="line 1: schema 0, expected 1"):
        read(path)


def test_new_path_keeps_earlier_results(tmp_path):
    names = []
    for _ in range(3):
        path = new_path(tmp_path, "a")
        path.touch()
        names.append(path.name)
    assert names == ["a.jsonl", "a-2.jsonl", "a-3.jsonl"]


def test_verdicts_of_targets():
    (case,) = summarize(_against_peers(flex=4.0, sgemm=0.95, absent=2.0, unknown=1.0))
    assert case.operations_per_second == pytest.approx(1e11)
    assert {check.name: check.met for check in case.checks} == {
        "flex": True,
        "sgemm": False,
        "absent": None,
        "unknown": None,
    }
    verdicts = {check.name: check.verdict for check in case.checks}
    assert verdicts["sgemm"] == "MISSED"
    assert verdicts["absent"] == "NOT MEASURED: not installed"
    assert verdicts["unknown"] == "NOT MEASURED: unknown did not take part"
    assert case.shares["sgemm"].value == pytest.approx(0.5)
    assert case.shares["copy"].value == pytest.approx(0.05)


def test_best_size_is_the_ceiling():
    records = [*_against_peers(sgemm=0.95), _record("sgemm-128", 0.005, title="sgemm", kind=CEILING)]
    (case,) = summarize(records)
    assert case.ceilings["sgemm"] == pytest.approx(4e11)
    assert case.shares["sgemm"].value == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("peaks", "limit", "met"),
    [((100, 200), 4.4, (True, True)), ((100, 500), 4.4, (True, False)), ((100, 200), 1.5, (False, False))],
    ids=["kept", "memory_above", "both_above"],
)
def test_verdicts_of_limits(peaks, limit, met):
    (case,) = summarize(_growth(peaks, limit))
    assert tuple(check.met for check in case.checks) == met


def test_limits_are_of_time_alone_where_there_is_no_sweep():
    records = [dataclasses.replace(record, sweep={}) for record in _growth((None, None))]
    (case,) = summarize(records)
    assert [(check.what, check.met) for check in case.checks] == [("time of N=16 ≤ 4.4× that of N=8", True)]


def test_memory_that_was_not_measured_is_no_success():
    (case,) = summarize(_growth((None, None)))
    assert [check.met for check in case.checks] == [True, None]


def test_baseline_that_was_not_timed_leaves_no_success():
    records = _against_peers(flex=4.0, sgemm=0.95)
    records[0] = _record("dskernels", status="wrong", reason="out: broken", targets={"flex": 4.0, "sgemm": 0.95})
    (case,) = summarize(records)
    assert case.wrong
    assert [check.met for check in case.checks] == [None, None]


def test_tables_show_misses_and_absences():
    text = markdown([*_against_peers(flex=6.0, sgemm=0.4), *_growth((2**20, 2**21))])
    assert "| forward, fp32 | **20.0 ms** | 100 ms (5.00×) | skipped | 100 | 50 % | 5 % |" in text
    assert "| forward, fp32 | ≥ 6× as fast as flex | 5.00× | **MISSED** |" in text
    assert "| forward, fp32 | ≥ 40 % of sgemm's rate | 50.0 % | met |" in text
    assert "| N=16 | 20.0 ms | 2.00× | 2.00 MiB | 2.00× | 0.00 MiB |" in text
    assert "- An absent peer, skipped: not installed (in: forward, fp32)" in text
    assert "Example CPU, 2 threads on 4 cores, CPU tier AVX2" in text
    assert "commit 0123456789 with changes" in text


def test_brief_tables_leave_the_targets_out():
    text = markdown([*_against_peers(flex=6.0, sgemm=0.4), *_growth((2**20, 2**21))], brief=True)
    assert "100 ms (5.00×)" in text
    assert "| N=16 | 20.0 ms | 2.00× |" in text
    assert "MISSED" not in text
    assert "target" not in text


def test_insertion_replaces_what_is_between_the_markers():
    end = "<!-- /benchmarks -->"
    text = f"a\n<!-- benchmarks:x -->\nold\n{end}\nb\n<!-- benchmarks:y -->\nother\n{end}\n"
    once = insert(text, "x", "new")
    assert once == text.replace("old", "new")
    assert insert(once, "x", "new") == once
    assert insert(text, "y", "new") == text.replace("other", "new")


@pytest.mark.parametrize(
    "text", ["", "<!-- benchmarks:x -->", "<!-- /benchmarks --><!-- benchmarks:x -->"], ids=["none", "open", "reversed"]
)
def test_insertion_without_markers_is_refused(text):
    with pytest.raises(ValueError, match="expected one <!-- benchmarks:x -->"):
        insert(text, "x", "new")


def test_report_writes_readme_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results, readme, picture = (tmp_path / name for name in ("r.jsonl", "README.md", "window_attention.png"))
    write(results, [*_against_peers(flex=6.0), *_growth((2**20, 2**21))])
    readme.write_text("# title\n<!-- benchmarks:window_attention -->\n<!-- /benchmarks -->\nend\n")
    # Two results, as of two tiers of one machine.
    assert main([str(results), str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("# title\n")
    assert text.endswith("\nend\n")
    assert "![window_attention: times and growth](window_attention.png)" in text
    assert text.count("| work | target | reached | verdict |") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([str(results), "--readme", str(tmp_path / "absent.md")]) == 1
    assert "absent.md" in capsys.readouterr().err


def test_tables_without_a_place_in_the_readme_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_ROOT", tmp_path)
    monkeypatch.setattr(run, "_RESULTS", tmp_path)
    monkeypatch.setattr(run, "run_case", lambda *_: _against_peers(flex=6.0))
    readme = tmp_path / "README.md"
    readme.write_text("# title\n")
    assert run.main(["window_attention", "--case", "forward-fp32", "--report"]) == 0
    assert readme.read_text() == "# title\n"
    assert "| forward, fp32 | **20.0 ms** |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "operations", "label"),
    [
        (0.02, 2 * 10**9, "20.0 ms   100 GFLOP/s   50.0 % of sgemm"),
        (0.002, 10**6, "2.00 ms   5 GB/s   50.0 % of copy"),
    ],
    ids=["arithmetic", "memory"],
)
def test_bars_name_the_nearest_ceiling(seconds, operations, label):
    pytest.importorskip("matplotlib")
    from benchmarks.plot import _bar_label

    records = _against_peers()
    records[0] = _record("dskernels", seconds, operations=operations)
    (case,) = summarize(records)
    assert _bar_label(case, case.lanes[0]) == (label, False)
