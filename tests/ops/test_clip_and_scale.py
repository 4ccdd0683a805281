"""grad_norm and clip_and_scale_: the norm in float64, the scaling in one rounding, and nothing written in vain."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dskernels as dk
from dskernels.clip_and_scale.table import table_power_sum_op, table_scale_op

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NORM_TYPES = (1.0, 2.0, 3.0, 2.5, math.inf)


def strided(dtype: torch.dtype) -> list[Tensor]:
    """Gradients whose elements lie in memory in all manner of ways."""
    cube = torch.randn(6, 5, 8).to(dtype)
    return [
        torch.randn(()).to(dtype),
        torch.randn(17, 9).to(dtype).t(),
        torch.randn(12, 40).to(dtype)[2:9, 3:37],
        torch.randn(300).to(dtype)[::3],
        cube.permute(2, 0, 1)[1:, ::2],
        torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last),
        torch.randn(7, 1, 3).to(dtype)[:, :, 1:2],
        torch.randn(100)[1:].to(dtype),
        torch.zeros(3, 0).to(dtype),
    ]


LISTS: dict[str, Callable[[], list[Tensor | None]]] = {
    "none": list,
    "only_none": lambda: [None, None],
    "empty": lambda: [torch.zeros(0), torch.zeros(3, 0)],
    "one": lambda: [torch.randn(1000)],
    "vectors_and_tails": lambda: [torch.randn(n) for n in (1, 3, 15, 16, 17, 31, 63, 64, 65, 127)],
    "large": lambda: [torch.randn(70_000), torch.randn(3), torch.randn(200_001)],
    "many": lambda: [torch.randn(1 + i % 7) for i in range(5000)],
    "with_none": lambda: [None, torch.randn(5), None, torch.randn(40, 3)],
    "mixed": lambda: [torch.randn(1000).to(dtype) for dtype in FLOATS for _ in range(3)],
    **{f"strided_{str(dtype)[6:]}": lambda dtype=dtype: strided(dtype) for dtype in FLOATS},
}


def drawn(name: str, backend: str) -> list[Tensor | None]:
    """A list of `LISTS`; for the emulator, which takes a millisecond for a tensor of any size, not all of it."""
    return LISTS[name]()[: 300 if backend == "cuda" else None]


def elements(grads: list[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(1).double(), *(g.double().flatten() for g in grads if g is not None)])


def right_norm(grads: list[Tensor | None], norm_type: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(elements(grads), norm_type))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("name", LISTS)
def test_norm_matches_float64(name: str, norm_type: float, backend: str) -> None:
    grads = drawn(name, backend)
    norm, found_inf = dk.grad_norm(grads, norm_type=norm_type, backend=backend)
    assert (norm.dtype, norm.shape, found_inf.dtype, float(found_inf)) == (torch.float32, (), torch.float32, 0.0)
    # Summed up in float64 and rounded to float32 once.
    assert float(norm) == pytest.approx(right_norm(grads, norm_type), rel=2**-23)


@pytest.mark.parametrize("loss_scale", [None, 8192.0, torch.tensor([3.0])], ids=["none", "number", "tensor"])
@pytest.mark.parametrize("max_norm", [None, 0.0, 0.25, 1e6])
@pytest.mark.parametrize("name", LISTS)
def test_scales_with_one_rounding(
    name: str, max_norm: float | None, loss_scale: float | Tensor | None, backend: str
) -> None:
    grads = drawn(name, backend)
    before = [None if g is None else g.clone() for g in grads]
    scale = 1.0 if loss_scale is None else float(loss_scale)
    norm = right_norm(grads) / scale
    result = dk.clip_and_scale_(grads, max_norm=max_norm, loss_scale=loss_scale, backend=backend)
    assert float(result.total_norm) == pytest.approx(norm, rel=2**-23)
    factor = (1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))) / scale
    for after, old in zip(grads, before, strict=True):
        if after is None or old is None:
            continue
        # The factor is rounded to float32 and so is the product; then the dtype's rounding.
        torch.testing.assert_close(
            after.double(), old.double() * factor, rtol=2**-22 + torch.finfo(after.dtype).eps / 2, atol=6e-8
        )
        if factor == 1:
            assert torch.equal(after, old)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_leaves_all_as_it_was(
    dtype: torch.dtype, norm_type: float, bad: float, backend: str
) -> None:
    for place in (0, 7, 63, 64, 99):
        grads = [torch.randn(50_000), torch.randn(100).to(dtype), torch.randn(10)]
        grads[1][place] = bad
        before = [g.clone() for g in grads]
        norm, found_inf = dk.clip_and_scale_(grads, max_norm=0.1, loss_scale=4.0, norm_type=norm_type, backend=backend)
        assert float(found_inf) == 1.0
        assert not norm.isfinite()
        assert all(
            torch.equal(a, b) or bool((a.isnan() == b.isnan()).all()) for a, b in zip(grads, before, strict=True)
        )
        assert torch.equal(grads[0], before[0])


@pytest.mark.parametrize("why", ["nothing to do", "not finite"])
def test_what_need_not_change_is_not_written(why: str, backend: str) -> None:
    if backend == "cuda":
        pytest.skip("whether anything is written is known on the device alone")
    grad = torch.randn(100)
    if why == "not finite":
        grad[7] = math.nan
    version = grad._version
    dk.clip_and_scale_([grad], max_norm=1e-3 if why == "not finite" else 1e9, backend=backend)
    assert grad._version == version


def test_large_finite_gradients_are_not_broken(backend: str) -> None:
    norm, found_inf = dk.grad_norm([torch.full((4,), 1e20)], backend=backend)
    assert (float(norm), float(found_inf)) == (pytest.approx(2e20), 0.0)
    grads = [torch.full((10_000,), 1000.0, dtype=torch.float16)]
    assert float(dk.grad_norm(grads, backend=backend).total_norm) == pytest.approx(1e5, rel=1e-6)
    grads = [torch.randn(100_000).bfloat16()]
    assert float(dk.grad_norm(grads, backend=backend).total_norm) == pytest.approx(right_norm(grads), rel=1e-6)


def test_maximum_of_a_nan_is_nan(backend: str) -> None:
    norm, found_inf = dk.grad_norm([torch.tensor([1.0]), torch.tensor([math.nan])], norm_type=math.inf, backend=backend)
    assert norm.isnan()
    assert float(found_inf) == 1.0


def test_a_tensor_that_comes_twice_counts_once(backend: str) -> None:
    grad = torch.tensor([3.0, 4.0])
    assert float(dk.clip_and_scale_([grad, grad], max_norm=1.0, backend=backend).total_norm) == 5.0
    torch.testing.assert_close(grad, torch.tensor([0.6, 0.8]))


def test_neighbours_in_the_same_storage_are_untouched(backend: str) -> None:
    storage = torch.randn(20, 30)
    grad, before = storage[3:9, 4:20:3], storage.clone()
    dk.clip_and_scale_([grad], max_norm=1e-3, backend=backend)
    inside = torch.zeros(20, 30, dtype=torch.bool)
    inside[3:9, 4:20:3] = True
    assert torch.equal(storage[~inside], before[~inside])
    assert (storage[inside] != before[inside]).all()


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_gradients_count_by_the_sums_of_their_entries(coalesced: bool, backend: str) -> None:
    places, values = torch.tensor([[0, 2, 2, 5]]), torch.randn(4, 3)
    sparse = torch.sparse_coo_tensor(places, values, (7, 3))
    sparse = sparse.coalesce() if coalesced else sparse
    dense = sparse.to_dense()
    other = torch.randn(11)
    norm = float(torch.cat((dense.flatten(), other)).double().norm()) / 2
    result = dk.clip_and_scale_([sparse, other], max_norm=0.5, loss_scale=2.0, backend=backend)
    assert float(result.total_norm) == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(sparse.to_dense(), dense * (0.5 / (norm + 1e-6) / 2))


def test_same_bits_on_every_run_and_for_every_thread_count(backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch's own sums answer for the reference")
    grads = [torch.randn(1 + 7919 * i % 100_003) for i in range(60)]
    threads, norms = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 2, 1):
            torch.set_num_threads(count)
            norms.append(dk.grad_norm(grads, backend=backend).total_norm)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_a_graph_that_kept_a_gradient_is_told(backend: str) -> None:
    weight, grad = torch.randn(5, requires_grad=True), torch.randn(5)
    loss = (weight * grad).sum()
    dk.clip_and_scale_([grad], max_norm=1e-3, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_are_part_of_a_graph_stay_there(backend: str) -> None:
    weight = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    result = dk.grad_norm([grad], backend=backend)
    assert not result.total_norm.requires_grad
    assert grad.requires_grad


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_fullgraph(compiler: str) -> None:
    torch._dynamo.reset()

    def step(grads: list[Tensor | None], scale: Tensor) -> tuple[Tensor, Tensor]:
        norm, found_inf = dk.clip_and_scale_(grads, max_norm=0.5, loss_scale=scale)
        return norm + 0, found_inf + dk.grad_norm(grads, loss_scale=4.0).found_inf

    grads, scale = [torch.randn(100, 3), None, torch.randn(7).double()], torch.tensor(8.0)
    others = [None if g is None else g.clone() for g in grads]
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend=compiler)(grads, scale), step(others, scale))
    for one, other in zip(grads, others, strict=True):
        assert one is other or torch.equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([torch.ones(2), 3],), TypeError, r"grads\[1\]: expected a tensor or None, got 3"),
        (([torch.ones(2).long()],), ValueError, r"grads\[0\]: expected dtype float32.*, got torch.int64"),
        (([torch.ones(2) * 1j],), ValueError, r"grads\[0\]: expected dtype float32.*, got torch.complex64"),
    ],
)
def test_wrong_gradients(arguments: tuple, error: type, message: str, backend: str) -> None:
    with pytest.raises(error, match=message):
        dk.grad_norm(*arguments, backend=backend)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_norm": -1.0}, ValueError, "max_norm: expected a number not below 0, or None, got -1.0"),
        ({"max_norm": math.nan}, ValueError, "max_norm: expected a number not below 0"),
        ({"max_norm": "1"}, TypeError, "max_norm: expected a number or None, got '1'"),
        ({"loss_scale": 0.0}, ValueError, "loss_scale: expected a positive finite number, got 0.0"),
        ({"loss_scale": math.inf}, ValueError, "loss_scale: expected a positive finite number"),
        ({"loss_scale": "8"}, TypeError, "loss_scale: expected a number, a tensor or None"),
        ({"loss_scale": torch.ones(2)}, ValueError, r"loss_scale: expected one floating point number, got \[2\]"),
        ({"loss_scale": torch.tensor(3)}, ValueError, "loss_scale: expected one floating point number"),
        ({"norm_type": 0.0}, ValueError, "norm_type: expected a positive number or inf, got 0.0"),
        ({"norm_type": math.nan}, ValueError, "norm_type: expected a positive number or inf"),
        ({"norm_type": "inf"}, TypeError, "norm_type: expected a number"),
        ({"error_if_nonfinite": 1}, TypeError, "error_if_nonfinite: expected a bool"),
        ({"backend": "onnx"}, ValueError, "backend: expected one of cpu, cuda, triton, reference, got 'onnx'"),
    ],
    ids=str,
)
def test_wrong_options(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        dk.clip_and_scale_([torch.ones(2)], **options)


def test_error_if_nonfinite(backend: str) -> None:
    grads = [torch.tensor([1.0, math.inf])]
    with pytest.raises(RuntimeError, match="grads: expected finite gradients, got a total norm of inf"):
        dk.clip_and_scale_(grads, max_norm=1.0, error_if_nonfinite=True, backend=backend)
    assert grads[0][0] == 1.0


def test_shared_elements_can_be_read_and_not_written(backend: str) -> None:
    grad = torch.tensor([3.0]).expand(4)
    assert float(dk.grad_norm(grad, backend=backend).total_norm) == 6.0
    with pytest.raises(ValueError, match=r"grads\[1\]: expected a place in memory for each element"):
        dk.clip_and_scale_([torch.ones(2), grad], max_norm=1.0, backend=backend)


def test_a_table_holds_what_dlpack_can_tell_and_leaves_the_rest() -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    from dskernels import _C

    plain, sparse = torch.ones(3), torch.ones(3).to_sparse()
    listed = [plain, None, sparse, plain, torch.ones(2).long(), torch.ones(1).expand(4), torch.zeros(0)]
    data, held, rest = _C.tensor_table(listed, Tensor)
    assert len(data) == 4 * 8
    assert [id(tensor) for tensor in held] == [id(plain), id(listed[6])]
    assert rest == [2, 4, 5]
    # A type without the exchange, as of a torch that would drop it.
    assert _C.tensor_table([plain], object)[1:] == ([], [0])


@pytest.mark.parametrize(
    "table", [torch.zeros(4).long(), torch.zeros(2, 3).long(), torch.zeros(2, 4), torch.zeros(4, 2).long().t()]
)
def test_kernels_refuse_what_is_no_table(table: Tensor) -> None:
    if dk.build_info()["compiled"] is None:
        pytest.skip(dk.build_info()["not_loaded"])
    for call in (lambda: table_power_sum_op(table, 2.0), lambda: table_scale_op(table, 2.0)):
        with pytest.raises(RuntimeError, match=r"table: expected contiguous int64 \[runs, 4\]"):
            call()
