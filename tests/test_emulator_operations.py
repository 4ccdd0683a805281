"""The warp's operations under the emulator (csrc/simt/selftest/operations.cu) against computations that share no code.

That hardware does the same is for a GPU to say.
"""

from __future__ import annotations

import ctypes
import random
import struct

import emulator
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

OPERATIONS = (
    "shuffle",
    "shuffle_xor",
    "shuffle_up",
    "shuffle_down",
    "ballot",
    "any",
    "all",
    "count",
    "or",
    "byte_perm",
    "dp4a",
    "lop3_and",
    "lop3_or",
    "lop3_majority",
    "lop3_select",
    "to_tf32",
    "hfma2",
    "exp2",
    "popc",
    "clz",
)
LANES = 32


@pytest.fixture(params=emulator.ORDERS, autouse=True)
def _order(request: pytest.FixtureRequest) -> None:
    emulator.selftest().simt_set(emulator.ORDERS.index(request.param), 0, 1, 4)


def words() -> np.ndarray:
    return np.random.default_rng(random.getrandbits(32)).integers(0, 2**32, LANES, dtype=np.uint32)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def apply(name: str, x: np.ndarray, y: np.ndarray | None = None, z: np.ndarray | None = None, lanes=0, width=32):
    out = np.full(LANES, 0xDEADBEEF, dtype=np.uint32)
    y, z = (np.zeros(LANES, dtype=np.uint32) if each is None else each for each in (y, z))
    arrays = [pointer(each) for each in (x, y, z, out)]
    emulator.selftest().simt_apply(OPERATIONS.index(name), *arrays, lanes, width)
    return out


def shuffled(name: str, lane: int, lanes: int, width: int) -> int:
    """The lane that is read, by the pseudocode of shfl.sync in the PTX ISA."""
    segment = 32 - width
    clamp = 0 if name == "shuffle_up" else 31
    lowest = lane & segment
    limit = lowest | (clamp & ~segment)
    source = {
        "shuffle": lowest | (lanes & 31 & ~segment),
        "shuffle_xor": lane ^ lanes,
        "shuffle_up": lane - lanes,
        "shuffle_down": lane + lanes,
    }[name]
    in_range = source >= limit if name == "shuffle_up" else source <= limit
    return source if in_range else lane


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", ["shuffle", "shuffle_xor", "shuffle_up", "shuffle_down"])
def test_shuffles(name: str, width: int) -> None:
    for lanes in (0, 1, 3, 4, 7, 16, 17, 31):
        x = words()
        # An index each, where it is an index.
        y = np.array([(lane * 7 + lanes) % 32 for lane in range(LANES)], dtype=np.uint32)
        sources = [shuffled(name, lane, int(y[lane]) if name == "shuffle" else lanes, width) for lane in range(LANES)]
        assert apply(name, x, y, lanes=lanes, width=width).tolist() == x[sources].tolist()


def test_shuffle_of_64_bits() -> None:
    x = torch.randn(LANES, dtype=torch.float64).numpy()
    out = np.zeros(LANES)
    emulator.selftest().simt_shuffle_wide(pointer(x), pointer(out), 5)
    assert out.tolist() == x[[lane ^ 5 for lane in range(LANES)]].tolist()


@pytest.mark.parametrize("votes", [0, 0xFFFFFFFF, 0x80000001, 0x00FF1234], ids=hex)
def test_votes(votes: int) -> None:
    # True is whatever is not zero.
    x = np.array([(votes >> lane & 1) * (lane + 1) for lane in range(LANES)], dtype=np.uint32)
    right = {"ballot": votes, "any": votes != 0, "all": votes == 0xFFFFFFFF, "or": votes != 0}
    right["count"] = votes.bit_count()
    for name, value in right.items():
        assert apply(name, x).tolist() == [int(value)] * LANES, name


def test_byte_perm() -> None:
    x, y, selectors = words(), words(), words()
    right = []
    for a, b, selector in zip(x.tolist(), y.tolist(), selectors.tolist(), strict=True):
        eight = struct.pack("<II", a, b)
        right.append(int.from_bytes(bytes(eight[selector >> 4 * i & 7] for i in range(4)), "little"))
    assert apply("byte_perm", x, y, selectors).tolist() == right


def test_dp4a() -> None:
    x, y = words(), words()
    x[0], y[0] = 0x80808080, 0x80808080
    z = np.arange(LANES, dtype=np.uint32)
    products = x.view(np.int8).reshape(-1, 4).astype(np.int64) * y.view(np.int8).reshape(-1, 4)
    assert apply("dp4a", x, y, z).view(np.int32).tolist() == (products.sum(1) + z).tolist()


