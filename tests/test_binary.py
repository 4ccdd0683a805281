"""The compiled library keeps its instruction sets apart.

One AVX instruction outside the tier that promises it kills the process on an older CPU, at the latest when that code
runs. It gets there by a wrong compiler flag, by a static initialiser, or by an inline function that two tiers share and
of which the linker keeps one copy. Each test here shuts one of these doors.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import dskernels

ROOT = Path(__file__).resolve().parent.parent
COMPILED = dskernels.build_info()["compiled"]

pytestmark = [
    pytest.mark.skipif(COMPILED is None, reason="dskernels was installed without compiled kernels"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed"),
]

# VEX and EVEX encoded instructions, and those on mask registers. Everything else that x86-64 code may start with v or
# k is privileged.
VECTOR = re.compile(r"v(?!er[rw]|m(call|launch|resume|xo))|k(add|andn?|mov|not|x?n?or|ortest|shift|test|unpck)")
REGISTERS = {"DEFAULT": "%xmm", "AVX2": "%ymm", "AVX512": "%zmm"}


def library() -> Path:
    from dskernels import _C

    return Path(_C.__file__)


def run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


@functools.cache
def instructions(binary: Path) -> list[tuple[str, str]]:
    """Every instruction of the binary, as (symbol it belongs to, text)."""
    found, symbol = [], ""
    for line in run("objdump", "--disassemble", "--no-show-raw-insn", "--no-addresses", binary).splitlines():
        if line.startswith("<"):
            symbol = line[1:].rpartition(">")[0]
        elif line.startswith("\t"):
            found.append((symbol, line.strip()))
    return found


NO_OBJECTS = "the library was installed from a wheel; its object files are gone"


def tier_of_objects() -> Iterator[tuple[str, Path]]:
    """The object files of the tiers, where the build folder of this very library is still there."""
    for built in ROOT.glob(f"build/*/{library().name}"):
        if built.read_bytes() != library().read_bytes():
            continue
        for tier in COMPILED["cpu_tiers"]:
            for found in sorted(built.parent.glob(f"CMakeFiles/*_{tier}.dir/**/cpu_vec.cpp.o")):
                yield tier, found
        return


def object_params() -> list[object]:
    if COMPILED is None:
        reason = "dskernels was installed without compiled kernels"
    elif shutil.which("objdump") is None:
        reason = "objdump is not installed"
    elif found := list(tier_of_objects()):
        return [pytest.param(tier, path, id=path.parents[2].stem) for tier, path in found]
    else:
        reason = NO_OBJECTS
    return [pytest.param("", Path(), id="none", marks=pytest.mark.skip(reason=reason))]


def owners_by_file(binary: Path) -> dict[str, set[str]]:
    """Local symbols by the source file that the symbol table lists them under."""
    owners: dict[str, set[str]] = {}
    source = ""
    for line in run("objdump", "--syms", binary).splitlines():
        fields = line.split()
        if "*ABS*" in fields and "df" in fields:
            source = fields[-1]
        elif len(fields) >= 5:
            owners.setdefault(source, set()).add(fields[-1])
    return owners


def test_no_vector_instruction_outside_the_tiers() -> None:
    # What runs when the library is loaded, on any CPU, belongs to no tier, though a tier's file may hold it.
    tier_symbols = {s for s in owners_by_file(library())["cpu_vec.cpp"] if not s.startswith("_GLOBAL__sub_I")}
    strays = {s for s, text in instructions(library()) if VECTOR.match(text) and s not in tier_symbols}
    assert not strays, f"AVX code in functions that every CPU runs: {sorted(strays)}"


def test_library_has_no_search_path() -> None:
    dynamic = run("objdump", "--private-headers", library())
    assert not re.search(r"^\s*(RPATH|RUNPATH)\b.*", dynamic, re.MULTILINE)


def test_library_needs_only_the_stable_interface_of_torch() -> None:
    symbols = run("nm", "--dynamic", "--undefined-only", "--demangle", library())
    unstable = [line.split(maxsplit=1)[-1] for line in symbols.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    assert not unstable, "C++ symbols of torch change between releases; use torch/csrc/stable"


def test_library_exports_only_its_entry_point() -> None:
    symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", library())
    functions = {fields[0] for fields in map(str.split, symbols.splitlines()) if fields[1] in "TW"}
    assert {name for name in functions if "dskernels" in name} == set()
    assert "PyInit__C" in functions


def test_objects_are_at_hand_in_an_editable_build() -> None:
    if library().parent != ROOT / "dskernels":
        pytest.skip(NO_OBJECTS)
    assert list(tier_of_objects()), f"no object files beside build/*/{library().name}"


@pytest.mark.parametrize(("tier", "path"), object_params())
class TestTierObject:
    def test_uses_the_registers_it_promises(self, tier: str, path: Path) -> None:
        code = [text for _, text in instructions(path)]
        assert any(REGISTERS[tier] in text for text in code)
        if tier == "DEFAULT":
            assert not any(VECTOR.match(text) for text in code)
        else:
            assert any(re.match(r"vfn?m(add|sub)\d+p[sd]", text) and REGISTERS[tier] in text for text in code)
        if tier == "AVX2":
            assert not any("%zmm" in text or re.search(r"\{%k\d\}", text) for text in code)

    def test_shares_no_symbol_with_another_tier(self, tier: str, path: Path) -> None:
        symbols = [line.split() for line in run("nm", "--defined-only", "--format=posix", path).splitlines()]
        weak = [name for name, kind, *_ in symbols if kind in "WwVvu"]
        assert not weak, "inline functions that the linker merges across tiers; give them internal linkage"
        exported = [name for name, kind, *_ in symbols if kind.isupper()]
        op = path.parent.name
        assert len(exported) == 1
        assert f"{len(tier)}{tier}" in exported[0]
        assert exported[0].endswith(f"{op}_kernelsE")

    def test_runs_nothing_when_loaded(self, tier: str, path: Path) -> None:
        sections = run("objdump", "--section-headers", path)
        assert not re.search(r"\.(init_array|ctors|text\.startup)\b", sections)
