"""window_attention in Triton: under the interpreter, compiled for GPUs that need not be there, and on one that is."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_window_attention_decode import CASES as DECODE_CASES
from test_window_attention_decode import draw, rows_of_full_calls
from window_attention_oracle import NAMES, Options, Rope, exact, expected, on_rounded_operands
from window_attention_varlen_oracle import CASES, known

import dskernels as dk
from dskernels.testing import assert_close_to_reference, random_tensor

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process (TRITON_INTERPRET=1)"
)
# What a program may have. Consumer GPUs (sm_86, sm_89) run what is compiled as for sm_80, and have less than it.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Its own choice of backend and of Triton's mode, whatever this process was started with.
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "DSKERNELS_BACKEND")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )


@needs_triton
@pytest.mark.parametrize("kind", ["", "_varlen", "_decode"], ids=["dense", "packed", "decode"])
def test_under_the_interpreter(kind: str) -> None:
    """Every case of window_attention_triton_cases.py and its like; Triton must be told before it is imported."""
    cases = Path(__file__).with_name(f"window_attention{kind}_triton_cases.py")
    # One thread: the work is Python's, and waking others for small products costs more than they bring.
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases), **environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_kernels_are_imported_when_they_run() -> None:
    # Not: that nobody imports triton. torch does, when it likes.
    script = (
        "import sys, torch, dskernels as dk; q = torch.randn(1, 1, 4, 8); dk.window_attention(q, q, q); "
        "print([m for m in sys.modules if m in ('dskernels.window_attention.triton', 'triton.runtime.interpreter')])"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_without_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; import torch, dskernels as dk; q = torch.randn(1, 1, 4, 8); "
        "print(dk.explain(dk.window_attention, q, q, q).refusals['triton'])"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "triton is not installed"), done.stderr


@needs_triton
@compiles
def test_refuses_the_cpu_without_the_interpreter() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"backend 'triton'.*only in its interpreter .*TRITON_INTERPRET=1"):
        dk.window_attention(q, q, q, backend="triton")


class Source:
    """A kernel with the types and constants of a call, as Triton's compiler takes it without a GPU."""

    def __init__(
        self, kernel, dtype: torch.dtype, constants: dict, optional: bool = False, packed: bool = False
    ) -> None:
        self.kernel, self.signature, self.constants, self.attributes = kernel, {}, {}, {}
        element = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
        absent = () if optional else ("bias", "sink", "positions", "grad_bias", "grad_lse")
        if constants.get("HALF") == 0:
            absent += ("cos", "sin")
        if not packed:
            absent += ("offsets", "partner_offsets", "offsets_q", "offsets_k")
        for index, name in enumerate(kernel.arg_names):
            self.signature[name] = self._type(index, name, element, constants, absent)

    def _type(self, index: int, name: str, element: str, constants: dict, absent: tuple[str, ...]):
        if name.isupper():
            self.constants[index,] = constants[name]
            return "constexpr"
        if name in absent:
            self.constants[index,] = None
            return "constexpr"
        if name == "grad_lse_strides":
            return ("i32",) * 3
        if name.endswith("_strides"):
            # As for dense tensors: aligned rows, and components that lie together.
            self.constants[index, 3] = 1
            self.attributes.update({(index, axis): [["tt.divisibility", 16]] for axis in range(3)})
            return ("i32", "i32", "i32", "constexpr")
        if name in ("scale", "softcap"):
            return "fp32"
        if name.endswith("stride") or name in (
            *("rows", "heads", "key_heads", "table_rows", "offset", "queries", "keys", "start", "stop"),
            *("tiles", "sequences", "partners", "row_tiles", "splits", "slots", "left", "right"),
        ):
            return "i32"
        self.attributes[index,] = [["tt.divisibility", 16]]
        if name in ("positions", "lengths") or "offsets" in name:
            return "*i64"
        wide = ("lse", "delta", "cos", "sin", "bias", "sink", "grad_bias", "grad_lse")
        return "*fp32" if name in wide or name.startswith("part_") else element

    def compile(self, architecture: int, **options: int):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def stack_bytes(compiled, folder: Path) -> int:
    """The local memory of a thread, where registers that do not suffice are spilled."""
    import triton

    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sizes = re.findall(r"(?:STACK|LOCAL):(\d+)", report)
    assert len(sizes) == 2, report
    return sum(int(size) for size in sizes)


