"""The wrappers of csrc/common/ptx.cuh and the fragments of mma.cuh, against what the manual of PTX says they do.

csrc/simt/selftest/ptx.cu gives what every lane gets. It runs under the emulator and, with ``-m gpu``, compiled by nvcc,
on a GPU, where the same results are expected: to the bit wherever they are exact, so that the emulator is right. The
places of fragments are those of the manual's formulas, "Matrix Fragments for mma.m16n8k16" and so on, element by
element; g is its groupID, t its threadID_in_group.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import emulator
import numpy as np
import pytest
import torch

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
Places = tuple[np.ndarray, np.ndarray]


class Machine(NamedTuple):
    library: ctypes.CDLL
    device: str

    def run(self, name: str, inputs: list[np.ndarray], out: np.ndarray, *options: int) -> np.ndarray:
        """``out`` after the call of ``name`` with pointers to the inputs and to it, and the options."""
        tensors = [torch.from_numpy(x.copy().view(np.uint8)).to(self.device) for x in (*inputs, out)]
        getattr(self.library, name)(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *options)
        # Waits for the kernel.
        return tensors[-1].cpu().numpy().view(out.dtype).reshape(out.shape)


def _compiled_for_the_gpu(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if compiler is None:
        pytest.skip("needs nvcc")
    library, csrc = folder / "ptx.so", emulator.ROOT / "csrc"
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    options = ["-std=c++20", "-shared", "-Xcompiler", "-fPIC", f"-arch={architecture}", f"-I{csrc}"]
    subprocess.run([compiler, *options, str(csrc / "simt/selftest/ptx.cu"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if request.param == "gpu":
        return Machine(_compiled_for_the_gpu(tmp_path_factory.mktemp("ptx")), "cuda")
    missing = emulator.why_not()
    if missing is not None:
        pytest.skip(missing)
    return Machine(emulator.selftest(), "cpu")


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(1)


def ones(*shape: int, dtype: type = np.uint32) -> np.ndarray:
    """Room for results that shows what is not written."""
    return np.full(shape, ~np.uint32(0)).view(dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(machine: Machine, random: np.random.Generator, transposed: bool) -> None:
    rows = random.integers(0, 2**16, (32, 8), dtype=np.uint16)
    place = random.permutation(32).astype(np.int32)
    out = machine.run("ptx_ldmatrix", [rows, place], ones(32, 4), transposed)
    matrices = rows[place].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    expected = np.stack([matrices[:, G, 2 * T], matrices[:, G, 2 * T + 1]], -1).transpose(1, 0, 2)
    assert np.array_equal(out.view(np.uint16).reshape(32, 4, 2), expected)


def half_a(i: int) -> Places:
    return (G if i < 2 or 4 <= i < 6 else G + 8), 2 * T + (i & 1) + (8 if i >= 4 else 0)


def half_b(i: int) -> Places:
    return 2 * T + (i & 1) + (8 if i >= 2 else 0), G


def tf32_a(i: int) -> Places:
    return (G if i in (0, 2) else G + 8), (T if i in (0, 1) else T + 4)


def tf32_b(i: int) -> Places:
    return (T if i == 0 else T + 4), G


def int8_a(i: int) -> Places:
    return (G if i < 4 or 8 <= i < 12 else G + 8), 4 * T + (i & 3) + (16 if i >= 8 else 0)


def int8_b(i: int) -> Places:
    return 4 * T + (i & 3) + (16 if i >= 4 else 0), G


def sums(i: int) -> Places:
    return (G if i < 2 else G + 8), 2 * T + (i & 1)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded to nearest, ties to even."""
    return torch.from_numpy(x.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tf32_of(x: np.ndarray) -> np.ndarray:
    """Rounded to 10 bits after the point, ties away from zero."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    # Numbers below the least normal one have no more places than it has.
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 11)
    return (np.copysign(np.floor(np.abs(np.ldexp(mantissa, exponent)) / unit + 0.5) * unit, x)).astype(np.float32)


class Type(NamedTuple):
    """Elements of fragments: their number in ptx.cu, and their values as bits and back."""

    number: int
    depth: int
    a: Callable[[int], Places]
    b: Callable[[int], Places]
    bits: Callable[[np.ndarray], np.ndarray]
    values: Callable[[np.ndarray], np.ndarray]

    @property
    def in_a_word(self) -> int:
        return self.depth // 8


TYPES = {
    "float16": Type(
        0, 16, half_a, half_b, lambda x: x.astype(np.float16).view(np.uint16), lambda x: x.view(np.float16)
    ),
    "bfloat16": Type(1, 16, half_a, half_b, as_bfloat16, from_bfloat16),
    # The lower 13 bits are not looked at.
    "tf32": Type(
        2,
        8,
        tf32_a,
        tf32_b,
        lambda x: x.astype(np.float32).view(np.uint32),
        lambda x: (x & ~np.uint32(0x1FFF)).view(np.float32),
    ),
    "int8": Type(3, 32, int8_a, int8_b, lambda x: x.astype(np.int8).view(np.uint8), lambda x: x.view(np.int8)),
}


def fragment(matrix: np.ndarray, places: Callable[[int], Places], count: int) -> np.ndarray:
    """What every lane holds of ``matrix``, ``[32, count]``."""
    return np.ascontiguousarray(np.stack([matrix[places(i)] for i in range(count)], 1))


@pytest.mark.parametrize("numbers", ["small", "random"])
@pytest.mark.parametrize("name", TYPES)
def test_mma(machine: Machine, random: np.random.Generator, name: str, numbers: str) -> None:
    kind = TYPES[name]

    def draw(*shape: int) -> np.ndarray:
        integers = random.integers(-128, 128, shape) if name == "int8" else random.integers(-8, 9, shape)
        is_float = numbers == "random" and name != "int8"
        return kind.bits(random.standard_normal(shape) if is_float else integers)

    a, b = draw(16, kind.depth), draw(kind.depth, 8)
    c = random.integers(-(2**20), 2**20, (16, 8)) if numbers == "small" else 8 * random.standard_normal((16, 8))
    c = c.astype(np.int32 if name == "int8" else np.float32)
    operands = [fragment(a, kind.a, 4 * kind.in_a_word), fragment(b, kind.b, 2 * kind.in_a_word), fragment(c, sums, 4)]
    out = machine.run("ptx_mma", operands, ones(32, 4, dtype=c.dtype.type), kind.number)
    left, right = (kind.values(x).astype(np.float64) for x in (a, b))
    expected = fragment(left @ right + c, sums, 4)
    if numbers == "small" or name == "int8":
        assert np.array_equal(out, expected)
        return
    # The tensor cores may cut off each of the sums.
    bound = kind.depth * 2.0**-23 * fragment(np.abs(left) @ np.abs(right) + np.abs(c), sums, 4)
    assert (np.abs(out - expected) <= bound).all()


def test_cp_async(machine: Machine, random: np.random.Generator) -> None:
    lines = random.integers(0, 256, (64, 16), dtype=np.uint8)
    count = np.concatenate([np.arange(17), random.integers(0, 17, 15)]).astype(np.int32)
    out = machine.run("ptx_cp_async", [lines, count], ones(64, 4)).view(np.uint8).reshape(64, 16)
    expected = lines.copy()
    expected[:32][np.arange(16) >= count[:, None]] = 0
    assert np.array_equal(out, expected)


def test_exp2(machine: Machine, random: np.random.Generator) -> None:
    special = [0.0, -0.0, 1.0, -1.0, -126.0, 127.99, 1e-30, -1e-30]
    x = np.concatenate([random.uniform(-126, 128, 2000), random.standard_normal(2000), special]).astype(np.float32)
    out = machine.run("ptx_functions", [x], ones(2, x.size), x.size)[0].view(np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert (np.abs(out - expected) <= 2 * np.spacing(expected.astype(np.float32))).all()
    beyond = np.array([-126.01, -149.0, -1000.0, -np.inf, 128.0, 1000.0, np.inf, np.nan], dtype=np.float32)
    out = machine.run("ptx_functions", [beyond], ones(2, 8), 8)[0].view(np.float32)
    assert np.array_equal(out, [0, 0, 0, 0, np.inf, np.inf, np.inf, np.nan], equal_nan=True)


def test_to_tf32(machine: Machine, random: np.random.Generator) -> None:
    normal = (random.standard_normal(2000) * np.exp2(random.integers(-120, 120, 2000))).astype(np.float32)
    ties = ((1024 + random.integers(0, 1024, 200) + 0.5) * random.choice([-1, 1], 200) / 64).astype(np.float32)
    special = np.array([0.0, -0.0, 1.0, 2 - 2.0**-23, 1e-40, -3e-39, np.inf, -np.inf], dtype=np.float32)
    x = np.concatenate([normal, ties, special])
    out = machine.run("ptx_functions", [x], ones(2, x.size), x.size)[1].view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isinf(x), x, tf32_of(x))
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))
    bad = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], dtype=np.uint32).view(np.float32)
    out = machine.run("ptx_functions", [bad], ones(2, 4), 4)[1]
    # As the tensor cores see it.
    assert np.isnan((out & ~np.uint32(0x1FFF)).view(np.float32)).all()


def test_lop3(machine: Machine, random: np.random.Generator) -> None:
    tables = (0x00, 0x01, 0x40, 0x6A, 0x96, 0xCA, 0xEA, 0xF8)
    a, b, c = x = random.integers(0, 2**32, (3, 32), dtype=np.uint32)
    out = machine.run("ptx_lop3", [x], ones(len(tables), 32))
    for table, row in zip(tables, out, strict=True):
        # Bit 4a + 2b + c of the table, which F(0xf0, 0xcc, 0xaa) is.
        expected = np.zeros(32, np.uint32)
        for bit in range(32):
            places = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
            expected |= (np.uint32(table) >> places & 1) << np.uint32(bit)
        assert np.array_equal(row, expected)


def halves_of(x: np.ndarray) -> np.ndarray:
    """``[32, n]`` float32 as what three products of TF32 take: all upper parts, then what they leave."""
    high = tf32_of(x)
    return np.concatenate([high, tf32_of(x - high)], 1).view(np.uint32)


def as_registers(kind: Type, elements: np.ndarray) -> np.ndarray:
    """The fragment of T that ``elements`` fill; of float32, from the order of TF32."""
    return halves_of(elements) if kind.depth == 8 else kind.bits(elements).view(np.uint32)


def slots(places: Callable[[int], Places], of_rows: bool) -> Callable[[int], Places]:
    """For float32, column t (of A; of B, row t) of a product stands for 2t and t + 4 for 2t + 1."""

    def moved(i: int) -> Places:
        row, column = places(i)
        place = row if of_rows else column
        place = np.where(place < 4, 2 * place, 2 * (place - 4) + 1)
        return (place, column) if of_rows else (row, place)

    return moved


def places_of(kind: Type) -> tuple[Callable[[int], Places], Callable[[int], Places]]:
    return (slots(kind.a, False), slots(kind.b, True)) if kind.depth == 8 else (kind.a, kind.b)


@pytest.mark.parametrize("which", ["a", "a_transposed", "b_transposed", "b"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "tf32"])
def test_fragments_of_tiles(machine: Machine, random: np.random.Generator, name: str, which: str) -> None:
    kind = TYPES[name]
    tile = random.standard_normal((16, 16)).astype(np.float32)
    number = ["a", "a_transposed", "b_transposed", "b"].index(which)
    of_a, of_b = places_of(kind)
    # In registers, b[j] is of 8 columns of the product.
    if which.startswith("a"):
        matrix = tile if which == "a" else tile.T
        expected = as_registers(kind, fragment(matrix, of_a, 4 * kind.in_a_word))
    else:
        matrix = tile if which == "b" else tile.T
        parts = [fragment(matrix[:, 8 * j : 8 * j + 8], of_b, 2 * kind.in_a_word) for j in range(2)]
        expected = np.concatenate([as_registers(kind, part) for part in parts], 1)
    out = machine.run("ptx_load", [kind.bits(tile)], ones(*expected.shape), number, kind.number)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "tf32"])
def test_accumulators_become_a(machine: Machine, random: np.random.Generator, name: str) -> None:
    kind = TYPES[name]
    left = random.standard_normal((16, kind.depth)).astype(np.float32)
    products = np.stack([fragment(left[:, 8 * j : 8 * j + 8], sums, 4) for j in range(kind.depth // 8)])
    expected = as_registers(kind, fragment(left, places_of(kind)[0], 4 * kind.in_a_word))
    out = machine.run("ptx_accumulators", [products], ones(*expected.shape), kind.number)
    assert np.array_equal(out, expected)
