"""quantized_matmul in Triton: under the interpreter, compiled for GPUs that need not be there, and on one that is."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_window_attention_triton import SHARED_MEMORY, compiles, needs_triton, run_python, stack_bytes
from torch import Tensor

import dskernels as dk
from dskernels.quantized_matmul.activations import quantize_blocks, quantize_rows, quantize_rows_by
from dskernels.quantized_matmul.weight import SCHEMES
from dskernels.testing import assert_close_to_reference

INTEGER_SCHEMES = ("int8_dynamic", "int8_static")
INT4_SCHEMES = ("int4_dynamic", "int4_weight_only")
# The numbers of e4m3, by their bits: sign, four bits of exponent with a bias of 7, three of mantissa, no infinities.
E4M3 = torch.tensor(
    [
        (-1.0) ** (b >> 7)
        * (
            torch.nan
            if b & 127 == 127
            else (b & 7) * 2.0**-9
            if b & 120 == 0
            else (8 + (b & 7)) * 2.0 ** ((b >> 3 & 15) - 10)
        )
        for b in range(256)
    ],
    dtype=torch.float64,
)


def draw_weight(scheme: str, rows: int, columns: int, **options: Any) -> dk.QuantizedWeight:
    """A weight whose channels and groups have scales of their own."""
    if scheme == "int8_static":
        options["input_scale"] = 0.03
    size = torch.rand(rows, 1) * torch.rand(1, columns) + 0.1
    return dk.quantize_weight(torch.randn(rows, columns) * size, scheme, **options)


def in_float64(weight: dk.QuantizedWeight) -> Tensor:
    """The weight that codes stand for, ``[N, K]``, by the formulas of `QuantizedWeight` alone."""
    n, k = torch.arange(weight.out_features)[:, None], torch.arange(weight.in_features)
    if weight.scheme in INT4_SCHEMES:
        codes = (weight.qweight[:, k // 2].int() >> (4 * (k % 2))) & 15
        zero = 8 if weight.zero_point is None else weight.zero_point[:, k // weight.group_size].int()
        result = (codes - zero).double() * weight.scale[:, k // weight.group_size].double()
    elif weight.scheme == "fp8_block":
        result = E4M3[weight.qweight.int()] * weight.scale[n // 128, k // 128].double()
    else:
        result = weight.qweight.double() * weight.scale[:, None].double()
    if weight.input_order is not None:
        result = torch.zeros_like(result).index_copy_(1, weight.input_order, result)
    return result


def rounded(x: Tensor, weight: dk.QuantizedWeight) -> Tensor:
    """What the codes of ``x`` stand for, float64 ``[..., K]``; codes are those of the reference."""
    rows = x.reshape(-1, x.shape[-1]).float()
    if weight.scheme.endswith("weight_only"):
        result = rows.double()
    elif weight.scheme == "fp8_block":
        order = torch.arange(rows.shape[1]) if weight.input_order is None else weight.input_order
        result = torch.zeros_like(rows.double()).index_copy_(1, order, quantize_blocks(rows[:, order]).double())
    elif weight.input_scale is None:
        codes, scale, unlift = quantize_rows(rows)
        result = codes.double() * (scale.double() * unlift.double())[:, None]
    else:
        codes, scale = quantize_rows_by(rows, weight.input_scale)
        result = codes.double() * scale.double()[:, None]
    return result.reshape(x.shape)


def check(x: Tensor, weight: dk.QuantizedWeight, bias: Tensor | None, result: Tensor) -> None:
    """Whether ``result`` is as near to float64 as the reference; of integer schemes, the reference bit for bit."""
    usual = dk.quantized_matmul(x, weight, bias, backend="reference")
    exact = rounded(x, weight) @ in_float64(weight).T
    exact = exact if bias is None else exact + bias.double()
    if weight.scheme in INTEGER_SCHEMES:
        torch.testing.assert_close(result, usual, rtol=0, atol=0, equal_nan=True)
    assert_close_to_reference(result, exact, usual)


@needs_triton
def test_under_the_interpreter() -> None:
    """Every case of quantized_matmul_triton_cases.py; Triton must be told before it is imported."""
    cases = Path(__file__).with_name("quantized_matmul_triton_cases.py")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases), **environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_kernels_are_imported_when_they_run() -> None:
    script = (
        "import sys, torch, dskernels as dk; w = dk.quantize_weight(torch.randn(3, 4), 'int8_dynamic'); "
        "dk.quantized_matmul(torch.randn(2, 4), w); print('dskernels.quantized_matmul.triton' in sys.modules)"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_without_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; import torch, dskernels as dk; "
        "w = dk.quantize_weight(torch.randn(3, 4), 'int8_dynamic'); "
        "print(dk.explain(dk.quantized_matmul, torch.randn(2, 4), w).refusals['triton'])"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "triton is not installed"), done.stderr


@needs_triton
@compiles
def test_refuses_the_cpu_without_the_interpreter() -> None:
    weight = draw_weight("int8_dynamic", 3, 4)
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*only in its interpreter .*TRITON_INTERPRET=1"):
        dk.quantized_matmul(torch.randn(2, 4), weight, backend="triton")


@needs_triton
@compiles
def test_cuts_cover_every_column_once() -> None:
    from dskernels.quantized_matmul.triton import EXACT_COLUMNS, TILES, cut_for

    for _ in range(500):
        rows, columns, depth = (int(2 ** random.uniform(0, most)) for most in (12, 14, 19))
        operands, group = random.choice(list(TILES)), random.choice([16, 32, 48, 128, 1024, depth])
        cut = cut_for(operands, rows, columns, depth, group, random.choice([1, 46, 108, 132]))
        assert cut.tile.depth >= 32
        assert cut.steps_of_group * cut.tile.depth >= group
        assert (cut.steps_of_group - 1) * cut.tile.depth < group
        assert cut.groups * group >= depth > (cut.groups - 1) * group
        assert cut.splits * cut.steps_of_split >= cut.steps > (cut.splits - 1) * cut.steps_of_split
        assert cut.steps_of_split * cut.tile.depth <= EXACT_COLUMNS


@needs_triton
@compiles
def test_splits_fill_the_gpu_and_no_more() -> None:
    from dskernels.quantized_matmul.triton import cut_for, split_count

    assert cut_for("int8", 1, 4096, 4096, 4096, 108).splits == 3  # 64 tiles of 32 steps
    assert cut_for("int8", 2048, 4096, 4096, 4096, 108).splits == 1
    assert cut_for("half", 16, 64, 4096, 128, 108).splits == 8  # 32 steps, four of which are worth a split
    assert cut_for("int8", 4096, 4096, 140_000, 140_000, 108).splits == 2  # 140,000 products are beyond int32
    assert split_count(tiles=1, steps=3, depth=64, processors=108) == 1
    assert split_count(tiles=1, steps=0, depth=64, processors=108) == 1


ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8"}
POINTERS = {
    **dict.fromkeys(("row_scale", "unlift", "channel_scale", "bias", "scale", "input_scale", "block_scale"), "*fp32"),
    **dict.fromkeys(("x_scale",), "*fp32"),
    "input_order": "*i64",
}
# What multiples of 16 make of addresses is what vectors, and copies past the registers, can be loaded by.
ALIGNED = ("depth", "width", "columns", "x_stride", "group_size")


def compile_for(kernel: Any, architecture: int, types: dict, constants: dict, **options: Any) -> Any:
    """A kernel as Triton's compiler takes it without a GPU; arguments are None where ``types`` say so, else numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = types.get(name, POINTERS.get(name, "i32"))
        if name.isupper() or kind in (None, 1):
            signature[name], values[index,] = "constexpr", constants.get(name, kind)
            continue
        signature[name] = kind
        if kind.startswith("*") or name in ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    options["enable_fp_fusion"] = False
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


