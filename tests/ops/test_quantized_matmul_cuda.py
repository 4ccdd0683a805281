"""The CUDA kernels of quantized_matmul where sums are of integers: edges of tiles, segments, runs of groups, order.

Emulated on the CPU (tests/shared/emulator.py), and with ``-m gpu`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from quantized_matmul_oracle import CASES, Case, Expected, draw_rows, draw_weight, raw_weight
from test_quantized_matmul_triton import GPU_SHAPES, on_gpu
from torch import Tensor

import dskernels as dk
from dskernels.quantized_matmul import activations
from dskernels.quantized_matmul.cuda_schema import cuda_backward_op, cuda_forward_op
from dskernels.quantized_matmul.weight import SCHEMES

INTEGERS = {name: case for name, case in CASES.items() if case.is_integer}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The last number of rows of a tile and the first of the next: tiles have 16, 64 or 128.
ROWS = (1, 16, 17, 64, 65, 128, 129)


@pytest.fixture
def emulated() -> Iterator[None]:
    missing = emulator.why_not()
    if missing is not None:
        pytest.skip(missing)
    emulator.load()
    yield
    emulator.configure()


def product(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return dk.quantized_matmul(x, weight, bias, backend="cuda")


def check(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    result = product(x, weight, bias)
    Expected(x, weight, bias).check(result)
    return result


def arguments(x: Tensor, weight: dk.QuantizedWeight, **changes: Any) -> tuple:
    """Those of the operator."""
    number, group = SCHEMES.index(weight.scheme), weight.group_size
    weight = weight._replace(**changes)
    fields = weight.qweight, weight.scale, weight.zero_point, weight.input_scale, weight.input_order
    return (x, *fields, None, number, group)


@pytest.mark.parametrize("out_features", [1, 8, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("name", INTEGERS)
def test_edges_of_tiles(name: str, out_features: int, emulated: None) -> None:
    """All rows in one call are right, and any number of them gives the same bits."""
    for columns in (16, 160, 272):
        weight, bias = draw_weight(INTEGERS[name], out_features, columns), torch.randn(out_features)
        x = draw_rows(max(ROWS), columns)
        whole = check(x, weight, bias)
        for rows in ROWS[:-1]:
            assert torch.equal(product(x[:rows], weight, bias), whole[:rows])


@pytest.mark.parametrize("columns", [511, 512, 513, 768, 1024, 1040, 1537, 2048])
@pytest.mark.parametrize("name", INTEGERS)
def test_segments(name: str, columns: int, emulated: None) -> None:
    """Some of 512 columns, some of 768, and a last one that is short."""
    weight, x = draw_weight(INTEGERS[name], 67, columns), draw_rows(66, columns)
    whole = check(x, weight)
    for rows in (1, 17):
        assert torch.equal(product(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("name", ["int8_dynamic", "int4_dynamic_asymmetric"])
def test_segments_of_more_tiles_than_are_split(name: str, emulated: None) -> None:
    """Then a block takes all segments of a tile, one after the other: three here."""
    weight, rows = draw_weight(INTEGERS[name], 6, 1300), draw_rows(7, 1300)
    # 133 tiles of 64 rows.
    many = rows.repeat(1210, 1)
    result = product(many, weight)
    expected = check(rows, weight)
    assert torch.equal(result, expected.repeat(1210, 1))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [16, 32, 48, 80, 96, 112, 128, 240, 256, 272, 512, 528, 1008, 1024, -1])
def test_runs_of_groups(group: int, symmetric: bool, emulated: None) -> None:
    """Groups that end within the 32 columns of a product, within a step, and beyond the 256 of a run."""
    for columns in (15, 33, 1057, 1312):
        weight = draw_weight(Case("int4_dynamic", group, symmetric), 11, columns)
        x = draw_rows(18, columns)
        whole = check(x, weight)
        assert torch.equal(product(x[:3], weight), whole[:3])


@pytest.mark.parametrize("zero", [None, 0, 7, 15, 16, 255])
@pytest.mark.parametrize("code", [0, 15])
def test_the_largest_sums_of_a_run(code: int, zero: int | None, emulated: None) -> None:
    """Exact in the float whose bits they are added to, whatever byte a zero point is."""
    for group in (256, 1024, -1):
        weight = raw_weight(Case("int4_dynamic", group), np.full((9, 256), code))
        if zero is not None:
            weight = weight._replace(zero_point=torch.full_like(weight.scale, zero, dtype=torch.uint8))
        x = 127 * torch.tensor([[1.0], [-1.0]]).expand(2, 256)
        exact = 127 * 256 * (code - (8 if zero is None else zero))
        assert torch.equal(product(x, weight), torch.tensor([[1.0], [-1.0]]).expand(2, 9) * exact)


def test_padding_of_odd_rows_counts_for_nothing(emulated: None) -> None:
    weight, x = draw_weight(CASES["int4_dynamic"], 9, 45), draw_rows(3, 45)
    before = product(x, weight)
    weight.qweight[:, -1] |= 0xF0
    assert torch.equal(product(x, weight), before)


@pytest.mark.parametrize("row", [-127, 127])
def test_sums_beyond_int32(row: int, emulated: None) -> None:
    columns = 300_000
    weight = raw_weight(Case("int8_dynamic"), np.full((3, columns), -128))
    for rows in (1, 17):
        result = product(torch.full((rows, columns), float(row)), weight)
        assert torch.equal(result, torch.full((rows, 3), float(row * -128 * columns)))


@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("name", INTEGERS)
def test_any_order_of_threads_and_copies(name: str, order: str, copies: str, emulated: None) -> None:
    for rows, out_features, columns in ((1, 70, 1300), (33, 70, 1100), (129, 130, 160), (5, 9, 100)):
        weight, bias = draw_weight(INTEGERS[name], out_features, columns), torch.randn(out_features)
        x = draw_rows(rows, columns)
        emulator.configure()
        expected = check(x, weight, bias)
        emulator.configure(order, copies, seed=rows, multiprocessors=rows)
        assert torch.equal(product(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 100, 4100])
def test_codes_are_those_of_the_reference(columns: int, dtype: torch.dtype, emulated: None) -> None:
    """Read off by columns of a weight that are 1, one at a time, over all sizes of rows."""
    sizes = 10.0 ** torch.tensor([-38, -30, -19, -18, -12, -5, 0, 3, 4, 17, 18, 19, 30, 37])
    x = (torch.randn(14, columns) * sizes[:, None]).to(dtype)
    x = torch.cat((x[x.isfinite().all(1)], torch.arange(-columns, columns).view(2, -1).to(dtype) / 2))
    places = torch.randint(columns, (min(columns, 40),)).unique()
    one = np.zeros((len(places), columns), np.int8)
    one[np.arange(len(places)), places.numpy()] = 1
    codes, scale, unlift = activations.quantize_rows(x.float())
    expected = codes[:, places].float() * scale[:, None] * unlift[:, None]
    assert torch.equal(product(x, raw_weight(Case("int8_dynamic"), one)), expected.to(dtype))
    nibbles = raw_weight(Case("int4_dynamic", -1), one + 8)
    assert torch.equal(product(x, nibbles), expected.to(dtype))
    for step in (0.5, 0.37, 1e-30, 1e30):
        codes, scale = activations.quantize_rows_by(x.float(), torch.tensor(step))
        result = product(x, raw_weight(Case("int8_static"), one, input_scale=torch.tensor(step)))
        assert torch.equal(result, (codes[:, places].float() * scale[:, None]).to(dtype))


@pytest.mark.parametrize("name", INTEGERS)
def test_an_order_out_of_bounds_is_not_a_number(name: str, emulated: None) -> None:
    """A look at its values would wait for the GPU; reading stays within the row."""
    weight, x = draw_weight(INTEGERS[name], 9, 40), draw_rows(3, 40)
    for wrong in (40, 10**9, -1, -(10**12)):
        order = torch.arange(40).index_fill(0, torch.tensor([7]), wrong)
        assert product(x, weight._replace(input_order=order)).isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": torch.zeros(9, 39, dtype=torch.int8)}, "qweight: expected contiguous int8"),
        ({"qweight": torch.zeros(9, 40, dtype=torch.uint8)}, "qweight: expected contiguous int8"),
        ({"scale": torch.ones(8)}, "scale: expected contiguous float32, one for each group"),
        ({"scale": torch.ones(9).half()}, "scale: expected contiguous float32, one for each group"),
        ({"zero_point": torch.zeros(9, dtype=torch.uint8)}, "zero_point: expected contiguous uint8"),
        ({"input_scale": torch.ones(())}, "input_scale: expected a float32 scalar for int8_static, and only for it"),
        ({"input_order": torch.arange(39)}, r"input_order: expected contiguous int64 \[K\]"),
    ],
)
def test_what_the_operators_refuse(changes: dict, message: str, emulated: None) -> None:
    weight, x = draw_weight(CASES["int8_dynamic"], 9, 40), draw_rows(3, 40)
    call = arguments(x, weight, **changes)
    with pytest.raises(RuntimeError, match=message):
        cuda_forward_op(*call)
    if "input_scale" not in changes:
        grad, (_, qweight, scale, zero_point, _, order, *_) = torch.randn(3, 9), call
        with pytest.raises(RuntimeError, match=message):
            cuda_backward_op(grad, qweight, scale, zero_point, order, 0, 40, 40)


def test_what_else_the_operators_refuse(emulated: None) -> None:
    weight, x = draw_weight(CASES["int8_dynamic"], 9, 40), draw_rows(3, 40)
    call = arguments(x, weight)
    for wrong in (-1, 6):
        with pytest.raises(RuntimeError, match=f"scheme: expected 0 to 5, got {wrong}"):
            cuda_forward_op(*call[:7], wrong, 40)
    with pytest.raises(RuntimeError, match=r"bias: expected \[N\]"):
        cuda_forward_op(*call[:6], torch.randn(8), *call[7:])
    with pytest.raises(RuntimeError, match="x: expected float32, bfloat16 or float16"):
        cuda_forward_op(x.double(), *call[1:])
    with pytest.raises(RuntimeError, match=r"expected grad \[..., N\]"):
        cuda_backward_op(torch.randn(3, 8), weight.qweight, weight.scale, None, None, 0, 40, 40)
    int4 = draw_weight(CASES["int4_dynamic"], 9, 40)
    with pytest.raises(RuntimeError, match="group_size: expected a multiple of 16, got 20"):
        cuda_forward_op(*arguments(x, int4)[:-1], 20)


def test_a_gradient_under_autocast_keeps_its_precision(emulated: None) -> None:
    weight, grad = draw_weight(CASES["int8_dynamic"], 9, 40), torch.randn(3, 9)
    call = grad, weight.qweight, weight.scale, None, None, 0, 40, 40
    with torch.autocast("cpu", torch.bfloat16):
        result = cuda_backward_op(*call)
    assert torch.equal(result, cuda_backward_op(*call))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*GPU_SHAPES, (16, 4096, 4096), (129, 1000, 4096)], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_on_a_gpu(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    weight = draw_weight(INTEGERS[name], columns, depth)._replace(input_order=torch.randperm(depth))
    x, bias = draw_rows(rows, depth, dtype=dtype), torch.randn(columns)
    call = (x.cuda(), on_gpu(weight), bias.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = product(*call)
        again = product(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    Expected(x, weight, bias).check(result.cpu())
    assert torch.equal(result, again)


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [16, 48, 128, 528, -1])
def test_groups_on_a_gpu(group: int, symmetric: bool) -> None:
    weight, x = draw_weight(Case("int4_dynamic", group, symmetric), 70, 1312), draw_rows(129, 1312)
    Expected(x, weight).check(product(x.cuda(), on_gpu(weight)).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", INTEGERS)
def test_a_row_alone_on_a_gpu(name: str) -> None:
    """In every number of rows, and as emulated: bits do not change with the machine."""
    weight, x = draw_weight(INTEGERS[name], 200, 4096), draw_rows(300, 4096)
    whole = product(x.cuda(), on_gpu(weight)).cpu()
    for rows in ROWS:
        assert torch.equal(product(x[:rows].cuda(), on_gpu(weight)).cpu(), whole[:rows])
    if emulator.why_not() is None:
        emulator.load()
        assert torch.equal(product(x[:17], weight), whole[:17])


@pytest.mark.gpu
def test_sums_beyond_int32_of_wide_weights_on_a_gpu() -> None:
    """Tiles enough to leave sums in one piece, were they not too long for it."""
    columns, out_features = 140_000, 17_000
    qweight = torch.full((out_features, columns), -128, dtype=torch.int8, device="cuda")
    weight = dk.QuantizedWeight("int8_dynamic", qweight, torch.ones(out_features, device="cuda"), columns, columns)
    for rows in (1, 200):
        result = product(torch.full((rows, columns), 127.0, device="cuda"), weight)
        assert (result == float(127 * -128 * columns)).all()


@pytest.mark.gpu
def test_tensors_of_another_device() -> None:
    weight, x = draw_weight(CASES["int8_dynamic"], 9, 40), torch.randn(3, 40).cuda()
    moved = on_gpu(weight)
    for name in ("qweight", "scale"):
        with pytest.raises(RuntimeError, match=f"{name}: expected a tensor on the device of the first argument"):
            cuda_forward_op(*arguments(x, moved._replace(**{name: getattr(weight, name)})))


@pytest.mark.gpu
@pytest.mark.parametrize("name", INTEGERS)
def test_in_a_graph(name: str) -> None:
    weight, x = draw_weight(INTEGERS[name], 200, 4096), draw_rows(5, 4096)
    static, graph, moved = torch.zeros_like(x).cuda(), torch.cuda.CUDAGraph(), on_gpu(weight)
    product(static, moved)
    with torch.cuda.graph(graph):
        result = product(static, moved)
    for _ in range(2):
        static.copy_(x)
        graph.replay()
        assert torch.equal(result, product(x.cuda(), moved))
