"""The CUDA kernels of grad_norm and clip_and_scale_, emulated: the edges of their loops, range, operators."""

from __future__ import annotations

import math

import emulator
import pytest
import test_clip_and_scale as shared
import torch
from test_window_attention_triton import run_python
from torch import Tensor

import dskernels as dk
from dskernels.clip_and_scale import chunks, cuda
from dskernels.clip_and_scale.arguments import prepare
from dskernels.clip_and_scale.passes import settle_reference

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

# Around a vector of 16 bytes of each type, what a block takes at a time in vectors (2048, 4096, 8192) and one by one
# (1024), and a chunk.
SIZES = (1, 2, 3, 4, 7, 8, 9, 1023, 1025, 2047, 2049, 4095, 4097, 8191, 8193, 32767, 32768, 32769)


@pytest.fixture(autouse=True)
def _emulated() -> None:
    emulator.load()


@pytest.mark.parametrize(("stride", "offset"), [(1, 0), (1, 1), (3, 0)], ids=["aligned", "unaligned", "strided"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", shared.FLOATS, ids=str)
def test_ends_of_vectors_and_chunks(dtype: torch.dtype, size: int, stride: int, offset: int) -> None:
    storage = torch.randn(offset + stride * size + 50).to(dtype)
    assert storage.data_ptr() % 16 == 0
    before, grad = storage.clone(), storage[offset : offset + stride * size : stride]
    inside = torch.zeros(storage.shape, dtype=torch.bool)
    inside[offset : offset + stride * size : stride] = True
    norm, _ = dk.clip_and_scale_([grad], max_norm=0.5, loss_scale=3.0, backend="cuda")
    exact = float(before[inside].double().norm()) / 3
    assert float(norm) == pytest.approx(exact, rel=2**-23)
    factor = min(1.0, 0.5 / (exact + 1e-6)) / 3
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(
        storage[inside].double(), before[inside].double() * factor, rtol=2**-22 + half_unit, atol=6e-8
    )
    assert torch.equal(storage[~inside], before[~inside])


@pytest.mark.parametrize("place", [0, 5, 4095, 4096, 32767, 32768, 32900])
@pytest.mark.parametrize("norm_type", [2.0, 2.5, math.inf])
@pytest.mark.parametrize("dtype", shared.FLOATS, ids=str)
def test_finds_what_is_not_finite_anywhere(dtype: torch.dtype, norm_type: float, place: int) -> None:
    grad = torch.zeros(32901, dtype=dtype)
    for grads in ([grad], [torch.zeros(32902, dtype=dtype)[1:]]):
        assert float(dk.grad_norm(grads, norm_type=norm_type, backend="cuda").found_inf) == 0.0
        for bad in (math.nan, -math.inf):
            grads[0][place] = bad
            norm, found_inf = dk.grad_norm(grads, norm_type=norm_type, backend="cuda")
            assert float(found_inf) == 1.0
            assert not norm.isfinite()


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-10, 1.0, 1e20, 3e38])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 2.3])
def test_powers_beyond_float32(norm_type: float, size: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.full((9,), size, dtype=dtype)
        norm = float(dk.grad_norm([grad], loss_scale=1e10, norm_type=norm_type, backend="cuda").total_norm)
        right = float(grad[0].double()) * 9 ** (1 / norm_type) / 1e10
        # What float32 cannot hold of the result is rounded to its smallest numbers.
        assert norm == pytest.approx(right, rel=2**-23, abs=2**-149)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_one_group_of_all_magnitudes(norm_type: float) -> None:
    for _ in range(50):
        exponents = torch.randint(-149, 128, (4,)).double()
        grad = (torch.randn(4).double() * 2**exponents).float().clamp(-3e38, 3e38)
        norm = dk.grad_norm([grad], norm_type=norm_type, loss_scale=16.0, backend="cuda").total_norm
        right = float(torch.linalg.vector_norm(grad.double(), norm_type)) / 16
        assert float(norm) == pytest.approx(right, rel=2**-23, abs=2**-149)


def test_one_launch_a_pass_for_all_types(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("chunk_power_sums_op", "clip_factor_op", "chunk_scale_op"):
        op = getattr(cuda, name)
        monkeypatch.setattr(cuda, name, lambda *arguments, name=name, op=op: [calls.append(name), op(*arguments)][1])
    grads = [torch.randn(50).to(dtype)[begin:] for dtype in shared.FLOATS for begin in (0, 1)]
    dk.clip_and_scale_(grads, max_norm=0.1, loss_scale=torch.tensor(2.0), backend="cuda")
    assert calls == ["chunk_power_sums_op", "clip_factor_op", "chunk_scale_op"]


def test_same_bits_in_any_order_of_threads_and_blocks() -> None:
    grads = [torch.randn(40_000).to(dtype) for dtype in shared.FLOATS] + shared.strided(torch.float32)
    results = []
    try:
        for order in emulator.ORDERS:
            emulator.configure(order)
            copies = [grad.clone() for grad in grads]
            norm, _ = dk.clip_and_scale_(copies, max_norm=1.0, backend="cuda")
            results.append([norm, *copies])
    finally:
        emulator.configure()
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_nothing_is_loaded_in_vain() -> None:
    # Nothing lies at these addresses: a load, or a store, ends the process.
    table = torch.tensor([[16, 100, 1, 0], [32, 5000, 1, 2]])
    cuda.chunk_scale_op(table, torch.ones((), dtype=torch.float64))


LOSS_SCALES = [None, 0.3, *(torch.tensor([0.3], dtype=dtype) for dtype in shared.FLOATS)]


@pytest.mark.parametrize("max_norm", [None, 0.0, 2.0])
@pytest.mark.parametrize("loss_scale", LOSS_SCALES, ids=["none", "number", *map(str, shared.FLOATS)])
@pytest.mark.parametrize("norm_type", [*shared.NORM_TYPES, 0.7])
def test_factor_matches_plain_pytorch(norm_type: float, loss_scale: float | Tensor | None, max_norm: float) -> None:
    call = prepare([], max_norm=max_norm, loss_scale=loss_scale, norm_type=norm_type)
    for count in (1, 2, 255, 257, 5000):
        rows = torch.rand(count, 2).double()
        for broken in (False, True):
            rows[:, 1] = 0.0
            rows[count // 2, 1] = float(broken)
            for got, right in zip(cuda.settle_cuda(call, rows), settle_reference(call, rows), strict=True):
                assert (got.dtype, got.shape) == (right.dtype, ())
                rtol = 1e-7 if got.dtype == torch.float32 else 1e-13
                torch.testing.assert_close(got, right, rtol=rtol, atol=0, equal_nan=True)


def test_rows_of_nothing_are_zero() -> None:
    rows = torch.empty(0, 2, dtype=torch.float64)
    assert [float(x) for x in cuda.clip_factor_op(rows, 2.0, None, 1.0, 0.5)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "table", [torch.zeros(4).long(), torch.zeros(2, 3).long(), torch.zeros(2, 4), torch.zeros(4, 2).long().t()]
)
def test_kernels_refuse_what_is_no_table(table: Tensor) -> None:
    factor = torch.ones((), dtype=torch.float64)
    for call in (lambda: cuda.chunk_power_sums_op(table, 2.0), lambda: cuda.chunk_scale_op(table, factor)):
        with pytest.raises(RuntimeError, match=r"table: expected contiguous int64 \[chunks, 4\]"):
            call()


@pytest.mark.parametrize(
    ("rows", "loss_scale", "message"),
    [
        (torch.zeros(2), None, r"rows: expected contiguous float64 \[rows, 2\]"),
        (torch.zeros(2, 2), None, r"rows: expected contiguous float64 \[rows, 2\]"),
        (torch.zeros(2, 2).double().t()[:, :1].expand(2, 2), None, r"rows: expected contiguous float64 \[rows, 2\]"),
        (torch.zeros(2, 2).double(), torch.ones(2), "loss_scale: expected one number"),
        (torch.zeros(2, 2).double(), torch.ones(1).long(), "loss_scale: expected float32, bfloat16, float16 or float"),
    ],
)
def test_kernels_refuse_wrong_rows_and_scales(rows: Tensor, loss_scale: Tensor | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        cuda.clip_factor_op(rows, 2.0, loss_scale, 1.0, None)


@pytest.mark.parametrize("factor", [torch.ones(()), torch.ones(2).double()], ids=["float32", "two"])
def test_kernels_refuse_a_wrong_factor(factor: Tensor) -> None:
    with pytest.raises(RuntimeError, match="factor: expected one float64 number"):
        cuda.chunk_scale_op(torch.zeros(0, 4).long(), factor)


def test_devices_are_not_mixed() -> None:
    explanation = dk.explain(dk.clip_and_scale_, [torch.ones(2), torch.ones(2, device="meta")])
    assert "the gradients are on cpu and meta" in explanation.refusals["cuda"]
    assert dk.explain(dk.grad_norm, [torch.ones(2, device="meta")]).refusals["cuda"] == "the tensors are on meta"


def test_refuses_other_classes_of_tensors() -> None:
    class Other(Tensor):
        pass

    grads = [torch.ones(2), torch.ones(3).as_subclass(Other)]
    with pytest.raises(RuntimeError, match=r"backend 'cuda'.*a gradient is of class Other"):
        dk.grad_norm(grads, backend="cuda")
    assert float(dk.grad_norm([torch.nn.Parameter(torch.full((4,), 2.0))], backend="cuda").total_norm) == 4.0


def test_automatic_choice_passes_by_the_emulator() -> None:
    for function in (dk.grad_norm, dk.clip_and_scale_):
        automatic = dk.explain(function, [torch.ones(2)])
        assert automatic.chosen in ("cpu", "reference")
        assert "emulated, which is for tests" in automatic.refusals["cuda"]
        assert dk.explain(function, []).chosen in ("cpu", "reference")


def test_without_the_emulator_nor_a_gpu() -> None:
    script = (
        "import torch, dskernels as dk\n"
        "print(dk.explain(dk.grad_norm, [torch.ones(2)]).refusals['cuda'])\n"
        "try: dk.grad_norm([torch.ones(2)], backend='cuda')\n"
        "except RuntimeError as error: print(error)"
    )
    done = run_python("-c", script)
    refusal = "the tensors are on cpu"
    error = f"grad_norm: backend 'cuda' (chosen by backend=) cannot serve this call: {refusal}"
    assert (done.returncode, done.stdout) == (0, f"{refusal}\n{error}\n"), done.stderr


def test_both_passes_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made, chunks_of = [], chunks.chunks_of

    def counted(tensors: list[Tensor]) -> chunks.Chunks:
        made.append(tensors)
        return chunks_of(tensors)

    monkeypatch.setattr(chunks, "chunks_of", counted)
    dk.clip_and_scale_([torch.randn(50), torch.randn(7).half()], max_norm=0.1, backend="cuda")
    assert len(made) == 1
