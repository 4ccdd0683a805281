"""The CUDA kernels of quantized_matmul where sums are of floats: edges of tiles, stages and splits, codes, order.

Emulated on the CPU (tests/shared/emulator.py), and with ``-m gpu`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulator
import numpy as np
import pytest
import torch
from quantized_matmul_oracle import CASES, E4M3, Case, Expected, draw_rows, draw_weight, raw_weight
from test_quantized_matmul_triton import GPU_SHAPES, check, in_float64, on_gpu
from torch import Tensor

import dskernels as dk
from dskernels.quantized_matmul.cuda_schema import cuda_backward_op
from dskernels.quantized_matmul.weight import SCHEMES
from dskernels.testing import assert_close_to_reference

FLOATS = {name: case for name, case in CASES.items() if not case.is_integer}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Columns of a stage: 64 bytes of a row of the weight. A split has four stages at least.
STAGE = {"int8_weight_only": 64, "int4_weight_only": 128, "fp8_block": 64}
# Rows up to which sums are taken in the same order.
FEW_ROWS = 128


@pytest.fixture
def emulated() -> Iterator[None]:
    missing = emulator.why_not()
    if missing is not None:
        pytest.skip(missing)
    emulator.configure()
    yield
    emulator.configure()


def product(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return dk.quantized_matmul(x, weight, bias, backend="cuda")


def gradient(grad: Tensor, weight: dk.QuantizedWeight) -> Tensor:
    number = SCHEMES.index(weight.scheme)
    of_weight = (weight.qweight, weight.scale, weight.zero_point, weight.input_order)
    return cuda_backward_op(grad, *of_weight, number, weight.group_size, weight.in_features)


def ragged_sizes(scheme: str) -> list[tuple[int, int, int]]:
    """Rows, columns and depths around the edges of tiles (16, 64; 128), stages and splits."""
    stage = STAGE[scheme]
    depths = (1, stage - 1, stage, stage + 1, 4 * stage, 8 * stage - 16, 8 * stage, 8 * stage + 1, 13 * stage + 5)
    rows, columns = (1, 15, 16, 17, 33, 63, 64, 65, 128), (1, 8, 127, 128, 129, 31, 33, 257, 3)
    return list(zip(rows, columns, depths, strict=True))


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", FLOATS)
def test_edges_of_tiles_and_splits(name: str, turn: int, emulated: None) -> None:
    sizes = ragged_sizes(FLOATS[name].scheme)
    for i, (rows, columns, _) in enumerate(sizes):
        depth, dtype = sizes[(i + 3 * turn) % len(sizes)][2], DTYPES[(i + turn) % 3]
        weight, x, bias = draw_weight(FLOATS[name], columns, depth), draw_rows(rows, depth, dtype=dtype), None
        if i % 2:
            bias = torch.randn(columns)
        Expected(x, weight, bias).check(product(x, weight, bias))


@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("name", FLOATS)
def test_threads_and_copies_in_any_order(name: str, order: str, copies: str, emulated: None) -> None:
    case = FLOATS[name]._replace(group=48)
    weight = draw_weight(case, 130, 9 * STAGE[case.scheme])._replace(input_order=None)
    for rows, dtype in ((3, torch.float16), (20, torch.float32), (66, torch.bfloat16)):
        x = draw_rows(rows, weight.in_features, dtype=dtype)
        emulator.configure()
        usual = product(x, weight)
        emulator.configure(order, copies, seed=rows)
        assert torch.equal(product(x, weight), usual)
        Expected(x, weight).check(usual)


@pytest.mark.parametrize("name", FLOATS)
def test_few_rows_have_the_bits_of_one(name: str, emulated: None) -> None:
    for dtype, split in zip(DTYPES, (3, 9, 20), strict=True):
        weight = draw_weight(FLOATS[name], 37, split * STAGE[FLOATS[name].scheme] + 8)
        x = draw_rows(FEW_ROWS, weight.in_features, dtype=dtype)
        whole = product(x, weight)
        for rows in (1, 16, 17, 64, 65):
            assert torch.equal(product(x[:rows], weight), whole[:rows])
        assert torch.equal(product(x[77], weight), whole[77])


def test_many_rows_of_fp8_have_the_same_bits(emulated: None) -> None:
    weight, x = draw_weight(FLOATS["fp8_block"], 9, 600), draw_rows(FEW_ROWS + 70, 600)
    whole = product(x, weight)
    Expected(x, weight).check(whole)
    assert torch.equal(product(x[: FEW_ROWS + 1], weight), whole[: FEW_ROWS + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in FLOATS if name != "fp8_block"])
def test_many_rows_go_to_torch(name: str, dtype: torch.dtype, emulated: None) -> None:
    """With the weight in floats, and what is not finite in its own row."""
    weight, bias = draw_weight(FLOATS[name], 21, 100)._replace(input_order=torch.randperm(100)), torch.randn(21)
    x = draw_rows(FEW_ROWS + 1, 100, dtype=dtype)
    result = product(x, weight, bias)
    assert torch.equal(result, torch.nn.functional.linear(x, weight.dequantize(dtype), bias.to(dtype)))
    Expected(x, weight, bias).check(result)
    x[5, 7] = torch.nan
    assert not product(x, weight, bias)[5].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [16, 32, 48, 80, 112, 144, 1008, -1])
def test_groups_end_anywhere(group: int, dtype: torch.dtype, emulated: None) -> None:
    """Amid units of 32 columns, stages and splits; with every byte as a code of zero, as other programs have them."""
    for columns in (97, 1040, 1100):
        weight = draw_weight(Case("int4_weight_only", group), 33, columns)
        zeros = torch.randint(0, 256, weight.scale.shape, dtype=torch.uint8)
        # Small enough for sums of 255 times as many to be float16.
        weight = weight._replace(zero_point=zeros, scale=weight.scale / 64)
        for rows in (2, 18):
            x = draw_rows(rows, columns, dtype=dtype)
            Expected(x, weight).check(product(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_every_code(name: str, dtype: torch.dtype, emulated: None) -> None:
    """Each in every place of a unit, by one column of x at a time; NaN among those of fp8."""
    case = FLOATS[name]
    codes = {"fp8_block": range(256), "int8_weight_only": range(-128, 128)}.get(case.scheme, range(16))
    values = np.array(codes)
    matrix = np.broadcast_to(values[:, None], (len(values), 70))
    zeros = torch.full((len(values), 3), 5, dtype=torch.uint8) if not case.symmetric else None
    weight = raw_weight(case, matrix, 0.25, **({} if zeros is None else {"zero_point": zeros}))
    exact = values - (8 if case.symmetric else 5) if case.is_int4 else E4M3 if name == "fp8_block" else values
    exact = 0.25 * torch.from_numpy(exact).double().expand(70, -1)
    assert_same(weight.dequantize(dtype).T, exact.to(dtype))
    # Such that the scale of a block of activations is 1.
    size = 448.0 if name == "fp8_block" else 1.0
    assert_same(product((size * torch.eye(70)).to(dtype), weight), (size * exact).to(dtype))
    dirty = exact.isnan().any(0)
    clean = weight._replace(qweight=weight.qweight.clone())
    clean.qweight[dirty] = 0
    assert_same(gradient(torch.eye(len(values), dtype=dtype), clean), clean.dequantize(dtype))
    for code in dirty.nonzero():
        one = weight._replace(qweight=weight.qweight[code], scale=weight.scale[:1])
        assert gradient(torch.ones(1, 1, dtype=dtype), one).isnan().all()


def assert_same(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_activations_are_rounded_to_e4m3(emulated: None) -> None:
    """Through a weight of ones on the diagonal: numbers of e4m3, what lies amid two of them, and both neighbours."""
    numbers = torch.from_numpy(E4M3[:127]).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(500.0)), numbers]
    rows = torch.zeros(8, 128)
    for i, values in enumerate(near):
        rows[i, 1 : 1 + len(values)], rows[i, 0] = values[:127], 448.0
        rows[4 + i] = -rows[i] * 1.7
    codes = np.zeros((128, 128), np.int64)
    np.fill_diagonal(codes, 56)
    weight = raw_weight(Case("fp8_block"), codes)
    assert torch.equal(product(rows, weight), dk.round_activations(rows, "fp8_block"))


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_weight_in_floats(name: str, dtype: torch.dtype, ordered: bool, emulated: None) -> None:
    """Of every scheme, bit for bit: a product of one with the weight is the weight."""
    for rows, columns in ((1, 1), (130, 37), (5, 288), (3, 152), (2, 260)):
        weight = draw_weight(CASES[name], rows, columns)
        if ordered:
            weight = weight._replace(input_order=torch.randperm(columns))
        weight.scale[-1] *= 1e-5
        result = gradient(torch.eye(rows, dtype=dtype), weight)
        assert torch.equal(result, weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_an_order_that_leads_nowhere(name: str, dtype: torch.dtype, emulated: None) -> None:
    """Nobody can look at it on a GPU without waiting: what it names is NaN, and nothing else is read or written."""
    weight, x = draw_weight(FLOATS[name], 9, 100), draw_rows(3, 100, dtype=dtype)
    order = torch.randperm(100)
    for wrong in (-1, 100, 2**40):
        order[17] = wrong
        assert product(x, weight._replace(input_order=order)).isnan().all()
        assert gradient(torch.randn(3, 9).to(dtype), weight._replace(input_order=order)).shape == (3, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_codes_and_rows_at_the_ends_of_the_range(name: str, dtype: torch.dtype, emulated: None) -> None:
    """Codes that are large where scales are small, or scales where x is: no sum leaves the range on its way."""
    for size, scale in ((2e38, 1e-8), (1e-36, 1e3), (1e-30, 2.0**118), (1e-37, 1.0)):
        weight = draw_weight(FLOATS[name], 20, 300)
        if name == "fp8_block":
            scale = min(scale, 2.0**110)
        weight.scale[:] = torch.rand_like(weight.scale) * scale
        x = (torch.rand(18, 300) - 0.5).mul(size).to(dtype)
        Expected(x, weight).check(product(x, weight))


GPU_KERNELS = [pytest.param(kernel, marks=pytest.mark.gpu) for kernel in ("cuda", "triton")]


def by(kernel: str, *arguments: Any) -> Tensor:
    return dk.quantized_matmul(*(x.cuda() if isinstance(x, Tensor) else x for x in arguments), backend=kernel).cpu()


@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_on_a_gpu(name: str, shape: tuple[int, int, int], dtype: torch.dtype, kernel: str) -> None:
    rows, columns, depth = shape
    weight = draw_weight(FLOATS[name]._replace(group=48), columns, depth)._replace(input_order=torch.randperm(depth))
    x, bias = draw_rows(rows, depth, dtype=dtype), torch.randn(columns)
    check(x, weight, bias, by(kernel, x, on_gpu(weight), bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_few_rows_have_the_bits_of_one_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    weight = on_gpu(draw_weight(FLOATS[name], 300, 4096))
    x = draw_rows(FEW_ROWS, 4096, dtype=dtype).cuda()
    whole = product(x, weight)
    for rows in (1, 16, 17, 64, 65):
        assert torch.equal(product(x[:rows], weight), whole[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_gradient_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    # torch asks for CUBLAS_WORKSPACE_CONFIG before it takes products in deterministic mode.
    torch.use_deterministic_algorithms(False)
    weight, grad = draw_weight(FLOATS[name], 200, 150), torch.randn(18, 200).to(dtype)
    exact = in_float64(weight)
    result = gradient(grad.cuda(), on_gpu(weight)).cpu()
    assert_close_to_reference(result, grad.double() @ exact, grad @ exact.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLOATS)
def test_graph_replays_on_a_gpu(name: str) -> None:
    weight = on_gpu(draw_weight(FLOATS[name], 200, 2048))
    x = draw_rows(5, 2048, dtype=torch.bfloat16).cuda()
    product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x, weight)
    for _ in range(2):
        x.copy_(draw_rows(5, 2048))
        graph.replay()
        assert torch.equal(out, product(x, weight))
