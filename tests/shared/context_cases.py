"""What the tests of context parallelism share."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_of_all() -> DeviceMesh:
    """All ranks, as the mesh "cp"."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def fails(kind: type[Exception], message: str, function: Any, *args: Any, **options: Any) -> None:
    """Asserts that a call raises ``kind`` with ``message`` in it."""
    with pytest.raises(kind, match=re.escape(message)):
        function(*args, **options)
