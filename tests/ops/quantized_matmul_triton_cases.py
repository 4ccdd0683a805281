"""What test_quantized_matmul_triton.py runs of quantized_matmul under Triton's interpreter.

As in window_attention_triton_cases.py, whose head says why there is a process of its own, and why bfloat16 is missing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_quantized_matmul_triton import (
    E4M3,
    INT4_SCHEMES,
    INTEGER_SCHEMES,
    check,
    draw_weight,
    in_float64,
    rounded,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dskernels as dk
from dskernels.quantized_matmul import activations, triton, triton_codes
from dskernels.quantized_matmul.triton_schema import triton_backward_op, triton_forward_op
from dskernels.quantized_matmul.weight import SCHEMES
from dskernels.testing import assert_close_to_reference

DTYPES = (torch.float32, torch.float16)
SHAPES = [(1, 1, 1), (1, 65, 33), (3, 15, 2), (5, 3, 100), (17, 34, 150), (2, 130, 31), (4, 5, 577), (1, 3, 64)]


def product(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return dk.quantized_matmul(x, weight, bias, backend="triton")


def arguments(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> tuple:
    """The arguments of the operator."""
    return (
        *(x, weight.qweight, weight.scale, weight.zero_point, weight.input_scale, weight.input_order, bias),
        *(SCHEMES.index(weight.scheme), weight.group_size),
    )


@pytest.mark.parametrize(("shape", "dtype"), zip(SHAPES, 4 * DTYPES, strict=True), ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_matches_float64(scheme: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    weight, x, bias = draw_weight(scheme, columns, depth), torch.randn(rows, depth).to(dtype), torch.randn(columns)
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 32, 48, 128, -1])
@pytest.mark.parametrize("scheme", INT4_SCHEMES)
def test_groups(scheme: str, group_size: int, symmetric: bool) -> None:
    for dtype, depth in zip(DTYPES, (100, 291), strict=True):
        weight = draw_weight(scheme, 9, depth, group_size=group_size, symmetric=symmetric)
        # Every group a scale of its own, and one that has nothing but large codes.
        weight.scale.mul_(torch.rand_like(weight.scale) + 0.5)
        weight.qweight[3] = 255
        x = torch.randn(3, depth).to(dtype)
        check(x, weight, None, product(x, weight))


@pytest.mark.parametrize("scheme", INT4_SCHEMES)
def test_any_zero_point(scheme: str) -> None:
    # Other programs store one more or less than the code, or signed numbers: the byte counts as it is.
    weight = draw_weight(scheme, 9, 100, group_size=32, symmetric=False)
    weight.zero_point[:] = torch.tensor([0, 16, 128, 255], dtype=torch.uint8)
    x = torch.randn(3, 100)
    check(x, weight, None, product(x, weight))


def test_every_float_of_e4m3() -> None:
    weight, x = draw_weight("fp8_block", 2, 256), 448 * torch.eye(256)[::5]
    weight.qweight[0] = torch.arange(256)
    weight.scale.fill_(1.0)
    # Zero times a NaN is one.
    assert product(x, weight)[:, 0].isnan().all()
    weight.qweight[0][[127, 255]] = 0
    result = product(x, weight).double()
    assert torch.equal(result[:, 0], 448 * E4M3.nan_to_num(0.0)[::5])
    assert torch.equal(result[:, 1], 448 * E4M3[weight.qweight[1].int()][::5])


def test_rounds_to_e4m3_as_torch() -> None:
    halfway = (E4M3[:127][1:] + E4M3[:126]) / 2
    near = torch.cat((E4M3[:127], halfway, halfway * (1 + 2**-20), halfway * (1 - 2**-20))).float()
    # In every block the largest number of e4m3, so that the scale is 1.
    x = torch.nn.functional.pad(torch.cat((near, -near)), (0, 1000))[:1016].view(-1, 127)
    x = torch.nn.functional.pad(x, (0, 1), value=448.0)
    codes, scale = triton_codes.quantize_blocks(x.reshape(2, -1))
    assert (scale == 1).all()
    assert torch.equal(codes.float(), x.reshape(2, -1).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("columns", [1, 100, 128, 1500])
def test_codes_of_rows_are_those_of_the_reference(columns: int) -> None:
    # Products of tiny and huge numbers, ties, and everything that is not finite.
    x = (
        torch.randn(12, columns)
        * torch.tensor([10.0**n for n in (-38, -30, -19, -18, -12, 0, 3, 17, 18, 19, 30, 37)])[:, None]
    )
    x = torch.cat((x, torch.zeros(1, columns), torch.arange(-columns, columns).view(2, -1) / 2))
    x[7, -1], x[8, 0], x[9, columns // 2] = torch.nan, torch.inf, -torch.inf
    # Codes of rows that are not finite are anything.
    finite = x.isfinite().all(1)
    results = triton_codes.quantize_rows(x, None)
    for result, right in zip(results, activations.quantize_rows(x), strict=True):
        assert torch.equal(result[finite], right[finite])
    assert torch.equal(results[1].isnan(), ~finite)
    for step in (0.5, 0.37, 1e-30, 1e30):
        codes, scale, _ = triton_codes.quantize_rows(x, torch.tensor(step))
        right_codes, right_scale = activations.quantize_rows_by(x, torch.tensor(step))
        assert torch.equal(codes[finite], right_codes[finite])
        torch.testing.assert_close(scale, right_scale, rtol=0, atol=0, equal_nan=True)
    codes, scale = triton_codes.quantize_blocks(x)
    values = codes.float() * scale.repeat_interleave(128, 1)[:, :columns]
    torch.testing.assert_close(values, activations.quantize_blocks(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_static", "int4_dynamic", "fp8_block"])
def test_is_within_half_a_step_of_the_product_of_floats(scheme: str) -> None:
    weight, x = draw_weight(scheme, 33, 150), torch.randn(5, 150)
    exact, size = in_float64(weight), in_float64(weight).abs()
    if scheme == "fp8_block":
        # Half a unit in the fourth digit, or half the distance of the smallest numbers.
        step = x.abs() * 2**-3 + x.abs().amax(1, keepdim=True) / 448 * 2**-9
    else:
        largest = weight.input_scale or x.abs().amax(1, keepdim=True) / 127
        step = torch.zeros_like(x) + largest
        x = x.clamp(-127 * largest, 127 * largest)
    bound = step.double() / 2 @ size.T * (1 + 1e-5)
    assert ((product(x, weight).double() - x.double() @ exact.T).abs() <= bound).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_splits(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"group_size": 48, "symmetric": False} if scheme in INT4_SCHEMES else {}
    weight, x, bias = draw_weight(scheme, 35, 410, **options), torch.randn(3, 410), torch.randn(35)
    whole = None
    for splits in (1, 2, 7):
        monkeypatch.setattr(triton, "split_count", lambda *_, splits=splits: splits)
        result = product(x, weight, bias)
        check(x, weight, bias, result)
        whole = result if whole is None else whole
        assert torch.equal(result, whole) or scheme not in INTEGER_SCHEMES
    assert torch.equal(product(x, weight, bias), result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", INTEGER_SCHEMES)
def test_a_row_of_a_batch_equals_the_same_row_alone(scheme: str, dtype: torch.dtype) -> None:
    weight, x, bias = draw_weight(scheme, 40, 600), torch.randn(35, 600).to(dtype), torch.randn(40)
    batch = product(x, weight, bias)
    assert triton.cut_for("int8", 1, 40, 600, 600, 4).splits > triton.cut_for("int8", 35, 40, 600, 600, 4).splits
    for row in (0, 16, 34):
        assert torch.equal(product(x[row], weight, bias), batch[row])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 5, 40), (3, 0, 40), (3, 5, 0), (0, 0, 0)], ids=str)
def test_empty(rows: int, columns: int, depth: int, scheme: str) -> None:
    weight, bias = draw_weight(scheme, columns, depth), torch.randn(columns)
    x = torch.randn(2, rows, depth, requires_grad=True)
    out = product(x, weight, bias)
    assert out.shape == (2, rows, columns)
    assert torch.equal(out, bias.expand_as(out))
    assert (product(x.detach(), weight) == 0).all()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert grad.shape == x.shape
    assert columns > 0 or (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_and_of_what_is_not_finite(scheme: str, dtype: torch.dtype) -> None:
    weight, x, bias = draw_weight(scheme, 35, 150), torch.randn(20, 150).to(dtype), torch.randn(35)
    weight.scale[0] = 0.0
    x[[2, 18]] = 0.0
    clean = product(x, weight, bias)
    assert torch.equal(clean[[2, 18]], bias.to(dtype).expand(2, -1))
    assert scheme == "fp8_block" or torch.equal(clean[:, 0], bias[0].to(dtype).expand(20))
    x[1, 149], x[5, 0], x[17, 70] = torch.nan, torch.inf, -torch.inf
    dirty = product(x, weight, bias)
    broken = torch.zeros(20, dtype=torch.bool)
    broken[[1, 5, 17]] = True
    assert not dirty[broken].isfinite().any()
    assert torch.equal(dirty[~broken], clean[~broken])
    torch.testing.assert_close(dirty, dk.quantized_matmul(x, weight, bias, backend="reference"), equal_nan=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-12, 1e12, 1e30])
def test_tiny_and_huge_rows(size: float, scheme: str) -> None:
    weight, x = draw_weight(scheme, 5, 150), torch.randn(3, 150)
    x[1] *= size
    usual, result = dk.quantized_matmul(x, weight, backend="reference"), product(x, weight)
    exact = rounded(x, weight) @ in_float64(weight).T
    for row in range(3):
        assert_close_to_reference(result[row], exact[row], usual[row], f"row {row}")


@pytest.mark.parametrize("scheme", INTEGER_SCHEMES)
def test_largest_products(scheme: str) -> None:
    # -127 * -127, 127 * -127 and 127 * -128, summed as integers by torch.
    weight, x = draw_weight(scheme, 3, 577), torch.full((2, 577), -3.81)
    x[1] = 3.81
    weight.qweight[0], weight.qweight[1], weight.qweight[2] = -127, 127, -128
    weight.scale.fill_(1.0)
    scale = weight.input_scale or torch.tensor(3.81) / 127
    sums = torch.tensor([[-127], [127]]).expand(2, 577) @ weight.qweight.long().T
    assert torch.equal(product(x, weight), sums.float() * scale)


def test_sums_beyond_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_INTERPRETED_TILE", triton.Tile(16, 16, 2**14, 1, 1))
    # Split for no other reason.
    monkeypatch.setattr(triton, "_SPLIT_STEPS", 100)
    depth = 140_000
    weight = draw_weight("int8_dynamic", 2, depth)
    weight.qweight[0], weight.qweight[1] = 127, -128
    weight.scale.fill_(1.0)
    result = product(torch.ones(1, depth), weight)
    assert result.tolist() == [[depth * 127.0, depth * -128.0]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_order_of_the_inputs(scheme: str) -> None:
    options = {"group_size": 32} if scheme in INT4_SCHEMES else {}
    weight = draw_weight(scheme, 9, 150, **options)._replace(input_order=torch.randperm(150))
    x = torch.randn(3, 150)
    check(x, weight, None, product(x, weight))


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_weight_only", "fp8_block"])
def test_shapes_and_strides(scheme: str) -> None:
    weight, bias = draw_weight(scheme, 9, 50), torch.randn(9)
    x = torch.randn(50)
    assert torch.equal(product(x, weight, bias), product(x[None], weight, bias)[0])
    storage = torch.randn(2, 60, 6, 100)
    views = [
        storage[:, 3, :, 1:51],
        storage[0, 10:, :, 7].t(),
        storage[:, 1:3, 1, ::2],
        storage[:1, 0, :1, :50].expand(2, 3, 50),
    ]
    for view in views:
        before = view.clone()
        result = product(view, weight, bias)
        assert result.is_contiguous()
        assert torch.equal(result, product(view.contiguous(), weight, bias))
        assert torch.equal(view, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_dynamic"])
def test_bias(scheme: str, dtype: torch.dtype | None) -> None:
    weight, x = draw_weight(scheme, 9, 50), torch.randn(3, 50)
    bias = None if dtype is None else torch.randn(9).to(dtype)
    check(x, weight, bias, product(x, weight, bias))


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient(scheme: str, dtype: torch.dtype, ordered: bool) -> None:
    options: dict[str, Any] = {"group_size": 32, "symmetric": ordered} if scheme in INT4_SCHEMES else {}
    weight = draw_weight(scheme, 40, 141, **options)
    if ordered:
        weight = weight._replace(input_order=torch.randperm(141))
    x, grad = (torch.randn(2, 3, n).to(dtype) for n in (141, 40))
    leaves = [x.requires_grad_(), torch.randn(40, requires_grad=True)]
    results = torch.autograd.grad(product(leaves[0], weight, leaves[1]), leaves, grad)
    exact = in_float64(weight)
    assert_close_to_reference(results[0], grad.double() @ exact, grad @ exact.to(dtype), "grad of x")
    assert_close_to_reference(results[1], grad.double().sum((0, 1)), grad.float().sum((0, 1)), "grad of bias")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantized_weight(scheme: str) -> None:
    options: dict[str, Any] = {"group_size": 48, "symmetric": False} if scheme in INT4_SCHEMES else {}
    weight = draw_weight(scheme, 135, 291, **options)._replace(input_order=torch.randperm(291))
    _, qweight, scale, zero_point, _, order, *_, number, group = (None, *arguments(torch.empty(0), weight)[1:])
    result = triton_codes.dequantize(qweight, scale, zero_point, order, number, group, 291, torch.float32)
    assert torch.equal(result, weight.dequantize())


@pytest.mark.parametrize("scheme", ["int8_static", "int4_dynamic", "fp8_block"])
def test_opcheck(scheme: str) -> None:
    weight = draw_weight(scheme, 5, 40)._replace(input_order=torch.randperm(40))
    x, bias = torch.randn(2, 3, 40, requires_grad=True), torch.randn(5, requires_grad=True)
    # Not test_aot_dispatch_dynamic, which compares values once more and takes as long as all other tests.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward = arguments(x, weight, bias)
    torch.library.opcheck(triton_forward_op, forward, test_utils=checks)
    backward = (torch.randn(2, 3, 5), *forward[1:4], forward[5], *forward[7:], 40)
    torch.library.opcheck(triton_backward_op, backward, test_utils=checks)


def test_transforms_of_torch_func() -> None:
    weight, bias = draw_weight("int4_dynamic", 5, 40, group_size=16), torch.randn(5)
    x = torch.randn(4, 3, 40)

    def loss(x: Tensor) -> Tensor:
        return product(x, weight, bias).sin().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(x)
    for i in range(4):
        leaf = x[i].clone().requires_grad_()
        torch.testing.assert_close(mapped[i], torch.autograd.grad(loss(leaf), leaf)[0])
    with pytest.raises(NotImplementedError, match=r"quantized_matmul: .* forward-mode"):
        torch.func.jvp(loss, (x[0],), (x[0],))
    leaf = x[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(grad.sum(), leaf)


def test_compile_fullgraph_dynamic() -> None:
    weight = draw_weight("int8_dynamic", 9, 40)
    compiled = torch.compile(lambda x: product(x, weight).sin(), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(rows, 40, requires_grad=True)
        out, right = compiled(x), product(x, weight).sin()
        assert torch.equal(out, right)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, right)))


def test_autocast() -> None:
    weight, x = draw_weight("int8_dynamic", 9, 40), torch.randn(3, 40, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        out = product(x, weight)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out.dtype, grad.dtype) == (torch.float16, torch.float32)
    assert torch.equal(out, product(x.half(), weight))


def test_counts_operations() -> None:
    weight, x = draw_weight("int8_dynamic", 9, 40), torch.randn(2, 3, 40, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        product(x, weight).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 6 * 9 * 40)


def test_refusals() -> None:
    weight, x = draw_weight("int8_dynamic", 9, 40), torch.randn(3, 40)
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*float32, bfloat16 and float16, not torch.float64"):
        product(x.double(), weight)
    automatic = dk.explain(dk.quantized_matmul, x, weight)
    assert automatic.chosen in ("cpu", "reference")
    assert "emulated, which is for tests" in automatic.refusals["triton"]
    with dk.use_backend("triton"):
        assert dk.explain(dk.quantized_matmul, x, weight).chosen == "triton"
    with pytest.raises(IndexError, match=r"out of (bounds|range)"):
        product(x, weight._replace(input_order=torch.full((40,), 40)))
