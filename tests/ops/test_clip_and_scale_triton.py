"""grad_norm and clip_and_scale_ in Triton: interpreted, compiled for GPUs that need not be there, and on a GPU."""

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


def addresses_of(tensors: list[Tensor]) -> list[tuple[int, torch.dtype]]:
    """The place of every element, sorted."""
    places = []
    for tensor in tensors:
        offsets = torch.zeros(tensor.shape, dtype=torch.int64)
        for dim, stride in enumerate(tensor.stride()):
            steps = torch.arange(tensor.shape[dim]) * stride
            offsets += steps.view(-1, *(1,) * (tensor.ndim - dim - 1))
        addresses = tensor.data_ptr() + offsets.flatten() * tensor.element_size()
        places += [(address, tensor.dtype) for address in addresses.tolist()]
    return sorted(places, key=str)


@needs_triton
@pytest.mark.parametrize("name", [name for name in shared.LISTS if "none" not in name])
def test_chunks_cover_every_element_once(name: str) -> None:
    from dskernels.clip_and_scale.triton import CHUNK, chunks_of

    tensors = [*shared.LISTS[name](), torch.randn(3, CHUNK + 5)[:, 2:-1], torch.randn(CHUNK + 2, 2)[:, 1]]
    table, groups = chunks_of(tensors)
    assert [group.first for group in groups] == [sum(g.chunks for g in groups[:i]) for i in range(len(groups))]
    assert len({(group.dtype, group.is_aligned) for group in groups}) == len(groups)
    found = []
    for group in groups:
        for address, count, stride in table[:, group.first : group.first + group.chunks].t().tolist():
            assert 1 <= count <= CHUNK
            assert not group.is_aligned or (stride == 1 and address % 16 == 0)
            step = stride * group.dtype.itemsize
            found += [(address + i * step, group.dtype) for i in range(count)]
    assert sorted(found, key=str) == addresses_of(tensors)


@needs_triton
@pytest.mark.parametrize(
    ("tensor", "chunks"),
    [
        (torch.empty(50, 40).t(), 1),
        (torch.empty(4, 3, 8, 8).to(memory_format=torch.channels_last), 1),
        (torch.empty(1000, 1, 3).expand(1000, 1, 3)[:, :, :2], 2),
        (torch.empty(100, 90)[:, :80], 100),
        (torch.empty(3).expand(200, 3), 3),
        (torch.empty(6, 50, 7)[:, 5:45:2, :4], 24),
    ],
    ids=["transposed", "channels_last", "few_columns", "long_rows", "expanded", "short_everywhere"],
)
def test_strided_tensors_take_few_chunks(tensor: Tensor, chunks: int) -> None:
    from dskernels.clip_and_scale.triton import chunks_of

    assert chunks_of([tensor]).table.shape == (3, chunks)


COMPILED = [(power, aligned) for power in (1.0, 2.0, 3.0, 2.5, math.inf) for aligned in (True, False)]
POINTERS = {"table": "*i64", "partials": "*fp64", "factor": "*fp64", "is_finite": "*i1"}
ARGUMENTS = {**POINTERS, "first": "i32", "chunks": "i32"}


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

    sources = [(kernels._power_sum_kernel, *case) for case in COMPILED]
    sources += [(kernels._scale_kernel, None, aligned) for aligned in (True, False)]
    for kernel, power, aligned in sources:
        values = {**kernels._constants(kernels.Group(dtype, aligned, 0, 1)), "POWER": power}
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


def on_gpu(grad: Tensor | None) -> Tensor | None:
    """A copy with the same strides."""
    if grad is None:
        return None
    storage = grad.as_strided((grad.untyped_storage().nbytes() // grad.element_size(),), (1,), 0).cuda()
    return storage.as_strided(grad.shape, grad.stride(), grad.storage_offset())


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("norm_type", [*shared.NORM_TYPES, 1.7])
@pytest.mark.parametrize("name", shared.LISTS)
def test_on_a_gpu(name: str, norm_type: float) -> None:
    grads = shared.LISTS[name]()
    on_device = [on_gpu(grad) for grad in grads]
    norm = shared.right_norm(grads, norm_type) / 3
    # Without gradients the result is on the CPU, which has to wait for a scale that is not.
    scale = torch.tensor(3.0, device="cpu" if all(grad is None for grad in grads) else "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = dk.grad_norm(on_device, loss_scale=scale, norm_type=norm_type, backend="triton")
        clipped = dk.clip_and_scale_(on_device, max_norm=0.25, loss_scale=scale, norm_type=norm_type, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(read.total_norm, clipped.total_norm)
    assert float(read.total_norm) == pytest.approx(norm, rel=2**-23)
    assert float(clipped.found_inf) == 0.0
    factor = min(1.0, 0.25 / (norm + 1e-6)) / 3
    for after, old in zip(on_device, grads, strict=True):
        if after is not None:
            half_unit = torch.finfo(old.dtype).eps / 2
            torch.testing.assert_close(after.cpu().double(), old.double() * factor, rtol=2**-22 + half_unit, atol=6e-8)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", shared.FLOATS, ids=str)
def test_not_finite_on_a_gpu(dtype: torch.dtype, bad: float) -> None:
    grads = [torch.randn(50_000, device="cuda"), torch.randn(9000, device="cuda").to(dtype)]
    grads[1][8191] = bad
    before = [grad.clone() for grad in grads]
    for norm_type in shared.NORM_TYPES:
        norm, found_inf = dk.clip_and_scale_(grads, max_norm=0.1, loss_scale=4.0, norm_type=norm_type)
        assert float(found_inf) == 1.0
        assert not norm.isfinite()
        for one, other in zip(grads, before, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@needs_triton
def test_chosen_on_a_gpu() -> None:
    grads = [torch.randn(1000, device="cuda"), torch.randn(30, device="cuda").bfloat16()]
    others = [grad.clone() for grad in grads]
    for function in (dk.grad_norm, dk.clip_and_scale_):
        assert dk.explain(function, grads).chosen == "triton"
        assert dk.explain(function, [*grads, torch.ones(2)]).chosen == "reference"

    def step(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        return tuple(dk.clip_and_scale_(grads, max_norm=0.5, loss_scale=2.0))

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(grads), step(others))
    for one, other in zip(grads, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_loss_scale_on_a_gpu_for_gradients_on_the_cpu(backend: str) -> None:
    for scale in range(1, 50):
        on_device = torch.full((), 1.0, device="cuda")
        for _ in range(100):
            on_device = on_device * 1.0
        grad = torch.ones(4)
        norm, _ = dk.clip_and_scale_([grad], loss_scale=on_device * scale, backend=backend)
        assert float(norm) == pytest.approx(2 / scale)
        torch.testing.assert_close(grad, torch.full((4,), 1 / scale))