COMPILED = [
    (torch.bfloat16, 64, 64, False, False),
    (torch.float16, 40, 72, True, False),
    (torch.bfloat16, 256, 256, True, False),
    (torch.float32, 128, 128, False, False),
    (torch.bfloat16, 128, 128, False, True),
    (torch.float32, 64, 64, False, True),
]


@needs_triton
@compiles
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("dtype", "dim", "value_dim", "optional", "packed"), COMPILED, ids=str)
def test_kernels_compile_and_fit(
    dtype: torch.dtype, dim: int, value_dim: int, optional: bool, packed: bool, architecture: int, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.window_attention import triton as forward
    from dskernels.window_attention import triton_backward as backward
    from dskernels.window_attention.triton_common import padded, tile_for

    for name, kernel in (
        ("forward", forward._window_attention_fwd_kernel),
        ("dq", backward._window_attention_bwd_dq_kernel),
        ("dkdv", backward._window_attention_bwd_dkdv_kernel),
    ):
        tile = tile_for(name, dtype, max(dim, value_dim))
        blocks = {"BLOCK_D": padded(dim), "BLOCK_DV": padded(value_dim)}
        constants = {"GROUP": 4, "D": dim, "DV": value_dim, "CAPPED": optional, **blocks}
        constants |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}
        source = Source(kernel, dtype, constants, optional, packed)
        compiled = source.compile(architecture, num_warps=tile.warps, num_stages=tile.stages)
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture], name
        if architecture == 80 and not optional:
            assert stack_bytes(compiled, tmp_path) == 0, name
        # Half precision runs on the tensor cores, float32 keeps its digits: no tf32.
        assert ("mma" in compiled.asm["ptx"]) == (dtype != torch.float32)


