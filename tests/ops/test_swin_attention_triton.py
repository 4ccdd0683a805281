"""swin_attention in Triton: under the interpreter, compiled for GPUs that need not be there, and on one that is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_window_attention_triton import SHARED_MEMORY, compiles, needs_triton, run_python, stack_bytes
from torch import Tensor

import dskernels as dk
from dskernels.testing import assert_close_to_reference

HALF = (torch.bfloat16, torch.float16)


class Rope(NamedTuple):
    rotary_dim: int | None = None
    interleaved: bool = False
    by_head: bool = False


class Case(NamedTuple):
    """A call: sizes of the image, heads, and what else it has."""

    size: tuple[int, int, int]
    heads: int
    dim: int
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    bias: bool = False
    cosine: bool = False
    rope: Rope | None = None
    scale: float | None = None

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]

    def table(self) -> dk.RopeTable | None:
        if self.rope is None:
            return None
        options = {"rotary_dim": self.rope.rotary_dim, "interleaved": self.rope.interleaved}
        table = dk.rope_table_2d(self.dim, *self.window, **options)
        if not self.rope.by_head:
            return table
        others = dk.rope_table_2d(self.dim, *self.window, theta=7.0, **options)
        layers = [torch.stack((x, y)[: self.heads]) for x, y in zip(table[:2], others[:2], strict=True)]
        return dk.RopeTable(*layers, table.interleaved)

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What has a gradient."""
        tensors = {"qkv": torch.randn(*self.size, 3 * self.heads * self.dim).to(dtype)}
        if self.bias:
            tensors["bias"] = torch.randn(self.heads, self.tokens, self.tokens)
        if self.cosine:
            tensors["logit_scale"] = torch.rand(self.heads) * 10 + 1
        return tensors

    def grad(self, dtype: torch.dtype) -> Tensor:
        return torch.randn(*self.size, self.heads * self.dim).to(dtype)


# Every branch of the kernels, on images with as few cells as show it: whole cells and tiles of cells, ragged borders.
CASES = {
    "one": Case((1, 1, 1), 1, 8, (1, 1)),
    "rows": Case((1, 1, 9), 2, 8, (1, 7), (0, 3)),
    "swin": Case((1, 9, 9), 1, 32, (7, 7), (3, 3), bias=True),
    "other_than_square": Case((1, 14, 10), 1, 24, (7, 7), (3, 3), bias=True),
    "images": Case((2, 5, 4), 1, 16, (4, 6), (1, 2), bias=True, scale=-0.3),
    "unpadded": Case((1, 8, 8), 1, 40, (8, 8)),
    "cosine": Case((1, 6, 4), 2, 24, (5, 4), (2, 0), bias=True, cosine=True),
    "rope": Case((1, 4, 5), 2, 24, (4, 4), (0, 3), bias=True, rope=Rope(by_head=True)),
    "rope_in_pairs": Case((1, 4, 5), 1, 20, (4, 4), (3, 0), rope=Rope(16, interleaved=True)),
    "rope_and_cosine": Case((1, 4, 5), 1, 32, (4, 5), cosine=True, rope=Rope(16)),
    "tiled": Case((1, 9, 10), 1, 16, (9, 8), (0, 3), bias=True),
    "tiled_rope_and_cosine": Case((1, 6, 12), 1, 16, (6, 12), cosine=True, rope=Rope(interleaved=True)),
    "tiled_wide": Case((1, 3, 5), 1, 160, (3, 5), (1, 0), bias=True),
}


