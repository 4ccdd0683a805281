"""What test_clip_and_scale_triton.py runs of grad_norm and clip_and_scale_ under Triton's interpreter.

As in window_attention_triton_cases.py, whose head says why there is a process of its own. bfloat16 is here, too: the
interpreter is wrong only in its rounding, which cuts.
"""

from __future__ import annotations

import math

import pytest
import test_clip_and_scale as shared
import torch
from torch import Tensor

import dskernels as dk
from dskernels.clip_and_scale import chunks
from dskernels.clip_and_scale import triton as kernels

# Thousands of launches take the interpreter a while.
NAMES = [name for name in shared.LISTS if name != "many"]
WITHOUT_BFLOAT16 = [name for name in NAMES if name not in ("mixed", "strided_bfloat16")]
# From a little over a block and a chunk to three chunks, and unaligned ones.
SIZES = (4095, 4096, 4097, 32767, 32768, 32769, 70_001)


@pytest.mark.parametrize("norm_type", [*shared.NORM_TYPES, 0.7, 1.7])
@pytest.mark.parametrize("name", NAMES)
def test_norm_matches_float64(name: str, norm_type: float) -> None:
    shared.test_norm_matches_float64(name, norm_type, "triton")


@pytest.mark.parametrize("loss_scale", [None, 8192.0, torch.tensor([3.0])], ids=["none", "number", "tensor"])
@pytest.mark.parametrize("max_norm", [None, 0.0, 0.25, 1e6])
@pytest.mark.parametrize("name", WITHOUT_BFLOAT16)
def test_scales_with_one_rounding(name: str, max_norm: float | None, loss_scale: float | Tensor | None) -> None:
    shared.test_scales_with_one_rounding(name, max_norm, loss_scale, "triton")


@pytest.mark.parametrize("name", ["mixed", "strided_bfloat16"])
def test_scales_bfloat16(name: str) -> None:
    grads = [g for g in shared.LISTS[name]() if g.dtype == torch.bfloat16]
    before = [g.clone() for g in grads]
    dk.clip_and_scale_(grads, loss_scale=3.0, backend="triton")
    for after, old in zip(grads, before, strict=True):
        torch.testing.assert_close(after.double(), old.double() / 3, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [*shared.NORM_TYPES, 0.7])
@pytest.mark.parametrize("dtype", shared.FLOATS, ids=str)
def test_what_is_not_finite_leaves_all_as_it_was(dtype: torch.dtype, norm_type: float, bad: float) -> None:
    shared.test_what_is_not_finite_leaves_all_as_it_was(dtype, norm_type, bad, "triton")


@pytest.mark.parametrize(
    "check",
    [
        shared.test_large_finite_gradients_are_not_broken,
        shared.test_maximum_of_a_nan_is_nan,
        shared.test_a_tensor_that_comes_twice_counts_once,
        shared.test_neighbours_in_the_same_storage_are_untouched,
        shared.test_a_graph_that_kept_a_gradient_is_told,
        shared.test_gradients_that_are_part_of_a_graph_stay_there,
        shared.test_error_if_nonfinite,
        shared.test_shared_elements_can_be_read_and_not_written,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
def test_as_every_backend(check) -> None:
    check("triton")


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_gradients(coalesced: bool) -> None:
    shared.test_sparse_gradients_count_by_the_sums_of_their_entries(coalesced, "triton")


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_ends_of_blocks_and_chunks(size: int, stride: int, offset: int) -> None:
    storage = torch.randn(offset + stride * size + 5000)
    before, grad = storage.clone(), storage[offset : offset + stride * size : stride]
    inside = torch.zeros_like(storage, dtype=torch.bool)
    inside[offset : offset + stride * size : stride] = True
    norm, _ = dk.clip_and_scale_([grad], max_norm=1.0, backend="triton")
    assert float(norm) == pytest.approx(float(before[inside].double().norm()), rel=2**-23)
    torch.testing.assert_close(storage[inside].double(), before[inside].double() / float(norm), rtol=1e-6, atol=0)
    assert torch.equal(storage[~inside], before[~inside])


@pytest.mark.parametrize("place", [0, 4095, 4096, 32767, 32768, 69_999])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_finds_what_is_not_finite_anywhere(norm_type: float, place: int) -> None:
    grad = torch.zeros(70_000)
    assert float(dk.grad_norm([grad], norm_type=norm_type, backend="triton").found_inf) == 0.0
    grad[place] = math.nan
    assert float(dk.grad_norm([grad], norm_type=norm_type, backend="triton").found_inf) == 1.0


@pytest.mark.parametrize("size", [1e-44, 1e-30, 3e38])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 2.3])
def test_powers_beyond_float32(norm_type: float, size: float) -> None:
    grad = torch.full((9,), size, dtype=torch.float32)
    norm = float(dk.grad_norm([grad], loss_scale=1e10, norm_type=norm_type, backend="triton").total_norm)
    right = float(grad[0].double()) * 9 ** (1 / norm_type) / 1e10
    # What float32 cannot hold of the result is rounded to its smallest numbers.
    assert norm == pytest.approx(right, rel=2**-23, abs=2**-149)


def test_many_tensors() -> None:
    grads = [torch.randn(1 + i % 7).to(shared.FLOATS[i % 4]) for i in range(400)]
    norm, _ = dk.grad_norm(grads, backend="triton")
    assert float(norm) == pytest.approx(shared.right_norm(grads), rel=2**-23)


def test_same_bits_on_every_run() -> None:
    grads = [torch.randn(1 + 7919 * i % 100_003) for i in range(10)]
    first, second = (dk.grad_norm(grads, backend="triton").total_norm for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_is_loaded_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing lies at these addresses: a load, or a store, ends the process.
    table = torch.tensor([[16, 100, 1, 0], [32, 5000, 1, 2]])
    groups = [chunks.Group(torch.float32, True, 0, 1), chunks.Group(torch.float16, False, 1, 1)]
    monkeypatch.setattr(chunks, "chunks_of", lambda tensors: chunks.Chunks(table, groups))
    kernels.TritonPasses().scale_([torch.ones(1)], torch.ones((), dtype=torch.float64))


def test_both_passes_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made, chunks_of = [], chunks.chunks_of

    def counted(tensors: list[Tensor]) -> chunks.Chunks:
        made.append(tensors)
        return chunks_of(tensors)

    monkeypatch.setattr(chunks, "chunks_of", counted)
    dk.clip_and_scale_([torch.randn(50), torch.randn(7).half()], max_norm=0.1, backend="triton")
    assert len(made) == 1


def test_automatic_choice_passes_by_the_interpreter() -> None:
    for function in (dk.grad_norm, dk.clip_and_scale_):
        automatic = dk.explain(function, [torch.ones(2)])
        assert automatic.chosen in ("cpu", "reference")
        assert "emulated, which is for tests" in automatic.refusals["triton"]


def test_refuses_other_classes_of_tensors() -> None:
    class Other(Tensor):
        pass

    grads = [torch.ones(2), torch.ones(3).as_subclass(Other)]
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*a gradient is of class Other"):
        dk.grad_norm(grads, backend="triton")
    assert float(dk.grad_norm([torch.nn.Parameter(torch.full((4,), 2.0))], backend="triton").total_norm) == 4.0
