"""What nvcc made of the CUDA kernels: registers, shared memory and instructions, read from ``dskernels._C``.

``python -m benchmarks.cubin`` prints the table of docs/gpu.md, ``--write docs/gpu.md`` puts it there. It needs a build
with CUDA and ``cuobjdump``, which CUDA's toolkit has, and Triton's wheel as well; no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import insert

# Of a multiprocessor, on sm_80 and sm_90 alike; registers are given out to warps in units of 8 a thread.
_REGISTERS = 65536
_MAX_THREADS = 2048
_UNIT = 8


@dataclass
class Kernel:
    """A kernel as it was compiled for one architecture.

    Attributes:
        name: as it is written in C++, without namespaces, such as ``window_forward<__half, 64>``.
        arch: such as ``sm_80``.
        threads: of a block, at most.
        registers: of a thread.
        stack: bytes of local memory of a thread: spilled registers, and arrays that are indexed at run time.
        shared: bytes of static shared memory of a block.
        opcodes: how often each instruction occurs, by its full name, such as ``LDG.E.128``.
    """

    name: str
    arch: str
    threads: int = 0
    registers: int = 0
    stack: int = 0
    shared: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)

    def count(self, *prefixes: str) -> int:
        """Instructions whose name begins with one of ``prefixes``."""
        return sum(number for opcode, number in self.opcodes.items() if opcode.startswith(prefixes))

    def count_with(self, prefix: str, width: str) -> int:
        """Instructions whose name begins with ``prefix`` and has a part that ends in ``width``, such as ``128``."""
        names = (opcode for opcode in self.opcodes if opcode.startswith(prefix))
        return sum(self.opcodes[name] for name in names if width in name.split("."))

    @property
    def blocks_by_registers(self) -> int:
        """Blocks that fit a multiprocessor as far as registers and threads go."""
        of_thread = -(-self.registers // _UNIT) * _UNIT
        return min(_REGISTERS // (of_thread * self.threads), _MAX_THREADS // self.threads)


def find_cuobjdump() -> str | None:
    """Where ``cuobjdump`` is: on PATH, in CUDA_HOME, or in Triton's wheel; None if nowhere."""
    folders = [os.environ.get("PATH", "")]
    if "CUDA_HOME" in os.environ:
        folders.append(os.path.join(os.environ["CUDA_HOME"], "bin"))
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def nvcc_release() -> str | None:
    """The release of ``nvcc``, such as ``13.0``; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None:
        return None
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release ([\d.]+)", done.stdout)
    return None if found is None else found[1]


def read_kernels(binary: Path, cuobjdump: str) -> list[Kernel]:
    """All kernels of a shared library, for each architecture that it holds machine code for."""
    mangled: dict[tuple[str, str], Kernel] = {}
    for arch, name, (registers, stack, shared) in _resources(_lines(cuobjdump, "-res-usage", str(binary))):
        mangled[arch, name] = Kernel(name, arch, registers=registers, stack=stack, shared=shared)
    for arch, name, opcode in _instructions(_lines(cuobjdump, "-sass", str(binary))):
        mangled[arch, name].opcodes[opcode] += 1
    for arch, name, threads in _block_sizes(_lines(cuobjdump, "-elf", str(binary))):
        mangled[arch, name].threads = threads
    kernels = list(mangled.values())
    for kernel, name in zip(kernels, _demangled([kernel.name for kernel in kernels]), strict=True):
        kernel.name = name
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.arch))


def _lines(cuobjdump: str, *arguments: str) -> Iterator[str]:
    # The disassembler stands beside it.
    path = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])
    with subprocess.Popen(
        [cuobjdump, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
    ) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode != 0:
        raise RuntimeError(f"cuobjdump {arguments[0]} failed with exit status {process.returncode}")


def _resources(lines: Iterator[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    arch = name = ""
    for line in lines:
        if found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function (\S+):", line):
            name = found[1]
        elif found := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            yield arch, name, tuple(int(number) for number in found.groups())


def _instructions(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    arch = name = ""
    for line in lines:
        if found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", line):
            yield arch, name, found[1]
        elif found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            name = found[1]


def _block_sizes(lines: Iterator[str]) -> Iterator[tuple[str, str, int]]:
    arch = name = ""
    is_next = False
    for line in lines:
        if found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\.nv\.info\.(\S+)", line):
            name = found[1]
        elif "EIATTR_MAX_THREADS" in line:
            is_next = True
        elif is_next and (sizes := re.findall(r"0x([0-9a-f]+)", line)):
            threads = 1
            for size in sizes[:3]:
                threads *= int(size, 16)
            yield arch, name, threads
            is_next = False


def _demangled(names: list[str]) -> list[str]:
    """Without return type, namespaces, parameters and the types of template arguments that are numbers."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = []
    for line in done.stdout.splitlines():
        short = re.sub(r"^void |\b(?:dskernels|_GLOBAL__N__\w+)::|\(anonymous namespace\)::", "", line)
        plain.append(re.sub(r"\([\w:]+\)(?=\d)", "", short).split("(", 1)[0].replace(" >", ">"))
    return plain


def table(kernels: list[Kernel]) -> list[str]:
    """The lines of a Markdown table, a row for each kernel, with a number for each architecture where they differ."""
    archs = sorted({kernel.arch for kernel in kernels})
    columns: dict[str, Callable[[Kernel], int]] = {
        "threads": lambda kernel: kernel.threads,
        "registers": lambda kernel: kernel.registers,
        "blocks": lambda kernel: kernel.blocks_by_registers,
        "stack, bytes": lambda kernel: kernel.stack,
        "mma": lambda kernel: kernel.count("HMMA", "IMMA"),
        "ldmatrix": lambda kernel: kernel.count("LDSM"),
        "cp.async": lambda kernel: kernel.count("LDGSTS"),
        "loads of 16 bytes": lambda kernel: kernel.count_with("LDG", "128"),
    }
    rows = [f"| kernel ({', '.join(archs)}) | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for name in sorted({kernel.name for kernel in kernels}):
        same_name = [kernel for kernel in kernels if kernel.name == name]
        cells = []
        for number in columns.values():
            numbers = [str(number(kernel)) for kernel in same_name]
            cells.append(numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return rows


def built_binary() -> Path | None:
    """``dskernels._C``, if it has CUDA kernels."""
    import dskernels

    compiled = dskernels.build_info()["compiled"]
    spec = importlib.util.find_spec("dskernels._C")
    if compiled is None or not compiled["cuda_archs"] or spec is None or spec.origin is None:
        return None
    return Path(spec.origin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or puts it into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cubin", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace what is between the page's markers")
    options = parser.parse_args(arguments)
    binary, cuobjdump = built_binary(), find_cuobjdump()
    if binary is None or cuobjdump is None:
        print("no CUDA kernels in this build" if binary is None else "no cuobjdump found", file=sys.stderr)
        return 1
    rows = "\n".join(table(read_kernels(binary, cuobjdump)))
    if options.write is None:
        print(rows)
    else:
        options.write.write_text(insert(options.write.read_text(), "cubin", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
