"""Environment variables -> CMake -> wheel. Everything else about the package stands in pyproject.toml.

DSKERNELS_BUILD       auto (default): build what can be built; cpu, cuda: that or an error; none: nothing.
MAX_JOBS              Compile jobs at a time. Default: one a processor.
CUDA_HOME             Where nvcc is, unless it is on PATH.
TORCH_CUDA_ARCH_LIST  Read by CMakeLists.txt, as torch's own extensions do.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

MODES = ("auto", "cpu", "cuda", "none")
MODE = os.environ.get("DSKERNELS_BUILD") or "auto"
if MODE not in MODES:
    sys.exit(f"dskernels: DSKERNELS_BUILD: expected one of {', '.join(MODES)}, got {MODE!r}")


class CannotBuildError(Exception):
    """Why a part cannot be built here, and what the tool at fault printed."""

    def __init__(self, reason, log=""):
        super().__init__(reason)
        self.log = log


class CMakeBuild(build_ext):
    """Makes dskernels/_C with CMake; in mode auto, leaves out what cannot be made and says so in one line."""

    def build_extension(self, ext):
        output = Path(self.get_ext_fullpath(ext.name))
        for part in parts_to_try():
            try:
                self.make(part, output)
                return
            except CannotBuildError as error:
                failure = f"dskernels: the {part} kernels were not built: {error}"
                if MODE != "auto":
                    sys.exit(f"{error.log}\n{failure}")
                serving = "the CPU kernels serve" if part == "cuda" else "the references, plain PyTorch, serve"
                print(f"{failure} (DSKERNELS_BUILD={part} shows more); {serving} instead")
        if self.editable_mode:
            # What an earlier build left in the tree must not pass for a result of this one.
            ROOT.joinpath("dskernels", output.name).unlink(missing_ok=True)

    def make(self, part, output):
        jobs = max_jobs()
        folder = self.build_temp
        if self.editable_mode:
            # Kept, so that the next build compiles only what changed; apart for each Python and torch.
            folder = ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{torch_module().__version__}"
        ninja = find_tool("ninja")
        generator = ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        options = [f"-D{name}={value}" for name, value in self.options(part).items()]
        cmake = find_tool("cmake") or "cmake"
        run("cmake's configuration", cmake, f"-S{ROOT}", f"-B{folder}", *generator, *options)
        run("compilation", cmake, "--build", str(folder), "--parallel", jobs)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(folder, output.name), output)

    def options(self, part):
        torch = torch_module()
        from torch.utils import cpp_extension

        options = {
            "DSKERNELS_VERSION": self.distribution.get_version(),
            "TORCH_VERSION": torch.__version__,
            "TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
            "TORCH_LIBRARY_DIRS": ";".join(cpp_extension.library_paths()),
            "Python_EXECUTABLE": sys.executable,
            "DSKERNELS_CUDA": "OFF",
        }
        if part == "cuda":
            options |= {"DSKERNELS_CUDA": "ON", "CMAKE_CUDA_COMPILER": find_nvcc(torch)}
        return options


class Wheel(bdist_wheel):
    """A wheel from a folder of its own: setuptools packs all of build/lib, also modules that have since gone."""

    def run(self):
        with tempfile.TemporaryDirectory() as folder:
            self.reinitialize_command("build", reinit_subcommands=True).build_base = folder
            super().run()


def parts_to_try():
    """The parts in order of preference; "cuda" includes what "cpu" makes."""
    if MODE != "auto":
        return () if MODE == "none" else (MODE,)
    return ("cuda", "cpu")


def torch_module():
    try:
        import torch
    except ImportError as error:
        raise CannotBuildError(f"torch cannot be imported ({error})") from error
    return torch


def find_tool(name):
    # pip puts cmake and ninja beside the interpreter, which need not be on PATH.
    return shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))


def find_nvcc(torch):
    if torch.version.cuda is None:
        raise CannotBuildError(f"torch {torch.__version__} is a build without CUDA")
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None:
        raise CannotBuildError("nvcc was found neither in CUDA_HOME nor on PATH")
    return nvcc


def max_jobs():
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not jobs.isdigit() or int(jobs) == 0:
        sys.exit(f"dskernels: MAX_JOBS: expected a positive integer, got {jobs!r}")
    return jobs


def run(step, *command):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError as error:
        raise CannotBuildError(f"{command[0]} was not found") from error
    if done.returncode != 0:
        raise CannotBuildError(f"{step} failed", done.stdout)
    print(done.stdout, end="")


setup(
    # Optional lets setuptools go on without the module; whether that is an error is decided above.
    ext_modules=[Extension("dskernels._C", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
