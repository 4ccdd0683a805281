"""Which machine, build and state a result comes from, and running everything on a lower CPU tier."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import dskernels as dk
from benchmarks import cuda

# What puts dskernels, ATen's own kernels, MKL, oneDNN and FBGEMM on one instruction set, each when it is loaded.
_TIER_ENVIRONMENT = {
    "AVX2": {
        "DSKERNELS_CPU_TIER": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    }
}
_TIER_INDUCTOR_BITS = {"AVX2": 256}
TIERS = tuple(_TIER_ENVIRONMENT)

_RECORDED_ENVIRONMENT = (*_TIER_ENVIRONMENT["AVX2"], "DSKERNELS_BACKEND", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TELLING_FLAGS = {"avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"}
_TELLING_FLAGS |= {"avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve", "hypervisor"}
_GPU_PACKAGES = ("triton", "flash_attn", "torchao", "torchvision")
# Above this share of the cores, others are working.
_BUSY_SHARE = 0.25


def enter_tier(tier: str | None, arguments: Sequence[str]) -> None:
    """Puts this process and every peer on ``tier``, starting ``python -m benchmarks`` again where it must.

    Inductor only gets the vector width: it still compiles with ``-march=native``, in the peer's favour.
    """
    if tier is None:
        return
    wanted = _TIER_ENVIRONMENT[tier]
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        command = [sys.executable, "-m", "benchmarks", *arguments]
        os.execve(sys.executable, command, {**os.environ, **wanted})
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = _TIER_INDUCTOR_BITS[tier]


def busy_warning() -> str | None:
    """A sentence if others seem to use this machine, else None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= _BUSY_SHARE * cores:
        return None
    return f"the 1-minute load average is {load:.2f} on {cores} cores: wait for a quiet machine, or trust ratios only"


def fingerprint(device: str = "cpu") -> dict[str, Any]:
    """What results on ``device`` depend on, in values that JSON knows; nothing in it names the owner or a path."""
    gpu = {"gpu": cuda.fingerprint(), "packages": _versions()} if device == "cuda" else {}
    return {**_host(), **gpu, "git": _git_state()}


def _host() -> dict[str, Any]:
    cpu = _cpu_info()
    info = dk.build_info()
    compiled = info["compiled"] or {}
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model_stepping": [cpu.get(key) for key in ("cpu family", "model", "stepping")],
        "cores": os.cpu_count(),
        "flags": sorted(_TELLING_FLAGS & set(cpu.get("flags", cpu.get("Features", "")).split())),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_parallel": torch.__config__.parallel_info(),
        "inductor_simdlen": _inductor_simdlen(),
        "threads": torch.get_num_threads(),
        "dskernels": info["version"],
        "dskernels_compiler": compiled.get("compiler"),
        "cpu_tier": info["cpu_tier"],
        "environment": {name: os.environ[name] for name in _RECORDED_ENVIRONMENT if name in os.environ},
    }


def _versions() -> dict[str, str]:
    """Of those packages that bring a GPU's kernels."""
    versions = {}
    for package in _GPU_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def slug(machine: dict[str, Any]) -> str:
    """A short name for file names: of the GPU, or of CPU and tier."""
    if machine.get("gpu"):
        return "-".join(re.findall(r"[a-z0-9]+", machine["gpu"]["name"].lower()))
    name = re.sub(r"\((r|tm|c)\)|\b(cpu|processor|\d+-core)\b|@.*", " ", machine["cpu"].lower())
    tier = machine["cpu_tier"] or "reference"
    return "-".join(re.findall(r"[a-z0-9]+", f"{name} {tier.lower()}"))


def _cpu_info() -> dict[str, str]:
    # The first processor's block; others repeat it.
    text = _read("/proc/cpuinfo") or ""
    lines = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in lines}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _inductor_simdlen() -> int | None:
    # Imported only where a tier or a compiled peer asked for it: it is slow to load.
    config = sys.modules.get("torch._inductor.config")
    return config.cpp.simdlen if config else None


def _git_state() -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}