# Operands, their dtype, whether codes are of four bits, and whether these have zero points.
COMPILED = [
    ("int8", torch.int8, False, False),
    ("int4", torch.int8, True, True),
    ("half", torch.bfloat16, False, False),
    ("half", torch.float16, True, False),
    ("half", torch.bfloat16, True, True),
    ("float", torch.float32, True, True),
    ("fp8", torch.float16, False, False),
]


@needs_triton
@compiles
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("operands", "dtype", "is_int4", "has_zeros"), COMPILED, ids=str)
def test_products_compile_and_fit(
    operands: str, dtype: torch.dtype, is_int4: bool, has_zeros: bool, architecture: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.quantized_matmul import triton as kernels

    is_fp8, is_int8 = operands == "fp8", operands == "int8"
    absent = {"zero_point": "*u8" if has_zeros else None, "x_scale": "*fp32" if is_fp8 else None}
    if dtype != torch.int8:
        absent |= {"row_scale": None, "unlift": None}
    if is_int4 or is_fp8:
        absent["channel_scale"] = None
    types = {"x": ELEMENTS[dtype], "qweight": "*u8" if is_int4 or is_fp8 else "*i8", "x_column_stride": 1, **absent}
    for most, tile in list(kernels.TILES[operands].items())[0 if architecture == 80 else -1 :]:
        # Few rows are split, many are not.
        whole = most > 16
        types["out"] = "*fp16" if whole else "*i32" if is_int8 else "*fp32"
        constants = {"INT4": is_int4, "FP8": is_fp8, "REGULAR": True, "WHOLE": whole}
        constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        compiled = compile_for(kernels._quantized_matmul_kernel, architecture, types, constants, **options)
        assert compiled.metadata.shared <= SHARED_MEMORY[80]
        if architecture == 80:
            assert stack_bytes(compiled, tmp_path) == 0
        ptx = compiled.asm["ptx"]
        # On tensor cores in the type of the codes, but for float32, which keeps its digits: no tf32.
        product = {torch.int8: r"s32\.s8\.s8", torch.float16: r"f32\.f16\.f16", torch.bfloat16: r"f32\.bf16\.bf16"}
        assert bool(re.search(r"mma.*" + product.get(dtype, "."), ptx)) == (dtype != torch.float32)
        # Weights stream past the registers, eight bytes at a time or more.
        assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+),", ptx)) <= {"0x8", "0x10"}
        assert "cp.async" in ptx


