"""Tests of the CUDA kernels again, watched by sanitizers and in other orders: as many as there is time for.

An op is here as soon as its ``csrc/<op>/kernel.cu`` is: of the cases of ``test_<op>*.py`` that are emulated, a process
for each sanitizer runs a mixture, always the same. All of them run without a sanitizer, threads in order and copies
late, with the other tests.
"""

from __future__ import annotations

import re

import emulator
import pytest

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

OPS = sorted(source.parent.name for source in emulator.ROOT.glob("csrc/*/kernel.cu"))
OPS = [op for op in OPS if op == emulator.only_op()] or OPS
# Order, copy mode and number of tests. Not a time: a slower machine would try others, and fewer.
MODES = {"none": ("reverse", "early", 40), "address": ("reverse", "late", 40), "thread": ("random", "mixed", 12)}


@pytest.mark.parametrize("sanitizer", MODES)
@pytest.mark.parametrize("op", OPS)
def test_emulated(op: str, sanitizer: str) -> None:
    # Before the time begins to count.
    emulator.build(sanitizer)
    order, copies, tests = MODES[sanitizer]
    files = sorted((emulator.ROOT / "tests/ops").glob(f"test_{op}*.py"))
    done = emulator.run_under(
        sanitizer,
        *("-m", "pytest", "-q", "-x", "-s", "-rN", "-p", "no:cacheprovider", *map(str, files)),
        DSKERNELS_SIMT_ORDER=order,
        DSKERNELS_SIMT_COPIES=copies,
        DSKERNELS_SIMT_TESTS=str(tests),
    )
    # What a sanitizer has to say comes last, and at length.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[:8000]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    # Some are of what only a process with several backends can compare, and say so.
    assert int(passed[1]) > tests // 2, done.stdout[-2000:]
