"""swin_attention in Triton: under the interpreter, compiled for GPUs that need not be there, and on one that is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from swin_attention_triton_oracle import GPU_CASES, HALF, Case, Rope, attend, check, with_gradients
from test_window_attention_triton import SHARED_MEMORY, compiles, needs_triton, run_python, stack_bytes

import dskernels as dk


@needs_triton
def test_under_the_interpreter() -> None:
    """Every case of swin_attention_triton_cases.py; Triton must be told before it is imported."""
    cases = Path(__file__).with_name("swin_attention_triton_cases.py")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases), **environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_kernels_are_imported_when_they_run() -> None:
    script = (
        "import sys, torch, dskernels as dk; dk.swin_attention(torch.randn(1, 4, 4, 24), window_size=2, num_heads=1); "
        "print('dskernels.swin_attention.triton' in sys.modules)"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_without_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; import torch, dskernels as dk; qkv = torch.randn(1, 4, 4, 24); "
        "print(dk.explain(dk.swin_attention, qkv, window_size=2, num_heads=1).refusals['triton'])"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "triton is not installed"), done.stderr


@needs_triton
@compiles
def test_refuses_the_cpu_without_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*only in its interpreter .*TRITON_INTERPRET=1"):
        dk.swin_attention(torch.randn(1, 4, 4, 24), window_size=2, num_heads=1, backend="triton")


@needs_triton
@compiles
def test_every_window_and_head_has_tiles() -> None:
    from dskernels.swin_attention.triton_common import TILES, tile_for

    for _ in range(500):
        dtype, tokens = random.choice([torch.float32, torch.bfloat16]), random.randint(1, 256)
        width = random.randint(1, 256)
        for kernel in TILES:
            tile = tile_for(kernel, dtype, tokens, width)
            if tile is None:
                assert kernel == "cell"
                continue
            assert min(tile.queries, tile.keys) >= 16
            assert max(tile.queries, tile.keys) <= max(16, 2 * tokens - 1)
            assert kernel != "cell" or tile.queries == tile.keys >= tokens


@needs_triton
@compiles
def test_programs_are_many_and_walk_over_every_cell() -> None:
    from dskernels.swin_attention.triton_common import cells_of_program

    assert cells_of_program(cells=64, heads=3, programs=1024, most=32) == 1
    assert cells_of_program(cells=128 * 64, heads=3, programs=1024, most=32) == 24
    assert cells_of_program(cells=128 * 64, heads=3, programs=1024, most=8) == 8


ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
NUMBERS = ("cells", "cells_of_program", "heads", "table_stride")


def compile_for(
    kernel: Any, architecture: int, dtype: torch.dtype, case: Case, tile: Any, wide: bool = False, ones: bool = False
) -> Any:
    """A kernel as Triton's compiler takes it without a GPU, for dense images of some channels; or for ``ones``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dskernels.swin_attention.triton_common import GEOMETRY, padded

    half = 0 if case.rope is None else (case.rope.rotary_dim or case.dim) // 2
    constants = {"HEIGHT": case.window[0], "WIDTH": case.window[1], "D": case.dim, "BLOCK_D": padded(case.dim)}
    constants |= {"HALF": half, "INTERLEAVED": half > 0 and case.rope.interleaved, "WIDE": wide}
    constants |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}
    absent = {"cos": half == 0, "sin": half == 0, "bias": not case.bias, "bias_sums": not case.bias}
    absent |= {"logit_scale": not case.cosine, "scale_sums": not case.cosine}
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "*fp32"
        if name.isupper() or absent.get(name):
            signature[name], values[index,] = "constexpr", constants.get(name)
        elif ones and (name == "table_stride" or name.endswith("_strides")):
            axes = {"table_stride": 0, "bias_strides": 3}.get(name, 4)
            signature[name] = ("constexpr",) * axes or "constexpr"
            values.update({(index, axis): 1 for axis in range(axes)} or {(index,): 1})
        elif name.endswith("_strides"):
            axes = 2 if name == "bias_strides" else 3
            signature[name], values[index, axes] = ("i32",) * axes + ("constexpr",), 1
            if axes == 3:
                attributes.update({(index, axis): [["tt.divisibility", 16]] for axis in range(axes)})
        elif name in (*GEOMETRY, *NUMBERS):
            signature[name] = "i32"
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = ELEMENTS[dtype] if name in ("qkv", "out", "grad_out", "grad_qkv") else "*fp32"
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def kernels() -> dict[str, Any]:
    from dskernels.swin_attention import triton, triton_backward, triton_tiled_backward, triton_tiled_bias

    return {
        "forward": triton._swin_attention_fwd_kernel,
        "cell": triton_backward._swin_attention_bwd_cell_kernel,
        "dq": triton_tiled_backward._swin_attention_bwd_dq_kernel,
        "dkdv": triton_tiled_backward._swin_attention_bwd_dkdv_kernel,
        "dbias": triton_tiled_bias.swin_attention_bwd_dbias_kernel,
    }