@needs_triton
@compiles
@pytest.mark.parametrize(("operands", "dtype", "is_int4", "has_zeros"), COMPILED, ids=str)
def test_products_of_one_by_one_compile(
    operands: str, dtype: torch.dtype, is_int4: bool, has_zeros: bool, tmp_path, monkeypatch
) -> None:
    """Numbers that are 1 are constants to Triton, which has fewer operations for these than for tensors."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.quantized_matmul import triton as kernels

    kernel, numbers = kernels._quantized_matmul_kernel, ("rows", "steps_of_split", "splits", "tiles")
    types = {name: 1 for name in kernel.arg_names if name not in numbers and name not in POINTERS}
    types |= {"x": ELEMENTS[dtype], "qweight": "*u8" if is_int4 or operands == "fp8" else "*i8", "out": "*fp32"}
    types |= {"zero_point": "*u8" if has_zeros else None, "bias": "*fp64"}
    constants = {"INT4": is_int4, "FP8": operands == "fp8", "REGULAR": not has_zeros, "WHOLE": True}
    constants |= {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}
    assert compile_for(kernel, 80, types, constants).asm["cubin"]


@needs_triton
@compiles
@pytest.mark.parametrize("architecture", [80, 90])
def test_small_kernels_compile_and_fit(architecture: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.quantized_matmul import triton as kernels
    from dskernels.quantized_matmul import triton_codes as codes

    activations = {"x": "*bf16", "x_column_stride": 1}
    rows, blocks = codes._quantize_rows_kernel, codes._quantize_blocks_kernel
    by_row = {**activations, "codes": "*i8", "input_scale": None}
    static = {**activations, "codes": "*i8", "unlift": None}
    sources: list[tuple] = [
        (rows, by_row, {"BLOCK": codes._ROW_BLOCK}),
        (rows, static, {"BLOCK": codes._ROW_BLOCK}),
        (blocks, {**activations, "codes": "*fp16"}, {"SIZE": 128, "BLOCKS": codes._FP8_BLOCKS}),
    ]
    for parts in ("*i32", "*fp32"):
        types = {"parts": parts, "out": "*bf16"}
        sources.append((kernels._quantized_matmul_join_kernel, types, {"BLOCK_N": kernels._JOINED_COLUMNS}))
    block = dict(zip(("BLOCK_N", "BLOCK_K"), codes._DEQUANTIZED, strict=True))
    for qweight, int4, fp8 in (("*i8", False, False), ("*u8", True, False), ("*u8", False, True)):
        types = {"qweight": qweight, "zero_point": "*u8", "weight": "*bf16"}
        constants = {"INT4": int4, "FP8": fp8, "SCALE_ROWS": 128 if fp8 else 1, **block}
        sources.append((codes._dequantize_kernel, types, constants))
    for kernel, types, constants in sources:
        compiled = compile_for(kernel, architecture, types, constants)
        assert stack_bytes(compiled, tmp_path) == 0
        # Codes are of quotients as IEEE has them, and what is to be rounded twice is not rounded once.
        assert "div.full" not in compiled.asm["ptx"]
        assert "fma.rn.f32" not in compiled.asm["ptx"]


def on_gpu(weight: dk.QuantizedWeight) -> dk.QuantizedWeight:
    return dk.QuantizedWeight(*(x.cuda() if isinstance(x, Tensor) else x for x in weight))


GPU_SHAPES = [(1, 65, 33), (5, 200, 577), (17, 130, 1024), (64, 256, 4096), (300, 129, 512)]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu(scheme: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    options = {"group_size": 48, "symmetric": False} if scheme in INT4_SCHEMES else {}
    weight = draw_weight(scheme, columns, depth, **options)._replace(input_order=torch.randperm(depth))
    x, bias = torch.randn(rows, depth).to(dtype), torch.randn(columns)
    arguments = (x.cuda(), on_gpu(weight), bias.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = dk.quantized_matmul(*arguments, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(x, weight, bias, result.cpu())


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("group_size", [16, 32, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", INT4_SCHEMES)
def test_groups_on_a_gpu(scheme: str, dtype: torch.dtype, group_size: int) -> None:
    weight, x = draw_weight(scheme, 70, 1001, group_size=group_size), torch.randn(33, 1001).to(dtype)
    check(x, weight, None, dk.quantized_matmul(x.cuda(), on_gpu(weight), backend="triton").cpu())


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("scheme", INTEGER_SCHEMES)
def test_rows_are_exact_and_alone_on_a_gpu(scheme: str) -> None:
    depth = 140_000
    weight, x = draw_weight(scheme, 70, depth), torch.randn(200, depth) * torch.rand(200, 1)
    weight.qweight[0], x[0] = -127, -3.81
    result = dk.quantized_matmul(x.cuda(), on_gpu(weight), backend="triton").cpu()
    assert torch.equal(result, dk.quantized_matmul(x, weight, backend="reference"))
    for row in (0, 1, 117):
        alone = dk.quantized_matmul(x[row].cuda(), on_gpu(weight), backend="triton").cpu()
        assert torch.equal(alone, result[row])


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_on_a_gpu(scheme: str, dtype: torch.dtype) -> None:
    # torch asks for CUBLAS_WORKSPACE_CONFIG before it takes products in deterministic mode.
    torch.use_deterministic_algorithms(False)
    weight = draw_weight(scheme, 200, 150)._replace(input_order=torch.randperm(150))
    x, grad = (torch.randn(2, 9, n).to(dtype) for n in (150, 200))
    leaf = x.cuda().requires_grad_()
    out = dk.quantized_matmul(leaf, on_gpu(weight), backend="triton")
    (result,) = torch.autograd.grad(out, leaf, grad.cuda())
    exact = in_float64(weight)
    assert_close_to_reference(result.cpu(), grad.double() @ exact, grad @ exact.to(dtype))


@pytest.mark.gpu
@needs_triton
def test_compiled_on_a_gpu() -> None:
    torch.use_deterministic_algorithms(False)
    weight = on_gpu(draw_weight("int4_dynamic", 96, 256, group_size=32))
    compiled = torch.compile(lambda x: dk.quantized_matmul(x, weight).sin(), fullgraph=True, dynamic=True)
    for rows in (3, 40):
        x = torch.randn(rows, 256, device="cuda", requires_grad=True)
        out, right = compiled(x), dk.quantized_matmul(x, weight).sin()
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, right)))