@needs_triton
@compiles
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_compiles(interleaved: bool, packed: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.window_attention.triton_common import _window_attention_rotate_kernel

    constants = {"D": 128, "HALF": 48, "BLOCK_HALF": 64, "BLOCK_TAIL": 32, "BLOCK_N": 32}
    constants |= {"INTERLEAVED": interleaved, "BACK": interleaved}
    source = Source(_window_attention_rotate_kernel, torch.bfloat16, constants, not packed, packed)
    assert source.compile(90).asm["cubin"]


@needs_triton
@compiles
@pytest.mark.parametrize("turns", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "architecture"), [(torch.bfloat16, 80), (torch.float16, 90), (torch.float32, 80)], ids=str
)
def test_decode_compiles_and_fits(
    dtype: torch.dtype, architecture: int, dim: int, turns: bool, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from dskernels.window_attention import decode_triton

    tile = decode_triton.decode_tile(200, dim, dtype, turns)
    constants = {"GROUP": 8, "D": dim, "DV": dim, "BLOCK_D": dim, "BLOCK_DV": dim, "HALF": dim // 2 if turns else 0}
    constants |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "BLOCK_S": 16, "INTERLEAVED": dim == 64}
    constants |= {"KEYS_ROTATED": False, "CAPPED": True, "WHOLE": turns}
    for kernel in (decode_triton._window_attention_decode_kernel, decode_triton._window_attention_decode_join_kernel):
        source = Source(kernel, dtype, constants, optional=True, packed=False)
        compiled = source.compile(architecture, num_warps=tile.warps, num_stages=tile.stages)
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
        if architecture == 80:
            assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", [None, Rope(rotary_dim=32), Rope(interleaved=True)], ids=["plain", "half", "pairs"])
@pytest.mark.parametrize(("dim", "value_dim"), [(40, 24), (64, 64), (128, 128), (200, 256)], ids=str)
@pytest.mark.parametrize("window", [(31, 7), (None, 0), (-2, 9)], ids=str)
def test_on_a_gpu(window: tuple, dim: int, value_dim: int, rope: Rope | None, dtype: torch.dtype) -> None:
    options = Options(window=window, rope=rope)
    inputs = [random_tensor(shape, dtype) for shape in ((2, 6, 200, dim), (2, 2, 257, dim), (2, 2, 257, value_dim))]
    grads = [random_tensor((2, 6, 200, value_dim), dtype), torch.randn(2, 6, 200)]
    exact_results, plain_results = expected(inputs, grads, options)
    leaves = [x.cuda().requires_grad_() for x in inputs]
    table = None
    if rope is not None:
        table = dk.rope_table(dim, 257, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved).to("cuda")
    out, lse = dk.window_attention(*leaves, window=window, rope=table, return_lse=True, backend="triton")
    results = [out, lse, *torch.autograd.grad((out, lse), leaves, [g.cuda() for g in grads])]
    for name, result, right, usual in zip(NAMES, results, exact_results, plain_results, strict=True):
        if name == "lse" and rope is not None and dtype != torch.float32:
            # Rotated queries and keys are rounded for the tensor cores; the plain lse is not of rounded ones.
            torch.testing.assert_close(result.cpu().double(), right, rtol=0, atol=8 * torch.finfo(dtype).eps)
        else:
            assert_close_to_reference(result.cpu(), right, usual, name)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_packed_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs, grads, right, usual = known(name, dtype)
    leaves = [x.cuda().requires_grad_() for x in inputs]
    table = case.table() if case.rope is None else case.table().to("cuda")
    offsets = [x.cuda() for x in case.offsets(torch.int32)]
    options = {"window": case.window, "rope": table, "softcap": case.softcap}
    given = [grads[0].cuda(), grads[1].cuda()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = dk.window_attention_varlen(*leaves[:3], *offsets, sink=leaves[3], **options, return_lse=True)
        results += torch.autograd.grad(results, leaves[:3], given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for what, result, exactly, usually in zip(NAMES, results, right, usual, strict=False):
        if what == "lse" and dtype != torch.float32:
            torch.testing.assert_close(result.cpu().double(), exactly, rtol=0, atol=8 * torch.finfo(dtype).eps)
        else:
            assert_close_to_reference(result.cpu(), exactly, usually, what)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, case in DECODE_CASES.items() if case.lengths])
def test_decode_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = DECODE_CASES[name]
    x = draw(case, dtype)
    right = rows_of_full_calls(exact, case, x)
    usual = rows_of_full_calls(on_rounded_operands(dtype), case, x)
    table = case.table() if case.rope is None else case.table().to("cuda")
    options = {"window": case.window, "rope": table, "keys_rotated": case.keys_rotated, "softcap": case.softcap}
    tensors = [y.cuda() for y in (x.q, x.k_cache, x.v_cache, x.lengths)]
    sink = x.sink.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = dk.window_attention_decode(*tensors, sink=sink, **options, return_lse=True, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for what, result, exactly, usually in zip(("out", "lse"), results, right, usual, strict=True):
        assert_close_to_reference(result.cpu(), exactly, usually.to(result.dtype), what)


@pytest.mark.gpu
@needs_triton
def test_compiled_on_a_gpu() -> None:
    table = dk.rope_table(64, 300).to("cuda")
    sink = torch.randn(4, device="cuda", requires_grad=True)

    def attend(q, k, v, sink):
        options = {"window": (63, 0), "rope": table, "sink": sink, "softcap": 20.0}
        return dk.window_attention(q, k, v, **options, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for length in (100, 257, 300):
        inputs = [torch.randn(2, h, length, 64, device="cuda").bfloat16().requires_grad_() for h in (4, 2, 2)]
        leaves = [*inputs, sink]
        eager, traced = (torch.autograd.grad(f(*leaves).float().square().sum(), leaves) for f in (attend, compiled))
        for one, other in zip(eager, traced, strict=True):
            assert torch.equal(one, other)
