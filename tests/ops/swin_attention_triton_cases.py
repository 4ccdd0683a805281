"""What test_swin_attention_triton.py runs of swin_attention under Triton's interpreter.

As in window_attention_triton_cases.py, whose head says why there is a process of its own, and why bfloat16 is missing.
"""

from __future__ import annotations

import pytest
import torch
from swin_attention_triton_oracle import CASES, Case, Rope, attend, check, with_gradients
from torch import Tensor

import dskernels as dk
from dskernels.swin_attention import triton, triton_backward, triton_common, triton_tiled_backward
from dskernels.swin_attention.triton_schema import triton_backward_op, triton_forward_op

SMALL = Case((1, 4, 4), 2, 16, (3, 4), (1, 0), bias=True, cosine=True, rope=Rope())


def run(case: Case, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    return with_gradients(attend, case, inputs, grad)


def assert_same_bits(results: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, one in results.items():
        assert torch.equal(one, others[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs, grad = case.inputs(dtype), case.grad(dtype)
    check(case, inputs, grad, run(case, inputs, grad))


def test_cases_take_both_backwards() -> None:
    for dtype in (torch.float32, torch.float16):
        tiles = {name: triton_common.tile_for("cell", dtype, case.tokens, case.dim) for name, case in CASES.items()}
        assert tiles["swin"] is not None
        assert tiles["tiled"] is None


@pytest.mark.parametrize("name", ["swin", "tiled"])
def test_programs_that_walk_over_cells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
    apart = run(case, inputs, grad)
    for module in (triton, triton_backward, triton_tiled_backward):
        monkeypatch.setattr(module, "_PROGRAMS", 1)
        monkeypatch.setattr(module, "_MOST_CELLS", 4)
    together = run(case, inputs, grad)
    check(case, inputs, grad, together)
    assert_same_bits({k: x for k, x in together.items() if k != "grad of bias"}, apart)


def test_wide_offsets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, grad = SMALL.inputs(torch.float32), SMALL.grad(torch.float32)
    narrow = run(SMALL, inputs, grad)
    monkeypatch.setattr(triton_common.Problem, "_is_wide", lambda *_: True)
    assert_same_bits(run(SMALL, inputs, grad), narrow)


def test_offsets_are_wide_where_they_must_be() -> None:
    def is_wide(qkv: Tensor, *images: Tensor, bias: Tensor | None = None) -> bool:
        return triton_common.Problem(qkv, None, None, bias, None, 1, 7, 7, 0, 0, 1.0, False)._is_wide(*images)

    dense = torch.empty(2, 14, 14, 96, device="meta")
    far = torch.empty(1, device="meta").as_strided((2, 14, 14, 96), (2**40, 2**29, 96, 1))
    assert not is_wide(dense)
    assert not is_wide(torch.empty(2**20, 56, 56, 96, device="meta"))
    assert is_wide(far)
    assert is_wide(dense, dense, far)
    assert is_wide(dense, bias=torch.empty(1, device="meta").as_strided((1, 49, 49), (1, 2**26, 1)))


def test_any_strides() -> None:
    inputs, grad = SMALL.inputs(torch.float32), SMALL.grad(torch.float32)
    right = run(SMALL, inputs, grad)
    qkv, bias = inputs["qkv"], inputs["bias"]
    views = [
        (qkv.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), bias.mT.contiguous().mT),
        (torch.nn.functional.pad(qkv, (1, 1, 2, 0, 0, 3))[:, :4, 2:, 1:-1], bias.repeat_interleave(2, 2)[..., ::2]),
    ]
    for strided, strided_bias in views:
        assert not strided.is_contiguous()
        changed = {**inputs, "qkv": strided, "bias": strided_bias}
        assert_same_bits(run(SMALL, changed, grad.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)), right)
    expanded = torch.randn(1, 1, 1, 1).expand_as(grad)
    assert_same_bits(run(SMALL, inputs, expanded), run(SMALL, inputs, expanded.contiguous()))


@pytest.mark.parametrize("case", [SMALL, CASES["tiled"]], ids=["whole", "tiled"])
def test_nan_stays_in_its_cell(case: Case) -> None:
    inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
    clean = run(case, inputs, grad)
    inputs["qkv"][0, 0, 0], grad[0, 0, 0, 0] = torch.nan, torch.nan
    dirty = run(case, inputs, grad)
    # The first cell reaches as far as the grid is shifted.
    height, width = (shift or size for shift, size in zip(case.shift, case.size[1:], strict=True))
    cell = torch.zeros(case.size, dtype=torch.bool)
    cell[0, :height, :width] = True
    for name in ("out", "grad of qkv"):
        assert torch.equal(dirty[name][~cell], clean[name][~cell])
    assert dirty["out"][cell].isnan().all()


@pytest.mark.parametrize("case", [CASES["images"], CASES["tiled"]], ids=["whole", "tiled"])
def test_rows_hidden_by_the_bias_see_nothing(case: Case) -> None:
    inputs, grad = case.inputs(torch.float32), case.grad(torch.float32)
    inputs["bias"][:, 5] = -torch.inf
    (h, w), (_, height, width) = case.window, case.size
    y = (torch.arange(height) - case.shift[0]) % h
    x = (torch.arange(width) - case.shift[1]) % w
    hidden = y[:, None] * w + x == 5
    grad[:, hidden] = torch.nan
    results = run(case, inputs, grad)
    assert hidden.any()
    assert (results["out"][:, hidden] == 0).all()
    assert (results["out"][:, ~hidden] != 0).all()
    assert all(result.isfinite().all() for result in results.values())
    queries = results["grad of qkv"][..., : case.heads * case.dim]
    assert (queries[:, hidden] == 0).all()
    assert (results["grad of bias"][:, 5] == 0).all()


def test_weights_are_of_the_cell_alone() -> None:
    # Each token has a value of its own, so that a row of the output is the row of weights, times cosines of up to 100.
    case = Case((1, 5, 4), 1, 32, (3, 4), (2, 1), cosine=True)
    qkv = torch.randn(5, 4, 96)
    qkv[..., 64:] = torch.eye(20, 32).view(5, 4, 32)
    weights = attend(case, qkv[None], logit_scale=torch.tensor([100.0]))[0]
    rows, columns = (torch.arange(5) - 2) // 3, (torch.arange(4) - 1) // 4
    cells = (rows[:, None] * 10 + columns).flatten()
    weights = weights.flatten(0, 1)[:, :20]
    assert (weights[cells[:, None] != cells] == 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(20))


def test_tokens_of_zeros_with_cosines() -> None:
    case = Case((1, 4, 4), 1, 16, (4, 4), cosine=True)
    inputs, grad = case.inputs(torch.float16), case.grad(torch.float16)
    inputs["qkv"][0, 1] = 0.0
    inputs["qkv"][0, 2] *= 1e-3
    results = run(case, inputs, grad)
    assert results["out"].isfinite().all()
    assert results["grad of logit_scale"].isfinite().all()
    # At zero the slope of a direction is 1e12, for which float16 has no number: only there.
    assert results["grad of qkv"][0, [0, 2, 3]].isfinite().all()
    assert results["grad of qkv"][..., 32:].isfinite().all()
    # Of some thousand times their size next to tokens that are tiny, and right.
    inputs["qkv"][0, 1] = 1e-3
    check(case, inputs, grad, run(case, inputs, grad))


def test_same_bits_on_every_run() -> None:
    inputs, grad = SMALL.inputs(torch.float16), SMALL.grad(torch.float16)
    assert_same_bits(run(SMALL, inputs, grad), run(SMALL, inputs, grad))


@pytest.mark.parametrize("size", [(0, 5, 4), (2, 0, 4), (2, 5, 0)], ids=str)
def test_empty(size: tuple[int, int, int]) -> None:
    case = SMALL._replace(size=size)
    results = run(case, case.inputs(torch.float32), case.grad(torch.float32))
    assert results["out"].shape == (*size, 32)
    assert results["grad of qkv"].shape == (*size, 96)
    assert (results["grad of bias"] == 0).all()
    assert (results["grad of logit_scale"] == 0).all()


def test_only_what_is_needed_is_computed() -> None:
    inputs, grad = SMALL.inputs(torch.float32), SMALL.grad(torch.float32)
    table = SMALL.table()
    tables = (table.cos[None], table.sin[None])
    rest = (*tables, inputs["bias"], inputs["logit_scale"], 2, 3, 4, 1, 0, 1.0, False)
    right = run(SMALL, inputs, grad)
    for needs in ((False, False), (True, False), (False, True)):
        grads = triton_backward_op(grad, inputs["qkv"], *rest, *needs)
        assert torch.equal(grads[0], right["grad of qkv"])
        for name, result, needed in zip(("bias", "logit_scale"), grads[1:], needs, strict=True):
            assert torch.equal(result, right[f"grad of {name}"]) if needed else result.numel() == 0


def test_opcheck() -> None:
    case = Case((1, 3, 4), 1, 8, (2, 3), (1, 0))
    table = dk.rope_table_2d(8, 2, 3)
    rest = (table.cos[None], table.sin[None], torch.randn(1, 6, 6), torch.rand(1), 1, 2, 3, 1, 0, 1.0, False)
    qkv = torch.randn(1, 3, 4, 24)
    # Not test_aot_dispatch_dynamic, which compares values once more and takes as long as all other tests.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_forward_op, (qkv.clone().requires_grad_(), *rest), test_utils=checks)
    arguments = (case.grad(torch.float32), qkv, *rest, True, True)
    torch.library.opcheck(triton_backward_op, arguments, test_utils=checks)


def test_compile_fullgraph_dynamic() -> None:
    case = Case((1, 3, 4), 1, 8, (2, 3), (1, 0), bias=True)
    compiled = torch.compile(lambda *x: attend(case, *x), fullgraph=True, dynamic=True, backend="aot_eager")
    for height in (3, 5):
        leaves = [x.requires_grad_() for x in case._replace(size=(1, height, 4)).inputs(torch.float32).values()]
        pairs = (
            torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, lambda *x: attend(case, *x))
        )
        for one, other in zip(*pairs, strict=True):
            assert torch.equal(one, other)


def test_automatic_choice_does_not_take_the_interpreter() -> None:
    automatic = dk.explain(dk.swin_attention, torch.randn(1, 4, 4, 24), window_size=2, num_heads=1)
    assert automatic.chosen in ("cpu", "reference")
    assert "emulated, which is for tests" in automatic.refusals["triton"]


def test_refusals() -> None:
    def call(qkv: Tensor, window: int = 2) -> Tensor:
        return dk.swin_attention(qkv, window_size=window, num_heads=1, backend="triton")

    with pytest.raises(RuntimeError, match=r"backend 'triton'.*head dimensions go up to 256, got 257"):
        call(torch.randn(1, 4, 4, 3 * 257))
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*windows go up to 256 tokens, got 17 x 17"):
        call(torch.randn(1, 4, 4, 24), 17)
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*not torch.float64"):
        call(torch.randn(1, 4, 4, 24).double())
