"""What holds for every op on a GPU: any stream, graphs, the same results by every backend, no access out of bounds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from dskernels._registry import Backend, Operator, registered
from dskernels.testing import assert_close_to_reference

pytestmark = pytest.mark.gpu

OPERATORS = [pytest.param(operator, id=operator.name) for operator in registered()]
BACKENDS = ("cuda", "triton")


def example(operator: Operator, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Any]]:
    tensors, options = operator.example()
    there = {name: value.to("cuda") if hasattr(value, "to") else value for name, value in options.items()}
    return [tensor.to("cuda", dtype) for tensor in tensors], there


def prepared(operator: Operator, name: str, tensors: list[Tensor], options: dict[str, Any]) -> tuple[Backend, Any]:
    call = operator.prepare(*tensors, **options)
    backend = operator.find(name)
    reason = backend.refuses(call)
    assert reason is None, reason
    return backend, call


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_works_on_the_current_stream(operator: Operator, name: str) -> None:
    tensors, options = example(operator)
    backend, call = prepared(operator, name, [tensor.clone() for tensor in tensors], options)
    expected = [out.clone() for out in backend.run(call)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Long enough for a kernel on another stream to come first, and read what is not there yet.
        late = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        torch.cuda._sleep(50_000_000)
        for there, tensor in zip(late, tensors, strict=True):
            there.copy_(tensor)
        backend, call = prepared(operator, name, late, options)
        results = [out.clone() for out in backend.run(call)]
    torch.cuda.current_stream().wait_stream(stream)
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("operator", OPERATORS)
def test_runs_in_a_graph(operator: Operator) -> None:
    tensors, options = example(operator)
    held = [tensor.clone() for tensor in tensors]
    backend, call = prepared(operator, "cuda", held, options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.run(call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = backend.run(call)
    for factor in (1.0, 0.5):
        fresh = [tensor * factor for tensor in tensors]
        _, direct = prepared(operator, "cuda", [tensor.clone() for tensor in fresh], options)
        expected = [out.clone() for out in backend.run(direct)]
        for there, tensor in zip(held, fresh, strict=True):
            there.copy_(tensor)
        graph.replay()
        for out, right in zip(outputs, expected, strict=True):
            assert torch.equal(out, right)


@pytest.mark.parametrize("operator", OPERATORS)
def test_backends_agree(operator: Operator) -> None:
    tensors, options = example(operator)
    results = {}
    for name in (*BACKENDS, "reference"):
        backend, call = prepared(operator, name, [tensor.clone() for tensor in tensors], options)
        results[name] = [out.clone() for out in backend.run(call)]
    exact_backend, exact_call = prepared(operator, "reference", [tensor.double() for tensor in tensors], options)
    exact = [out.double() for out in exact_backend.run(exact_call)]
    for name in BACKENDS:
        for index, (result, plain, right) in enumerate(zip(results[name], results["reference"], exact, strict=True)):
            assert_close_to_reference(result, right, plain, f"{name}, result {index}")


def test_waits_for_nobody() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        for operator in registered():
            torch.cuda.set_sync_debug_mode("default")
            tensors, options = example(operator)
            backend, call = prepared(operator, "cuda", tensors, options)
            torch.cuda.set_sync_debug_mode("error")
            backend.run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7", sys.executable, "-m", "dskernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine's device")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
