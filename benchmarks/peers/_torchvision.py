"""torchvision's Swin, if it is there."""

from __future__ import annotations

import importlib
from types import ModuleType


def why_no_torchvision(problem: object = None) -> str | None:
    """The reason why nobody can take part who needs torchvision, or None."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return "torchvision is not installed"
    except Exception as error:
        # One built for another torch, such as a CUDA build's beside a CPU-only torch, fails in its own ways.
        return f"torchvision cannot be imported: {error}"
    return None


def swin_transformer() -> ModuleType:
    """The module that has ``shifted_window_attention`` and ``SwinTransformer``."""
    return importlib.import_module("torchvision.models.swin_transformer")