IMAGE = (8, 56, 56)
COMPILED = {
    "swin": (torch.bfloat16, Case(IMAGE, 3, 32, (7, 7), (3, 3))),
    "swin_float": (torch.float32, Case(IMAGE, 3, 32, (7, 7), (3, 3))),
    "swin_bias": (torch.float16, Case(IMAGE, 3, 32, (7, 7), (3, 3), bias=True)),
    "swin_v2": (torch.float16, Case(IMAGE, 3, 32, (8, 8), (4, 4), bias=True, cosine=True)),
    "rope": (torch.bfloat16, Case(IMAGE, 3, 64, (7, 7), bias=True, rope=Rope())),
    "tiled": (torch.bfloat16, Case(IMAGE, 3, 32, (12, 12))),
    "tiled_float": (torch.float32, Case(IMAGE, 3, 64, (12, 12), bias=True)),
    "widest": (torch.float16, Case(IMAGE, 3, 256, (16, 16), bias=True, cosine=True, rope=Rope(interleaved=True))),
    "widest_float": (torch.float32, Case(IMAGE, 3, 256, (7, 7), bias=True)),
}


@needs_triton
@compiles
@pytest.mark.parametrize(
    ("name", "architecture"), [*((name, 80) for name in COMPILED), ("swin_bias", 90), ("rope", 90), ("tiled_float", 90)]
)
def test_kernels_compile_and_fit(name: str, architecture: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.swin_attention.triton_common import tile_for

    dtype, case = COMPILED[name]
    is_plain = not case.bias and not case.cosine and case.rope is None
    whole = tile_for("cell", dtype, case.tokens, case.dim) is not None
    for kind, kernel in kernels().items():
        tile = tile_for(kind, dtype, case.tokens, case.dim)
        if (kind != "forward" and (kind == "cell") != whole) or (kind == "dbias" and not case.bias):
            continue
        compiled = compile_for(kernel, architecture, dtype, case, tile)
        assert compiled.metadata.shared <= SHARED_MEMORY[80], kind
        if architecture == 80:
            # With everything at once some programs spill a little; none lives in memory.
            assert stack_bytes(compiled, tmp_path) <= (0 if is_plain else 1024), kind
        # Half precision runs on the tensor cores, float32 keeps its digits: no tf32.
        assert ("mma" in compiled.asm["ptx"]) == (dtype != torch.float32)


@needs_triton
@compiles
@pytest.mark.parametrize("ones", [False, True])
def test_wide_offsets_and_ones_compile(ones: bool, tmp_path, monkeypatch) -> None:
    """Numbers that are 1 are constants to Triton, which has fewer operations for these than for tensors."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.swin_attention.triton_common import tile_for

    case = Case(IMAGE, 3, 16, (4, 4), bias=True, cosine=True, rope=Rope())
    for kind, kernel in kernels().items():
        tile = tile_for(kind, torch.float16, case.tokens, case.dim)
        assert compile_for(kernel, 80, torch.float16, case, tile, wide=not ones, ones=ones).asm["cubin"]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = GPU_CASES[name]
    inputs, grad = case.inputs(dtype), case.grad(dtype)
    there = {key: x.cuda() for key, x in inputs.items()}
    runs = [with_gradients(attend, case, there, grad.cuda()) for _ in range(2)]
    check(case, inputs, grad, {key: x.cpu() for key, x in runs[0].items()})
    for one, other in zip(*(run.values() for run in runs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@needs_triton
def test_waits_for_nothing_on_a_gpu() -> None:
    case = GPU_CASES["large_v2"]
    inputs = {key: x.cuda() for key, x in case.inputs(torch.bfloat16).items()}
    grad = case.grad(torch.bfloat16).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(attend, case, inputs, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_triton
def test_image_beyond_int32_on_a_gpu() -> None:
    # The last images lie past 2**31 elements, and rows of a window farther apart than that.
    case = Case((3, 14, 7), 1, 32, (7, 7), (3, 3), bias=True)
    inputs = {key: x.cuda() for key, x in case.inputs(torch.float16).items()}
    grad = case.grad(torch.float16).cuda()
    right = with_gradients(attend, case, inputs, grad)
    far = torch.empty(3, 2**30, dtype=torch.float16, device="cuda")[:, : 14 * 7 * 96].view_as(inputs["qkv"])
    storage = torch.empty(13 * 2**29 + 3 * 2**20, dtype=torch.float16, device="cuda")
    apart = storage.as_strided(inputs["qkv"].shape, (2**20, 2**29, 96, 1))
    for strided in (far, apart):
        strided.copy_(inputs["qkv"])
        out = attend(case, strided, inputs["bias"])
        assert torch.equal(out, right["out"])


@pytest.mark.gpu
@needs_triton
def test_compiled_on_a_gpu() -> None:
    case = Case((2, 20, 20), 2, 32, (7, 7), (3, 3), bias=True, rope=Rope())
    compiled = torch.compile(lambda *x: attend(case, *x).sin(), fullgraph=True, dynamic=True)
    for height in (20, 33):
        inputs = {k: x.cuda().requires_grad_() for k, x in case._replace(size=(2, height, 20)).inputs(HALF[0]).items()}
        leaves = list(inputs.values())
        out, right = compiled(*leaves), attend(case, *leaves).sin()
        torch.testing.assert_close(out, right)
        for one, other in zip(*(torch.autograd.grad(y.float().sum(), leaves) for y in (out, right)), strict=True):
            torch.testing.assert_close(one, other)
