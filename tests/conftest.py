"""What all tests share: a fixed seed, fresh memory full of NaN, and the backends that can run here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dskernels as dk


def _cpu_tiers() -> list[str]:
    if dk.build_info()["compiled"] is None:
        return []
    from dskernels import _C

    return list(_C.cpu_tiers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that takes ``backend`` once a backend, and the compiled one once a CPU tier."""
    if "backend" not in metafunc.fixturenames:
        return
    cases = [pytest.param("reference", id="reference")]
    cases += [pytest.param(f"cpu/{tier}", id=f"cpu_{tier}") for tier in _cpu_tiers()]
    if len(cases) == 1:
        reason = dk.build_info()["not_loaded"]
        cases.append(pytest.param("cpu/", id="cpu", marks=pytest.mark.skip(reason=reason)))
    metafunc.parametrize("backend", cases, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the backend under test, with its CPU tier in use."""
    name, _, tier = request.param.partition("/")
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
