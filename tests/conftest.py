"""What all tests share: a fixed seed, fresh memory full of NaN, and the backends that can run here."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import emulator
import pytest
import torch

import dskernels as dk

# Of a process that is to run so many emulated tests alone: see ops/test_emulated_under_sanitizers.py.
EMULATED_TESTS = int(os.environ["DSKERNELS_SIMT_TESTS"]) if "DSKERNELS_SIMT_TESTS" in os.environ else None


def _cpu_tiers() -> list[str]:
    if dk.build_info()["compiled"] is None:
        return []
    from dskernels import _C

    return list(_C.cpu_tiers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EMULATED_TESTS is not None:
        emulated = [item for item in items if _is_emulated(item)]
        # Shuffled alike in every process, on every machine.
        random.Random(0).shuffle(emulated)
        items[:] = emulated[:EMULATED_TESTS]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that takes ``backend`` once a backend, the compiled one once a CPU tier, and CUDA's emulated."""
    if "backend" not in metafunc.fixturenames:
        return
    if emulator.SANITIZER != "none":
        metafunc.parametrize("backend", [pytest.param("cuda", id="emulated")], indirect=True)
        return
    cases = [pytest.param("reference", id="reference")]
    cases += [pytest.param(f"cpu/{tier}", id=f"cpu_{tier}") for tier in _cpu_tiers()]
    if len(cases) == 1:
        reason = dk.build_info()["not_loaded"]
        cases.append(pytest.param("cpu/", id="cpu", marks=pytest.mark.skip(reason=reason)))
    if _has_cuda_source(metafunc):
        missing = emulator.why_not()
        marks = [] if missing is None else [pytest.mark.skip(reason=missing)]
        cases.append(pytest.param("cuda", id="emulated", marks=marks))
    metafunc.parametrize("backend", cases, indirect=True)


def _is_emulated(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_of_kernels = parameters.get("backend") == "cuda" or "_cuda" in Path(item.path).stem
    return is_of_kernels and item.get_closest_marker("gpu") is None


def _has_cuda_source(metafunc: pytest.Metafunc) -> bool:
    """Whether the test is of an operator, by its name, that has a CUDA kernel."""
    name = Path(metafunc.module.__file__).stem
    sources = emulator.ROOT.glob("csrc/*/kernel.cu")
    return any(name.startswith(f"test_{source.parent.name}") for source in sources)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the backend under test, with its CPU tier in use."""
    name, _, tier = request.param.partition("/")
    if name == "cuda":
        emulator.load()
    if name != "cpu":
        yield name
        return
    from dskernels import _C

    before = _C.cpu_tier()
    _C.set_cpu_tier(tier)
    yield name
    _C.set_cpu_tier(before)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """In deterministic mode torch fills what ``torch.empty`` returns with NaN, and so what our bindings allocate."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(16).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
