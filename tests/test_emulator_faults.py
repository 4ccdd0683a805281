"""What a kernel does wrong is seen under the emulator: each fault of csrc/simt/selftest/faults.cu, and by what."""

from __future__ import annotations

import ctypes
import re
import threading

import emulator
import pytest
import simt_faults

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

# What the launch throws. Lines of the two barriers are named, as are the first of the threads that wait.
MESSAGES = {
    "never_waited": "thread 0: cp.async: copies that were never waited for",
    "divergent_barrier": "thread 32: a barrier while others wait at another one (simt/selftest/faults.cu:",
    "left_before_barrier": "nobody can go on: thread 0 waits at a barrier (simt/selftest/faults.cu:",
    "lanes_do_not_meet": "nobody can go on: thread 0 waits at a warp's operation (__shfl_sync)",
    "mask_without_lane": "thread 0: a lane that its own mask does not name (__shfl_sync)",
    "different_operations": "thread 16: lanes of a warp at different operations (__shfl_sync)",
    "warp_not_whole": "thread 32: a warp that is not whole (mma.m16n8k8.tf32)",
    "misaligned_ldmatrix": "thread 63: ldmatrix: a row that is not aligned to 16 bytes",
    "misaligned_copy": "thread 0: cp.async: an address that is not aligned to 16 bytes",
    "different_parts": "thread 40: threads take different parts of shared memory",
    "more_shared_than_asked": "thread 0: more dynamic shared memory than the launch asked for",
    "more_static_shared": "thread 0: more shared memory than there is",
    "static_beside_dynamic": "thread 0: more shared memory than the launch has asked for",
}
# Wrong results: (order, copies) in which they must be, and in which luck hides them.
VALUES = {
    "missing_barrier": ([("forward", "late"), ("reverse", "late"), ("random", "late")], []),
    "missing_syncwarp": ([("forward", "late"), ("reverse", "late"), ("random", "late")], []),
    "half_syncwarp": ([("forward", "late"), ("reverse", "late")], []),
    "wrong_wait_count": ([(order, "late") for order in emulator.ORDERS], [("forward", "early")]),
    "overwritten_target": ([("reverse", "late"), ("reverse", "early")], [("forward", "late")]),
    "overwritten_source": ([(order, "late") for order in emulator.ORDERS], [("forward", "early")]),
    "uninitialised_shared": ([("forward", "late"), ("reverse", "early")], []),
    "wrong_fragment": ([("forward", "late"), ("random", "mixed")], []),
}
RACES = (
    "missing_barrier",
    "missing_syncwarp",
    "half_syncwarp",
    "blocks_race",
    "missing_fence",
    "overwritten_target",
)
OUT_OF_BOUNDS = ("shared_out_of_bounds", "global_out_of_bounds")
ALL = sorted({*MESSAGES, *VALUES, *RACES, *OUT_OF_BOUNDS})


def run(name: str, faulty: bool, order: str = "forward", copies: str = "late") -> str:
    library = emulator.selftest()
    library.simt_set(emulator.ORDERS.index(order), emulator.COPIES.index(copies), 1, 4)
    return simt_faults.run(library, name, faulty)


@pytest.mark.parametrize("copies", emulator.COPIES)
@pytest.mark.parametrize("order", emulator.ORDERS)
def test_without_its_fault_each_is_right(order: str, copies: str) -> None:
    assert {name: run(name, False, order, copies) for name in ALL} == dict.fromkeys(ALL, "right")


@pytest.mark.parametrize("name", MESSAGES)
def test_names_the_fault(name: str) -> None:
    message = run(name, True)
    assert message.startswith(f"simt: block 0: {MESSAGES[name]}"), message
    if name == "left_before_barrier":
        assert message.endswith("; 1 threads have ended")
    # What is left of a launch that failed is not in the way of the next.
    assert run(name, False) == "right"


@pytest.mark.parametrize("name", VALUES)
def test_computes_something_wrong(name: str) -> None:
    seen, hidden = VALUES[name]
    assert {mode: run(name, True, *mode) for mode in seen} == dict.fromkeys(seen, "wrong")
    assert {mode: run(name, True, *mode) for mode in hidden} == dict.fromkeys(hidden, "right")


