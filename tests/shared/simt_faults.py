"""Runs kernels of csrc/simt/selftest/faults.cu; a script that imports nothing that a sanitizer would take long to load.

``python simt_faults.py LIBRARY FAULTY ORDER COPIES NAME...`` prints a line for each: what went wrong, ``wrong`` or
``right``. ORDER and COPIES are the numbers of csrc/simt/simt.h.
"""

from __future__ import annotations

import ctypes
import sys

COUNT = 64


def run(library: ctypes.CDLL, name: str, faulty: bool) -> str:
    """The message of the emulator, or whether what was computed is right."""
    library.simt_fault.restype = ctypes.c_char_p
    numbers = [float(1 + i) for i in range(COUNT)]
    given, out = (ctypes.c_float * COUNT)(*numbers), (ctypes.c_float * (3 * COUNT))()
    message = library.simt_fault(name.encode(), faulty, given, out)
    if message is not None:
        return str(message.decode())
    return "right" if list(out[:COUNT]) == numbers[::-1] else "wrong"


def main() -> None:
    path, faulty, order, copies, *names = sys.argv[1:]
    library = ctypes.CDLL(path)
    library.simt_set(int(order), int(copies), 1, 4)
    for name in names:
        print(f"{name}: {run(library, name, faulty == '1')}")


if __name__ == "__main__":
    main()
