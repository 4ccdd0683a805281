"""Backend choice: its order, its reasons, and what is told to the user."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import dskernels as dk
from dskernels import _library, _registry
from dskernels._registry import Backend, Operator

ADD = Operator(
    name="add",
    prepare=lambda x: x,
    backends=(
        Backend("cuda", lambda x: "no GPU", lambda x: "cuda"),
        Backend("cpu", lambda x: "odd" if x % 2 else None, lambda x: "cpu"),
        Backend("reference", lambda x: None, lambda x: "reference"),
    ),
    example=lambda: ([], {}),
)


def served_by(call: int, backend: str | None = None) -> str:
    return ADD.choose(call, backend).run(call)


def test_automatic_choice_falls_back_in_order() -> None:
    assert served_by(2) == "cpu"
    assert served_by(3) == "reference"


def test_explicit_choice_never_falls_back() -> None:
    assert served_by(2, "reference") == "reference"
    with pytest.raises(RuntimeError, match=r"add: backend 'cpu' \(chosen by backend=\) cannot serve this call: odd"):
        served_by(3, "cpu")
    with pytest.raises(RuntimeError, match="add has no 'triton' implementation"):
        served_by(2, "triton")
    with pytest.raises(ValueError, match="backend: expected one of cpu, cuda, triton, reference, got 'gpu'"):
        served_by(2, "gpu")


def test_automatic_choice_passes_by_what_serves_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = Backend("cuda", lambda x: "odd" if x % 2 else None, lambda x: "cuda", lambda x: "an emulator")
    operator = dataclasses.replace(ADD, backends=(emulator, *ADD.backends[1:]))
    assert operator.choose(2, None).name == "cpu"
    automatic = operator.explain(2, None)
    assert (automatic.chosen, automatic.refusals["cuda"]) == ("cpu", "an emulator")
    assert operator.explain(3, None).refusals["cuda"] == "odd"
    assert operator.choose(2, "cuda") is emulator
    asked = operator.explain(2, "cuda")
    assert (asked.chosen, asked.refusals["cuda"]) == ("cuda", None)
    with dk.use_backend("cuda"):
        assert operator.choose(2, None) is emulator
    monkeypatch.setattr(_registry, "_environment_choice", "cuda")
    assert operator.choose(2, None) is emulator
    with pytest.raises(RuntimeError, match="cannot serve this call: odd"):
        operator.choose(3, None)


def test_use_backend_as_context_and_as_call() -> None:
    with dk.use_backend("reference"):
        assert served_by(2) == "reference"
        assert served_by(2, "cpu") == "cpu"
        with dk.use_backend("cpu"), pytest.raises(RuntimeError, match="chosen by use_backend"):
            served_by(3)
        with dk.use_backend(None):
            assert served_by(2) == "cpu"
        assert served_by(2) == "reference"
    assert served_by(2) == "cpu"
    dk.use_backend("reference")
    assert served_by(2) == "reference"
    dk.use_backend(None)
    assert served_by(2) == "cpu"
    with pytest.raises(ValueError, match="backend: expected one of"):
        dk.use_backend("gpu")


def test_use_backend_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), dk.use_backend("reference"):
        raise KeyError
    assert served_by(2) == "cpu"


def test_use_backend_belongs_to_its_thread() -> None:
    seen = []
    with dk.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(served_by(2)))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_environment_comes_after_use_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_environment_choice", "reference")
    assert served_by(2) == "reference"
    assert served_by(2, "cpu") == "cpu"
    with dk.use_backend("cpu"):
        assert served_by(2) == "cpu"
    monkeypatch.setattr(_registry, "_environment_choice", "gpu")
    with pytest.raises(ValueError, match="DSKERNELS_BACKEND: expected one of"):
        served_by(2)


def test_explanation_tells_what_the_call_does() -> None:
    explanation = ADD.explain(3, None)
    assert (explanation.chosen, explanation.origin) == ("reference", "automatic")
    assert explanation.refusals == {
        "cpu": "odd",
        "cuda": "no GPU",
        "triton": "add has no 'triton' implementation",
        "reference": None,
    }
    assert str(explanation).splitlines()[:2] == ["add: reference (automatic)", "  cpu       odd"]
    assert str(ADD.explain(3, "cpu")).startswith("add: raises (backend=)")


def test_log_gives_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="dskernels"):
        served_by(3)
    assert caplog.messages == ["add: not 'cuda': no GPU", "add: not 'cpu': odd"]


def test_explain_takes_a_call_apart() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    wide = dk.explain(dk.window_attention, q.double(), k.double(), k.double(), window=(3, 0))
    assert wide.chosen == "reference"
    # Where the emulator of the tests is loaded it takes tensors on the CPU, but none of float64.
    assert wide.refusals["cuda"] in (
        "the tensors are on cpu",
        "the kernel takes float32, bfloat16 and float16, not torch.float64",
    )
    assert dk.explain("window_attention", q, k, k, backend="reference").origin == "backend="
    with pytest.raises(ValueError, match="k: expected the dtype of q"):
        dk.explain("window_attention", q, k.double(), k)
    with pytest.raises(ValueError, match=r"operator: expected one of .*window_attention.*, got attention"):
        dk.explain("attention", q, k, k)


@pytest.mark.skipif(dk.build_info()["compiled"] is None, reason="nothing is compiled")
def test_reasons_of_the_cpu_kernel() -> None:
    wide, q = torch.randn(1, 1, 3, 257), torch.randn(1, 1, 3, 8)
    for tensors, reason in (
        ((wide, wide, q), "head dimensions go up to 256, got 257 and 8"),
        ((q.double(),) * 3, "takes float32, bfloat16 and float16, not torch.float64"),
        ((q.to("meta"),) * 3, "the tensors are on meta"),
    ):
        explanation = dk.explain(dk.window_attention, *tensors)
        assert explanation.chosen == "reference"
        assert reason in explanation.refusals["cpu"]
        with pytest.raises(RuntimeError, match=reason):
            dk.window_attention(*tensors, backend="cpu")


def test_missing_kernels_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_kernels", frozenset())
    monkeypatch.setattr(_library, "_not_loaded", "cannot be loaded: libfoo.so")
    q = torch.randn(1, 1, 3, 8)
    assert dk.explain(dk.window_attention, q, q, q).refusals["cpu"] == "cannot be loaded: libfoo.so"
    assert dk.window_attention(q, q, q, window=(0, 0)).allclose(q)
    monkeypatch.setattr(_library, "_not_loaded", None)
    with pytest.raises(RuntimeError, match="built without a CPU kernel for window_attention"):
        dk.window_attention(q, q, q, backend="cpu")


def test_a_library_that_cannot_be_loaded_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_kernels", "_module", "_not_loaded"):
        monkeypatch.setattr(_library, name, getattr(_library, name))
    monkeypatch.setattr(_library.importlib.util, "find_spec", lambda name: object())

    def fail(name: str) -> None:
        raise ImportError("libtorch.so: undefined symbol")

    monkeypatch.setattr(_library.importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING, logger="dskernels"):
        _library.load_compiled()
    assert "undefined symbol" in dk.build_info()["not_loaded"]
    assert "undefined symbol" in caplog.text


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )


def test_environment_variable_in_a_fresh_process() -> None:
    script = (
        "import torch, dskernels as dk; q = torch.randn(1, 1, 3, 8);"
        "print(dk.explain(dk.window_attention, q, q, q).origin); dk.window_attention(q, q, q)"
    )
    chosen = run_python("-c", script, DSKERNELS_BACKEND="reference")
    assert (chosen.returncode, chosen.stdout.strip()) == (0, "DSKERNELS_BACKEND")
    refused = run_python("-c", script, DSKERNELS_BACKEND="triton")
    assert refused.returncode != 0
    assert "backend 'triton' (chosen by DSKERNELS_BACKEND) cannot serve this call" in refused.stderr


def test_report_and_self_test() -> None:
    report = run_python("-m", "dskernels")
    assert report.returncode == 0, report.stdout + report.stderr
    assert "window_attention:" in report.stdout
    assert report.stdout.rstrip().endswith("self-test: passed")


def test_self_test_fails_loudly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dskernels import __main__ as report
    from dskernels.window_attention import _operator

    def wrong(call):
        out, lse = _operator.find("reference").run(call)
        return out * 1.01, lse

    broken = Operator(
        _operator.name,
        _operator.prepare,
        (Backend("cpu", lambda call: None, wrong), _operator.find("reference")),
        _operator.example,
    )
    monkeypatch.setattr(report, "registered", lambda: (broken,))
    assert report.main() == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.skipif(_library._module is None, reason="dskernels._C is not built")
def test_unknown_cpu_tier_fails_the_import() -> None:
    environment = {**os.environ, "DSKERNELS_CPU_TIER": "AVX1"}
    done = subprocess.run([sys.executable, "-c", "import dskernels"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ValueError: DSKERNELS_CPU_TIER: expected one of DEFAULT" in done.stderr
    assert "got 'AVX1'" in done.stderr


@pytest.mark.skipif(_library._module is None, reason="dskernels._C is not built")
def test_cpu_tier_can_be_set_and_is_checked() -> None:
    module = _library._module
    before = module.cpu_tier()
    assert before in module.cpu_tiers()
    try:
        for tier in module.cpu_tiers():
            module.set_cpu_tier(tier)
            assert module.cpu_tier() == tier
        with pytest.raises(ValueError, match=r"tier: expected one of DEFAULT.*got 'AVX1'"):
            module.set_cpu_tier("AVX1")
    finally:
        module.set_cpu_tier(before)