def under(sanitizer: str, faulty: bool, order: str, copies: str, *names: str) -> tuple[int, str]:
    """The exit status of a process that runs the kernels, and what it said."""
    numbers = str(emulator.ORDERS.index(order)), str(emulator.COPIES.index(copies))
    path = emulator.build(sanitizer, "dskernels_simt_selftest")
    # So that each array has a place of its own in memory.
    arguments = (str(path), "1" if faulty else "0", *numbers, *names)
    done = emulator.run_under(sanitizer, "tests/shared/simt_faults.py", *arguments, PYTHONMALLOC="malloc")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("sanitizer", emulator.SANITIZERS)
def test_sanitizers_have_nothing_to_say_of_what_is_right(sanitizer: str, order: str) -> None:
    copies = dict(zip(emulator.ORDERS, emulator.COPIES, strict=True))[order]
    status, said = under(sanitizer, False, order, copies, *ALL, *ALL)
    assert status == 0, said
    assert said.splitlines() == [f"{name}: right" for name in (*ALL, *ALL)]


@pytest.mark.parametrize("sanitizer", emulator.SANITIZERS)
def test_sanitizers_have_nothing_to_say_of_launches_that_fail(sanitizer: str) -> None:
    status, said = under(sanitizer, True, "forward", "late", *MESSAGES)
    assert status == 0, said
    assert [line.partition(": simt: block 0: ")[0] for line in said.splitlines()] == list(MESSAGES)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("name", RACES)
def test_races_show_under_thread_sanitizer(name: str, order: str) -> None:
    status, said = under("thread", True, order, "early", name)
    assert status == 66, said
    assert "WARNING: ThreadSanitizer: data race" in said
    assert name in said
    assert "simt/selftest/faults.cu:" in said


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_accesses_out_of_bounds_show_under_address_sanitizer(name: str) -> None:
    status, said = under("address", True, "forward", "late", name)
    assert status != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in said
    assert name in said


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ((1, 65536, 1, 32, 0), "simt: a grid too large"),
        ((1, 1, 65536, 32, 0), "simt: a grid too large"),
        ((65536, 65535, 1, 32, 0), "simt: too many blocks to emulate"),
        ((1, 1, 1, 0, 0), "simt: expected 1 to 1024 threads a block"),
        ((1, 1, 1, 1025, 0), "simt: expected 1 to 1024 threads a block"),
        ((1, 1, 1, 32, 99 * 1024 + 1), "simt: expected up to 99 KiB of shared memory, got 101377"),
        # Beside a variable of the kernel's own.
        ((1, 1, 1, 1024, 99 * 1024 - 128), None),
        (
            (1, 1, 1, 1024, 99 * 1024 - 127),
            "simt: block 0: thread 0: more shared memory than there is (static)",
        ),
        ((1, 1, 1, 32, 48 * 1024), None),
        ((0, 1, 1, 32, 0), None),
        ((3, 2, 2, 33, 0), None),
    ],
)
def test_launches_that_no_gpu_takes(launch: tuple[int, ...], message: str | None) -> None:
    run_launch = emulator.selftest().simt_launch
    run_launch.restype = ctypes.c_char_p
    said = run_launch(*launch)
    # Which thread comes first is as the test before has left it.
    assert (None if said is None else re.sub(r"thread \d+", "thread 0", said.decode())) == message


@pytest.mark.parametrize("blocks", [2**31, 2**32 + 1])
def test_more_blocks_than_a_grid_has(blocks: int) -> None:
    grid_of = emulator.selftest().simt_grid_of
    grid_of.argtypes, grid_of.restype = [ctypes.c_int64], ctypes.c_char_p
    assert grid_of(2**31 - 1) is None
    assert grid_of(blocks).decode() == f"grid: expected up to 2147483647 blocks, got {blocks}"


def test_threads_of_the_system_take_turns() -> None:
    said: list[str] = []

    def launch_some() -> None:
        said.extend(simt_faults.run(emulator.selftest(), name, False) for name in ALL for _ in range(3))

    threads = [threading.Thread(target=launch_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["right"] * (4 * 3 * len(ALL))
