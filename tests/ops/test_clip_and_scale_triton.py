"""grad_norm and clip_and_scale_ in Triton: interpreted, and compiled for GPUs that need not be there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import test_clip_and_scale as shared
import torch
from test_window_attention_triton import compiles, needs_triton, run_python, stack_bytes
from torch import Tensor

import dskernels as dk
from dskernels._library import why_no_kernel
from dskernels.clip_and_scale.arguments import Gradients


@needs_triton
def test_under_the_interpreter() -> None:
    """Every case of clip_and_scale_triton_cases.py; Triton must be told before it is imported."""
    cases = Path(__file__).with_name("clip_and_scale_triton_cases.py")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases), **environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


@needs_triton
@compiles
def test_refuses_the_cpu_without_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*only in its interpreter .*TRITON_INTERPRET=1"):
        dk.grad_norm([torch.ones(3)], backend="triton")


def test_without_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; import torch, dskernels as dk; "
        "print(*(dk.explain(dk.grad_norm, grads).refusals['triton'] for grads in ([torch.ones(2)], [])), sep='; ')"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "triton is not installed; triton is not installed"), done


def test_kernels_are_imported_when_they_run() -> None:
    script = (
        "import sys, torch, dskernels as dk; dk.clip_and_scale_([torch.ones(2)], max_norm=1.0); "
        "print('dskernels.clip_and_scale.triton' in sys.modules)"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_devices_are_not_mixed() -> None:
    explanation = dk.explain(dk.clip_and_scale_, [torch.ones(2), torch.ones(2, device="meta")])
    assert explanation.chosen == "reference"
    assert "the gradients are on cpu and meta" in explanation.refusals["triton"]


@pytest.mark.skipif(why_no_kernel("table_power_sum", "CPU") is not None, reason="no compiled kernels")
def test_gradients_are_sorted_out_once_where_tables_hold_nothing() -> None:
    for device, once in (("meta", True), ("cpu", False)):
        grads = Gradients([torch.ones(2, device=device), None])
        assert (grads.parts(in_tables=True) is grads.parts(in_tables=False)) == once


@needs_triton
@pytest.mark.parametrize("grads", [[], [None], [torch.zeros(0)[:0]]], ids=["none", "only_none", "empty"])
def test_without_gradients(grads: list[Tensor | None]) -> None:
    # Empty tensors are on a device all the same.
    backend = "triton" if not grads or grads[0] is None else None
    norm, found_inf = dk.clip_and_scale_(grads, max_norm=1.0, backend=backend)
    assert (float(norm), float(found_inf)) == (0.0, 0.0)


COMPILED = [(power, aligned) for power in (1.0, 2.0, 3.0, 2.5, math.inf) for aligned in (True, False)]
POINTERS = {"table": "*i64", "rows": "*fp64", "factor": "*fp64"}
ARGUMENTS = {**POINTERS, "first": "i32"}


@needs_triton
@compiles
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtype", shared.FLOATS, ids=str)
def test_kernels_compile_and_fit(dtype: torch.dtype, architecture: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dskernels.clip_and_scale import triton as kernels
    from dskernels.clip_and_scale.chunks import Group

    sources = [(kernels._power_sum_kernel, *case) for case in COMPILED]
    sources += [(kernels._scale_kernel, None, aligned) for aligned in (True, False)]
    for kernel, power, aligned in sources:
        values = {**kernels._constants(Group(dtype, aligned, 0, 1)), "POWER": power}
        names = list(enumerate(kernel.arg_names))
        signature = {name: ARGUMENTS.get(name, "constexpr") for _, name in names}
        constants = {(index,): values[name] for index, name in names if name in values}
        attributes = {(i,): [["tt.divisibility", 16]] for i, name in names if name in POINTERS}
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": kernels.WARPS}
        )
        # Strided float64 sums may spill two registers: smaller blocks for them alone are not worth it.
        assert stack_bytes(compiled, tmp_path) <= (8 if dtype == torch.float64 and not aligned else 0)
        vector = "global.v2.b64" if dtype == torch.float64 else "global.v4.b32"
        assert (f"ld.{vector}" in compiled.asm["ptx"]) == aligned
        assert (f"st.{vector}" in compiled.asm["ptx"]) == (aligned and power is None)
        assert "atom" not in compiled.asm["ptx"]
