"""What nvcc made of the CUDA kernels, for every architecture that is built: what a GPU would be slow for, unseen."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks import cubin
from benchmarks.report import insert

BINARY, CUOBJDUMP = cubin.built_binary(), cubin.find_cuobjdump()
PAGE = Path(__file__).resolve().parent.parent / "docs" / "gpu.md"

pytestmark = [
    pytest.mark.skipif(BINARY is None, reason="this build has no CUDA kernels"),
    pytest.mark.skipif(
        CUOBJDUMP is None, reason="cuobjdump was found neither on PATH, nor in CUDA_HOME, nor in Triton"
    ),
]

# Kernels that multiply tiles: their names begin so.
PRODUCTS = (
    "window_attention_fwd",
    "window_attention_grad_keys",
    "window_attention_grad_queries",
    "decode_kernel",
    "swin_attention_forward",
    "swin_attention_backward",
    "swin_attention_wide",
    "integer_product",
    "float_product",
)
# Kernels bound by memory, which read and write 16 bytes at a time where they can.
STREAMS = ("power_sums", "scale", "window_attention_turn")


@functools.cache
def kernels() -> list[cubin.Kernel]:
    assert BINARY is not None
    assert CUOBJDUMP is not None
    return cubin.read_kernels(BINARY, CUOBJDUMP)


def named(*prefixes: str) -> list[cubin.Kernel]:
    found = [kernel for kernel in kernels() if kernel.name.startswith(prefixes)]
    for prefix in prefixes:
        assert any(kernel.name.startswith(prefix) for kernel in found), f"no kernel {prefix}"
    return found


def test_every_kernel_is_there_for_every_architecture() -> None:
    archs = {kernel.arch for kernel in kernels()}
    assert {"sm_80", "sm_90"} <= archs
    names = {arch: {kernel.name for kernel in kernels() if kernel.arch == arch} for arch in archs}
    assert all(found == names["sm_80"] for found in names.values())


def test_no_kernel_spills() -> None:
    # The general path of Swin, for heads above 32 in float32 and windows above 64 tokens, is not a hot one.
    allowed = {"swin_attention_wide_backward_queries<float>": 48}
    spilling = [kernel for kernel in kernels() if kernel.stack > allowed.get(kernel.name, 0)]
    assert [f"{kernel.name}, {kernel.arch}: {kernel.stack} bytes" for kernel in spilling] == []


def test_products_are_the_tensor_cores() -> None:
    assert [kernel.name for kernel in named(*PRODUCTS) if kernel.count("HMMA", "IMMA") == 0] == []


def test_products_copy_16_bytes_past_the_registers() -> None:
    without = [kernel.name for kernel in named(*PRODUCTS) if kernel.count_with("LDGSTS", "128") == 0]
    assert without == []


def test_tiles_of_16_bit_types_come_by_ldmatrix() -> None:
    # Those of float are loaded one by one and split.
    halves = [kernel for kernel in named(*PRODUCTS) if "float" not in kernel.name.partition("<")[2]]
    assert [kernel.name for kernel in halves if kernel.count("LDSM") == 0] == []


def test_streams_read_16_bytes_at_a_time() -> None:
    assert [kernel.name for kernel in named(*STREAMS) if kernel.count_with("LDG.E", "128") == 0] == []


def test_eight_warps_of_a_product_have_registers() -> None:
    # Two for each of the four schedulers of a multiprocessor: one multiplies while the other waits.
    few = [kernel.name for kernel in named(*PRODUCTS) if kernel.blocks_by_registers * kernel.threads < 256]
    assert few == []


def test_page_has_these_figures() -> None:
    page = PAGE.read_text()
    release = cubin.nvcc_release()
    if f"nvcc {release}" not in page:
        pytest.skip(f"the page is not of nvcc {release}")
    made = insert(page, "cubin", "\n".join(cubin.table(kernels())))
    assert made == page, "python -m benchmarks.cubin --write docs/gpu.md"