def _windows(x: Tensor, case: Case) -> Tensor:
    """``[B, H, W, C]`` as Swin cuts it: filled up, rolled and partitioned, ``[B, windows, N, C]``."""
    (h, w), (down, right) = case.window, case.shift
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % w, 0, -x.shape[1] % h))
    x = x.roll((-down, -right), (1, 2)).unflatten(2, (-1, w)).unflatten(1, (-1, h))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _image(x: Tensor, case: Case) -> Tensor:
    (_, height, width), (h, w) = case.size, case.window
    x = x.unflatten(2, case.window).unflatten(1, (-(-height // h), -(-width // w)))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll(case.shift, (1, 2))[:, :height, :width]


def _hidden(case: Case) -> Tensor:
    """Which pairs of a window, ``[windows, N, N]``, are of two regions, or have a key that fills up."""
    (_, height, width), (h, w) = case.size, case.window
    regions = torch.zeros(-(-height // h) * h, -(-width // w) * w)
    for axis, shift in enumerate(case.shift):
        parts = ((0, -case.window[axis]), (-case.window[axis], -shift), (-shift, None)) if shift else ()
        for number, (start, stop) in enumerate(parts):
            regions.transpose(0, axis)[start:stop] += number * 3**axis
    # Undone in advance, since `_windows` rolls; what fills up is of no region.
    regions = regions.roll(case.shift, (0, 1))
    regions[height:] = regions[:, width:] = -1
    ids = _windows(regions[None, :, :, None], case._replace(size=(1, *regions.shape)))[0, :, :, 0]
    return (ids[:, :, None] != ids[:, None]) | (ids == -1)[:, None]


def _turned(x: Tensor, table: dk.RopeTable | None) -> Tensor:
    """``[..., heads, N, D]`` in float64, its pairs turned as complex numbers."""
    if table is None:
        return x
    phases = torch.complex(table.cos.double(), table.sin.double())
    head, tail = x[..., : table.rotary_dim].double(), x[..., table.rotary_dim :].double()
    pairs = head.unflatten(-1, (-1, 2)) if table.interleaved else head.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * phases)
    return torch.cat((turned.flatten(-2) if table.interleaved else turned.mT.flatten(-2), tail), -1)


def by_masks(case: Case, qkv: Tensor, bias: Tensor | None = None, logit_scale: Tensor | None = None) -> Tensor:
    """Swin attention as its authors write it, by rolling, partition and masks; in float64 if qkv is.

    In other dtypes products are in that of qkv, all else in float32 or wider.
    """
    dtype, wide = qkv.dtype, torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = _windows(qkv, case).unflatten(-1, (3, case.heads, case.dim)).permute(3, 0, 1, 4, 2, 5)
    factor: Any = case.dim**-0.5 if case.scale is None else case.scale
    if logit_scale is not None:
        q, k = (torch.nn.functional.normalize(x.to(wide), dim=-1) for x in (q, k))
        factor = logit_scale[:, None, None]
    q, k = (_turned(x, case.table()).to(dtype) for x in (q, k))
    scores = (q @ k.mT).to(wide) * factor
    scores = scores if bias is None else scores + bias
    hidden = _hidden(case)[:, None]
    # A token that fills up may see nothing. What it gets is cut off.
    scores = scores.masked_fill(hidden & ~hidden.all(-1, keepdim=True), -torch.inf)
    out = scores.softmax(-1).to(dtype) @ v
    return _image(out.transpose(2, 3).flatten(-2), case)


def attend(case: Case, qkv: Tensor, bias: Tensor | None = None, logit_scale: Tensor | None = None) -> Tensor:
    table = case.table()
    return dk.swin_attention(
        qkv,
        window_size=case.window,
        shift=case.shift,
        num_heads=case.heads,
        bias=bias,
        rope=None if table is None else table.to(qkv.device),
        logit_scale=logit_scale,
        scale=case.scale,
        backend="triton",
    )


def with_gradients(compute: Any, case: Case, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = compute(case, **leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out.detach(), **{f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}}


def check(case: Case, inputs: dict[str, Tensor], grad: Tensor, results: dict[str, Tensor]) -> None:
    """Whether ``results`` are as near to float64 as plain PyTorch."""
    exact = with_gradients(by_masks, case, {name: x.double() for name, x in inputs.items()}, grad)
    plain = with_gradients(by_masks, case, inputs, grad)
    for name, result in results.items():
        if name == "grad of logit_scale" and inputs["qkv"].dtype in HALF:
            # Sums of products of rounded operands, one a head, of which the plain one may be right by luck.
            atol = 4 * torch.finfo(inputs["qkv"].dtype).eps * max(1.0, float(exact[name].abs().max()))
            torch.testing.assert_close(result.double(), exact[name].double(), rtol=0, atol=atol)
        else:
            assert_close_to_reference(result, exact[name], plain[name], name)


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
    from dskernels.swin_attention import triton, triton_backward, triton_tiled_backward

    return {
        "forward": triton._swin_attention_fwd_kernel,
        "cell": triton_backward._swin_attention_bwd_cell_kernel,
        "dq": triton_tiled_backward._swin_attention_bwd_dq_kernel,
        "dkdv": triton_tiled_backward._swin_attention_bwd_dkdv_kernel,
        "dbias": triton_tiled_backward._swin_attention_bwd_dbias_kernel,
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


GPU_CASES = {
    **CASES,
    "large": Case((3, 30, 45), 3, 32, (7, 7), (3, 3), bias=True),
    "large_v2": Case((2, 33, 40), 4, 32, (8, 8), (4, 4), bias=True, cosine=True),
    "large_rope": Case((2, 33, 40), 2, 64, (7, 7), (3, 2), bias=True, rope=Rope(by_head=True)),
    "twelve": Case((2, 30, 25), 2, 32, (12, 12), (6, 6), bias=True),
    "sixteen": Case((1, 40, 20), 1, 256, (16, 16), (8, 8), bias=True, cosine=True, rope=Rope(128, interleaved=True)),
}


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
