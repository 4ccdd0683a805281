"""setup.py turns environment variables into a build, or into one line that says what is missing.

Each test runs it in a copy of what a build needs. None compiles a kernel: that whole path is what installed the library
under test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77.0.3", reason="building needs setuptools >= 77.0.3")

ROOT = Path(__file__).resolve().parent.parent
NO_COMPILER = {"CXX": "/nowhere/c++"}
NO_NVCC = {"CUDA_HOME": "/nowhere"}
NO_CUDA = re.compile(
    r"dskernels: the cuda kernels were not built: (nvcc was found neither in CUDA_HOME nor on PATH|torch \S+ is a build"
    r" without CUDA) \(DSKERNELS_BUILD=cuda shows more\); the CPU kernels serve instead"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("setup.py", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("csrc", "dskernels", "python"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
    return copy


def build_ext(tree: Path, mode: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(tree, ["setup.py", "build_ext"], mode, **variables)


def python(tree: Path, arguments: list[str], mode: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("DSKERNELS_BUILD", "MAX_JOBS")}
    environment |= variables
    if mode is not None:
        environment["DSKERNELS_BUILD"] = mode
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def our_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("dskernels: ")]


def test_unknown_mode_names_expected_and_got(tree: Path) -> None:
    done = build_ext(tree, "gpu")
    assert done.returncode != 0
    assert our_lines(done.stdout) == ["dskernels: DSKERNELS_BUILD: expected one of auto, cpu, cuda, none, got 'gpu'"]


def test_none_builds_nothing_and_says_nothing(tree: Path) -> None:
    done = build_ext(tree, "none", **NO_COMPILER)
    assert done.returncode == 0, done.stdout
    assert our_lines(done.stdout) == []
    assert not list(tree.rglob("_C.*"))


@pytest.mark.parametrize("mode", [None, "auto"], ids=["unset", "auto"])
def test_auto_without_a_compiler_goes_on_and_says_so_in_a_line(tree: Path, mode: str | None) -> None:
    done = build_ext(tree, mode, **NO_COMPILER, **NO_NVCC)
    assert done.returncode == 0, done.stdout
    without_cuda, line = our_lines(done.stdout)
    assert NO_CUDA.fullmatch(without_cuda)
    assert "the cpu kernels were not built" in line
    assert "the references, plain PyTorch, serve instead" in line
    assert "CMake Error" not in done.stdout


def test_auto_where_compiling_fails_goes_on_and_says_so(tree: Path) -> None:
    for source in tree.glob("csrc/**/*.cpp"):
        source.write_text("#error stands for a compiler that is too old\n")
    done = build_ext(tree, "auto", MAX_JOBS="1", **NO_NVCC)
    assert done.returncode == 0, done.stdout
    without_cuda, line = our_lines(done.stdout)
    assert NO_CUDA.fullmatch(without_cuda)
    assert "compilation failed" in line


def test_cpu_without_a_compiler_is_an_error_that_shows_the_cause(tree: Path) -> None:
    done = build_ext(tree, "cpu", **NO_COMPILER)
    assert done.returncode != 0
    assert "/nowhere/c++" in done.stdout
    assert our_lines(done.stdout) == ["dskernels: the cpu kernels were not built: cmake's configuration failed"]


@pytest.mark.parametrize("mode", ["auto", "cpu"])
def test_missing_torch_is_named(tree: Path, mode: str) -> None:
    shadow = tree / "shadow"
    shadow.mkdir()
    (shadow / "torch.py").write_text("raise ImportError('not here')")
    done = build_ext(tree, mode, PYTHONPATH=str(shadow))
    assert (done.returncode == 0) == (mode == "auto")
    lines = our_lines(done.stdout)
    assert len(lines) == (2 if mode == "auto" else 1)
    assert all("torch cannot be imported (not here)" in line for line in lines)


def test_cuda_without_nvcc_or_a_cuda_torch_is_an_error(tree: Path) -> None:
    done = build_ext(tree, "cuda", **NO_NVCC)
    assert done.returncode != 0
    (line,) = our_lines(done.stdout)
    assert NO_CUDA.match(f"{line} (DSKERNELS_BUILD=cuda shows more); the CPU kernels serve instead")


@pytest.mark.parametrize("jobs", ["0", "two"])
def test_max_jobs_is_checked(tree: Path, jobs: str) -> None:
    done = build_ext(tree, "cpu", MAX_JOBS=jobs)
    assert done.returncode != 0
    assert our_lines(done.stdout) == [f"dskernels: MAX_JOBS: expected a positive integer, got '{jobs}'"]


def test_wheel_holds_both_packages_and_their_type_marks(tree: Path) -> None:
    # Left by an older build; setuptools alone would pack it.
    stale = tree / "build" / "lib" / "dskernels" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    done = python(tree, ["setup.py", "-q", "bdist_wheel", "--dist-dir", "wheels"], "none")
    assert done.returncode == 0, done.stdout
    (wheel,) = (tree / "wheels").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in (("dskernels", ROOT / "dskernels"), ("dsaccel", ROOT / "python" / "dsaccel")):
        modules = {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
        assert modules <= names
        assert f"{package}/py.typed" in names
    assert "dskernels/gone.py" not in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "csrc/"))]


def test_editable_install_without_kernels_removes_older_ones(tree: Path) -> None:
    older = tree / "dskernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    older.write_bytes(b"")
    done = python(tree, ["setup.py", "-q", "editable_wheel", "--dist-dir", "wheels"], "none")
    assert done.returncode == 0, done.stdout
    assert not older.exists()
