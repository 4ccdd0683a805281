"""grad_norm and clip_and_scale_ on a GPU, by CUDA C++ and by Triton: right, and without waiting for the device."""

from __future__ import annotations

import importlib.util
import math

import pytest
import test_clip_and_scale as shared
import torch
from torch import Tensor

import dskernels as dk
from dskernels._library import why_no_kernel

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["cuda", "triton"])
def by(request: pytest.FixtureRequest) -> str:
    """A backend for GPUs that is there."""
    name: str = request.param
    missing = why_no_kernel("chunk_power_sums", "CUDA") if name == "cuda" else None
    if name == "triton" and importlib.util.find_spec("triton") is None:
        missing = "triton is not installed"
    if missing is not None:
        pytest.skip(missing)
    return name


def on_gpu(grad: Tensor | None) -> Tensor | None:
    """A copy with the same strides."""
    if grad is None:
        return None
    storage = grad.as_strided((grad.untyped_storage().nbytes() // grad.element_size(),), (1,), 0).cuda()
    return storage.as_strided(grad.shape, grad.stride(), grad.storage_offset())


def check_scaled(after: list[Tensor | None], before: list[Tensor | None], factor: float) -> None:
    for one, old in zip(after, before, strict=True):
        if one is not None and old is not None:
            half_unit = torch.finfo(old.dtype).eps / 2
            torch.testing.assert_close(
                one.cpu().double(), old.cpu().double() * factor, rtol=2**-22 + half_unit, atol=6e-8
            )


@pytest.mark.parametrize("norm_type", [*shared.NORM_TYPES, 1.7])
@pytest.mark.parametrize("name", shared.LISTS)
def test_on_a_gpu(name: str, norm_type: float, by: str) -> None:
    grads = shared.LISTS[name]()
    on_device = [on_gpu(grad) for grad in grads]
    norm = shared.right_norm(grads, norm_type) / 3
    # Without gradients the result is on the CPU, which has to wait for a scale that is not.
    scale = torch.tensor(3.0, device="cpu" if all(grad is None for grad in grads) else "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = dk.grad_norm(on_device, loss_scale=scale, norm_type=norm_type, backend=by)
        clipped = dk.clip_and_scale_(on_device, max_norm=0.25, loss_scale=scale, norm_type=norm_type, backend=by)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(read.total_norm, clipped.total_norm)
    assert float(read.total_norm) == pytest.approx(norm, rel=2**-23)
    assert float(clipped.found_inf) == 0.0
    check_scaled(on_device, grads, min(1.0, 0.25 / (norm + 1e-6)) / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", shared.FLOATS, ids=str)
def test_not_finite(dtype: torch.dtype, bad: float, by: str) -> None:
    grads = [torch.randn(50_000, device="cuda"), torch.randn(9000, device="cuda").to(dtype)]
    grads[1][8191] = bad
    before = [grad.clone() for grad in grads]
    for norm_type in shared.NORM_TYPES:
        norm, found_inf = dk.clip_and_scale_(grads, max_norm=0.1, loss_scale=4.0, norm_type=norm_type, backend=by)
        assert float(found_inf) == 1.0
        assert not norm.isfinite()
        for one, other in zip(grads, before, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_is_chosen() -> None:
    grads = [torch.randn(1000, device="cuda"), torch.randn(30, device="cuda").bfloat16()]
    others = [grad.clone() for grad in grads]
    first = "triton" if why_no_kernel("chunk_power_sums", "CUDA") else "cuda"
    for function in (dk.grad_norm, dk.clip_and_scale_):
        assert dk.explain(function, grads).chosen == first
        assert dk.explain(function, [*grads, torch.ones(2)]).chosen == "reference"

    def step(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        return tuple(dk.clip_and_scale_(grads, max_norm=0.5, loss_scale=2.0))

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(grads), step(others))
    for one, other in zip(grads, others, strict=True):
        assert torch.equal(one, other)


def test_a_graph_repeats_a_call(by: str) -> None:
    grads = [torch.randn(n, device="cuda").to(dtype) for n in (5, 1000, 70_001) for dtype in shared.FLOATS]
    scale = torch.full((), 4.0, device="cuda")

    def step() -> list[Tensor]:
        read = dk.grad_norm(grads, loss_scale=scale, backend=by)
        return [*read, *dk.clip_and_scale_(grads, max_norm=0.5, loss_scale=scale, backend=by)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for factor in (1.0, 100.0, 1e-3, math.inf):
        # What is pinned between the replays must not be the memory that the graph copies its tables from.
        for rows in (1, 16, 64):
            torch.full((rows, 4), -1).pin_memory().to("cuda", non_blocking=True)
        fresh = [torch.randn(grad.shape, device="cuda").to(grad.dtype) * factor for grad in grads]
        for grad, values in zip(grads, fresh, strict=True):
            grad.copy_(values)
        scale.fill_(8.0)
        graph.replay()
        assert torch.equal(results[0], results[2])
        assert float(results[3]) == float(factor == math.inf)
        if factor == math.inf:
            check_scaled([grad.nan_to_num() for grad in grads], [values.nan_to_num() for values in fresh], 1.0)
            continue
        norm = shared.right_norm([values.cpu() for values in fresh]) / 8
        assert float(results[0]) == pytest.approx(norm, rel=2**-23)
        check_scaled(grads, fresh, min(1.0, 0.5 / (norm + 1e-6)) / 8)


def test_on_the_current_stream(by: str) -> None:
    grad, stream = torch.zeros(1 << 22, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Long enough for a launch on another stream to come too early.
        torch.cuda._sleep(50_000_000)
        grad.fill_(1.0)
        norm, _ = dk.clip_and_scale_([grad], max_norm=1.0, backend=by)
    stream.synchronize()
    assert float(norm) == 2048.0
    torch.testing.assert_close(grad, torch.full_like(grad, 1 / 2048))


def test_more_elements_than_32_bits_count(by: str) -> None:
    count = 2**31 + 70_001
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip("needs 6 GB of free memory")
    grad = torch.ones(count, dtype=torch.bfloat16, device="cuda")
    for part in (grad, grad[1:], grad[:-1].view(-1, 2)[:, 1]):
        assert float(dk.grad_norm([part], backend=by).total_norm) == pytest.approx(math.sqrt(part.numel()), rel=2**-23)
    dk.clip_and_scale_([grad], loss_scale=2.0, backend=by)
    assert bool((grad == 0.5).all())


def test_a_loss_scale_on_a_gpu_for_gradients_on_the_cpu(backend: str) -> None:
    for scale in range(1, 50):
        on_device = torch.full((), 1.0, device="cuda")
        for _ in range(100):
            on_device = on_device * 1.0
        grad = torch.ones(4)
        norm, _ = dk.clip_and_scale_([grad], loss_scale=on_device * scale, backend=backend)
        assert float(norm) == pytest.approx(2 / scale)
        torch.testing.assert_close(grad, torch.full((4,), 1 / scale))
