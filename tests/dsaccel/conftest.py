"""What the tests of dsaccel share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads, and much slower where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for distributed code; see tests/shared/ranks.py."""
    shared = Ranks()
    yield shared
    shared.close()
