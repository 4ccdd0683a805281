"""The emulator of csrc/simt/ itself: what it computes, and that it sees what a kernel does wrong."""

from __future__ import annotations

import ctypes

import emulator
import pytest
import torch

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))


@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_product(dtype: torch.dtype, order: str, copies: str) -> None:
    library = emulator.selftest()
    library.simt_set(emulator.ORDERS.index(order), emulator.COPIES.index(copies), 1, 4)
    a, b = (torch.randn(64, 64).to(dtype) for _ in range(2))
    out = torch.empty(64, 64)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)]
    library.simt_product(*pointers, a.element_size(), dtype == torch.float16)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=0, atol=2e-5)
