"""torchvision's Swin, if it is there."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def why_no_torchvision(problem: object = None) -> str | None:
    """The reason why nobody can take part who needs torchvision, or None."""
    return None if importlib.util.find_spec("torchvision") else "torchvision is not installed"


def swin_transformer() -> ModuleType:
    """The module that has ``shifted_window_attention`` and ``SwinTransformer``."""
    return importlib.import_module("torchvision.models.swin_transformer")