def test_lop3() -> None:
    a, b, c = words(), words(), words()
    right = {"and": a & b & c, "or": a | b | c, "majority": a & b | a & c | b & c, "select": a & b | ~a & c}
    for name, value in right.items():
        assert apply(f"lop3_{name}", a, b, c).tolist() == value.tolist(), name


def test_bits() -> None:
    x = words()
    x[:3] = 0, 1, 0xFFFFFFFF
    assert apply("popc", x).tolist() == [value.bit_count() for value in x.tolist()]
    assert apply("clz", x).tolist() == [32 - value.bit_length() for value in x.tolist()]


def test_rounding_to_tf32() -> None:
    x = torch.randn(LANES).numpy()
    # Ties go away from zero, a carry goes to the exponent, and what is not finite stays so.
    ties = [1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11, 2 - 2**-11, 2**-149, np.inf, -np.inf, 0.0]
    x[: len(ties)] = ties
    got = apply("to_tf32", x.view(np.uint32)).view(np.float32)
    exact = x[np.isfinite(x)].astype(np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 10)
    right = np.copysign(np.floor(np.abs(exact) / unit + 0.5) * unit, exact)
    assert got[np.isfinite(x)].tolist() == right.tolist()
    assert got[~np.isfinite(x)].tolist() == x[~np.isfinite(x)].tolist()
    nan = np.full(LANES, np.nan, dtype=np.float32)
    assert np.isnan(apply("to_tf32", nan.view(np.uint32)).view(np.float32)).all()


def test_hfma2_rounds_once() -> None:
    a, b, c = (torch.randn(2 * LANES).half() for _ in range(3))
    # The product is 1 + 2 ** -9 + 2 ** -20, whose end decides a tie with c.
    a[0] = b[0] = 1 + 2**-10
    c[0] = -(2**-11)
    got = apply("hfma2", *(each.numpy().view(np.uint32) for each in (a, b, c))).view(np.float16)
    right = (a.double() * b.double() + c.double()).half()
    assert got.tolist() == right.tolist()


def test_exp2() -> None:
    x = np.linspace(-160, 20, LANES, dtype=np.float32)
    x[:2] = -np.inf, -126.5
    got = apply("exp2", x.view(np.uint32)).view(np.float32).astype(np.float64)
    right = np.where(x < -126, 0.0, np.exp2(x.astype(np.float64)))
    np.testing.assert_allclose(got, right, rtol=2**-22)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_products_of_fragments(dtype: torch.dtype) -> None:
    depth = 32 // dtype.itemsize
    a, bt = torch.randn(16, depth).to(dtype), torch.randn(8, depth).to(dtype)
    c = torch.randn(16, 8)
    kind = [torch.float16, torch.bfloat16, torch.float32].index(dtype)
    exact = c.double()
    if dtype == torch.float32:
        # Of float32 the hardware takes the upper 19 bits.
        cut = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for each in (a, bt)]
        exact = exact + cut[0] @ cut[1].T
    else:
        exact = exact + a.double() @ bt.double().T
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (a, bt, c)]
    emulator.selftest().simt_mma(kind, *pointers)
    torch.testing.assert_close(c.double(), exact, rtol=0, atol=1e-5)


def test_products_of_integers_are_exact() -> None:
    for extreme, largest in ((False, 2**20), (True, 2**20), (True, 2**31)):
        a, bt = (torch.randint(-128, 128, (rows, 32), dtype=torch.int8) for rows in (16, 8))
        if extreme:
            a.fill_(-128)
            bt.fill_(-128)
        c = torch.randint(largest - 2**20, largest, (16, 8), dtype=torch.int32)
        # Beyond 32 bits it wraps.
        right = (c.long() + a.long() @ bt.long().T).int()
        emulator.selftest().simt_mma(3, *(ctypes.c_void_p(each.data_ptr()) for each in (a, bt, c)))
        assert torch.equal(c, right)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_ldmatrix(transposed: bool) -> None:
    matrices = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    out = torch.zeros(LANES, 4, 2, dtype=torch.int16)
    emulator.selftest().simt_ldmatrix(ctypes.c_void_p(matrices.data_ptr()), ctypes.c_void_p(out.data_ptr()), transposed)
    of_lanes = matrices.transpose(1, 2) if transposed else matrices
    # Lane 4g + t has elements 2t and 2t + 1 of row g of each matrix.
    right = of_lanes.reshape(4, 8, 4, 2).permute(1, 2, 0, 3).reshape(LANES, 4, 2)
    assert torch.equal(out, right)
