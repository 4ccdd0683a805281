"""Builds csrc/simt/, which runs the CUDA kernels on the CPU, and loads it: then ``backend="cuda"`` serves CPU tensors.

Under a sanitizer it has to be loaded into a process that began with the sanitizer's library: see `run_under`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from dskernels import _library

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {"address": "libasan.so", "thread": "libtsan.so"}
# Which of them the process was started for.
SANITIZER = os.environ.get("DSKERNELS_SIMT_SANITIZER", "none")

ORDERS = ("forward", "reverse", "random")
COPIES = ("late", "early", "mixed")


@functools.cache
def why_not() -> str | None:
    """The reason why the emulator cannot be built here, or None."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the emulator switches stacks in the assembly language of x86-64 Linux"
    for tool in ("cmake", "g++"):
        if _tool(tool) is None:
            return f"the emulator needs {tool}"
    return None if _cuda_headers() else "the emulator needs CUDA's headers, of a toolkit or of a CUDA build of torch"


def only_op() -> str | None:
    """The one op whose kernels are built, where its author wants no other: ``DSKERNELS_SIMT_OPS``."""
    return os.environ.get("DSKERNELS_SIMT_OPS")


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))


def _cuda_headers() -> Path | None:
    places = [Path(os.environ["CUDA_HOME"], "include")] if "CUDA_HOME" in os.environ else []
    places += [Path("/usr/local/cuda/include")]
    packages = Path(sysconfig.get_path("purelib"))
    places += [*sorted(packages.glob("nvidia/cu*/include")), packages / "triton/backends/nvidia/include"]
    return next((place for place in places if (place / "cuda_fp16.h").exists()), None)


def build(sanitizer: str = "none", library: str = "dskernels_simt") -> Path:
    """A library, made or brought up to date; that of the ops' kernels takes minutes at first."""
    from torch.utils import cpp_extension

    folder = ROOT / "build" / f"simt-{sanitizer}-torch-{torch.__version__}"
    ninja = _tool("ninja")
    options = {
        "TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
        "TORCH_LIBRARY_DIRS": ";".join(cpp_extension.library_paths()),
        "CUDA_INCLUDE_DIR": str(_cuda_headers()),
        "SANITIZER": sanitizer,
        "OPS": only_op() or "*",
    }
    generator = ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    cmake = _tool("cmake") or "cmake"
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        # Tests that run side by side wait for the first to have built it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(cmake, f"-S{ROOT / 'csrc' / 'simt'}", f"-B{folder}", *generator, *definitions)
        _run(cmake, "--build", str(folder), "--parallel", jobs, "--target", library)
    return folder / f"lib{library}.so"


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment())
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-8000:]}")


def _environment() -> dict[str, str]:
    # Not for the compiler: what the sanitizer of this process begins with.
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@functools.cache
def load() -> ctypes.CDLL:
    """The library in this process; from then on its operators serve tensors on the CPU."""
    path = build(SANITIZER)
    torch.ops.load_library(str(path))
    _library.find_kernels()
    library = ctypes.CDLL(str(path))
    _set(library)
    return library


@functools.cache
def selftest() -> ctypes.CDLL:
    """The kernels of csrc/simt/selftest, by which the emulator itself is tried, over an emulator of their own."""
    return ctypes.CDLL(str(build(SANITIZER, "dskernels_simt_selftest")))


def _set(
    library: ctypes.CDLL, order: str | None = None, copies: str | None = None, seed: int = 1, multiprocessors: int = 4
) -> None:
    order = order or os.environ.get("DSKERNELS_SIMT_ORDER", "forward")
    copies = copies or os.environ.get("DSKERNELS_SIMT_COPIES", "late")
    library.simt_set(ORDERS.index(order), COPIES.index(copies), seed, multiprocessors)


def configure(order: str | None = None, copies: str | None = None, seed: int = 1, multiprocessors: int = 4) -> None:
    """Sets how the next launches go: in which order threads take turns, and when asynchronous copies are made.

    Defaults: ``DSKERNELS_SIMT_ORDER`` and ``DSKERNELS_SIMT_COPIES``, which `run_under` may be given, else forward and
    late.
    """
    _set(load(), order, copies, seed, multiprocessors)


def run_under(sanitizer: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``arguments`` in a process whose emulator a sanitizer watches, or none with ``"none"``."""
    # The sanitizer looks for what throws C++ exceptions when the process begins, and Python has no C++.
    names = [SANITIZERS[sanitizer], "libstdc++.so.6"] if sanitizer != "none" else []
    environment = {
        **os.environ,
        **environment,
        "LD_PRELOAD": " ".join(map(_library_of_compiler, names)),
        "DSKERNELS_SIMT_SANITIZER": sanitizer,
        # Python and torch leave memory behind.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def _library_of_compiler(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
