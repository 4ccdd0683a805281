"""The ``dskernels`` operator library: operators defined from Python, kernels loaded from ``dskernels._C``.

Every operator is defined here with a plain PyTorch default, so that it runs with nothing compiled.
Loading ``dskernels._C`` adds faster kernels for the same operators.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "dskernels"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Operators of their own, not one more dispatch key: a CUDA tensor may be served by either, as may one on the CPU, under
# Triton's interpreter and under the emulator of the tests.
TRITON_LIBRARY = torch.library.Library(f"{NAMESPACE}_triton", "DEF")
CUDA_LIBRARY = torch.library.Library(f"{NAMESPACE}_cuda", "DEF")
logger = logging.getLogger(NAMESPACE)

# Strides are part of the contract (see `empty_in_layout_of`), so a compiler must hand the tensors over as traced.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

_operators: list[tuple[str, str]] = []  # namespace and name
_kept: list[torch._ops.OpOverload] = []
_kernels: frozenset[str] = frozenset()
_module: ModuleType | None = None
_not_loaded: str | None = "dskernels._C has not been loaded yet"


def define(
    name: str, arguments_and_returns: str, library: torch.library.Library = LIBRARY, *, keep: bool = False
) -> torch._ops.OpOverload:
    """Defines operator ``name`` of a library and returns its only overload.

    Args:
        name: of the operator.
        arguments_and_returns: the rest of its schema.
        library: whose it is. Default: ``dskernels``.
        keep: as `kept_ops` has it: what it returns is small next to the work that it takes, so that who recomputes a
            block for backward should keep it. Default: False.
    """
    library.define(f"{name}{arguments_and_returns}", tags=_TAGS)
    _operators.append((library.ns, name))
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, library.ns), name).default
    if keep:
        _kept.append(overload)
    return overload


def kept_ops() -> tuple[torch._ops.OpOverload, ...]:
    """The operators whose results are worth keeping where a forward is computed again for backward.

    They are the attentions over whole sequences, of every backend: slow next to the size of what they return. Each
    operator registers this about itself. Not among them: backward operators, those without gradient, and
    `quantized_matmul`, whose results are most of what a block writes, and no dearer to recompute than those of
    ``nn.Linear``. The plain references of ``backend="reference"`` are no operators of their own, and so never kept.

    Returns:
        The operators, for example for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5 (keep
    what is small for its cost; their attention is recomputed as its scores are large, which here nobody writes).
    """
    return tuple(_kept)


# Looked up, not imported: dskernels needs torch alone, and importing Triton takes a while.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"


def why_no_triton(device: torch.device) -> str | None:
    """None if Triton's kernels can run on tensors of ``device``, else the reason."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and _TRITON_INTERPRETS):
        return None
    if device.type == "cpu":
        return "the tensors are on cpu, where Triton runs only in its interpreter (environment TRITON_INTERPRET=1)"
    return f"the tensors are on {device}"


def why_no_cuda(name: str, device: torch.device) -> str | None:
    """None if the CUDA kernel of operator ``name`` can run on tensors of ``device``, else the reason."""
    if device.type == "cpu":
        return None if f"{name}/emulated" in _kernels else "the tensors are on cpu"
    return why_no_kernel(name, "CUDA") if device.type == "cuda" else f"the tensors are on {device}"


def why_not_unasked(device: torch.device) -> str | None:
    """The reason why automatic choice passes by the kernels for GPUs, where they could run on ``device``, or None."""
    if device.type == "cpu":
        return "on cpu GPUs are emulated, which is for tests and serves only where it is asked for"
    return None


def load_compiled() -> None:
    """Imports ``dskernels._C``, which registers the compiled kernels; keeps the reason where that is not possible.

    Raises:
        ValueError: ``DSKERNELS_CPU_TIER`` names a tier that this build or this CPU lacks.
    """
    global _module, _not_loaded
    if importlib.util.find_spec("dskernels._C") is None:
        _not_loaded = "dskernels was installed without compiled kernels (no dskernels._C)"
        logger.info("%s: the plain PyTorch references serve", _not_loaded)
        return
    try:
        _module = importlib.import_module("dskernels._C")
    except ImportError as error:
        # Built, yet not loadable, is a fault that must be seen: a missing library, another Python.
        _not_loaded = f"dskernels._C is there but cannot be loaded: {error}"
        logger.warning("%s; the plain PyTorch references serve", _not_loaded)
        return
    _module.cpu_tier()
    _not_loaded = None
    find_kernels()


def find_kernels() -> None:
    """Takes note of the compiled kernels that libraries loaded so far have registered."""
    global _kernels
    kinds = {(NAMESPACE, "CPU"): "CPU", (CUDA_LIBRARY.ns, "CUDA"): "CUDA", (CUDA_LIBRARY.ns, "CPU"): "emulated"}
    _kernels = frozenset(
        f"{name}/{kind}"
        for (namespace, key), kind in kinds.items()
        for owner, name in _operators
        if owner == namespace and torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key)
    )


def compiled_module() -> ModuleType:
    """``dskernels._C``, where `why_no_kernel` has found nothing missing."""
    assert _module is not None
    return _module


def why_no_kernel(name: str, key: str) -> str | None:
    """None if a compiled kernel of operator ``name`` is loaded for dispatch key ``key``, else the reason."""
    if f"{name}/{key}" in _kernels:
        return None
    return _not_loaded or f"dskernels._C was built without a {key} kernel for {name}"


def build_info() -> dict[str, Any]:
    """Describes what was built and loaded.

    Returns:
        A dictionary with ``version`` (of dskernels), ``torch`` (the running version), ``compiled`` (what
        ``dskernels._C`` says of itself: compiler, CPU tiers, CUDA architectures; None without it), ``cpu_tier`` (the
        tier in use, or None), ``not_loaded`` (why there is no ``dskernels._C``, or None) and ``kernels`` (the
        compiled kernels that are registered, as ``"<operator>/<dispatch key>"``).
    """
    from dskernels import __version__

    return {
        "version": __version__,
        "torch": torch.__version__,
        "compiled": _module.build_info() if _module else None,
        "cpu_tier": _module.cpu_tier() if _module else None,
        "not_loaded": _not_loaded,
        "kernels": sorted(_kernels),
    }


def empty_in_layout_of(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A new ``[B, H, N, D]`` tensor of ``like``'s dtype and device, laid out in memory as ``like`` is.

    The one layout rule: with ``like.stride(1) < like.stride(2)`` the heads of a token lie together, as they do after
    a ``[B, N, H * D]`` projection, and the result is allocated as ``[B, N, H, D]`` and returned transposed; else it is
    contiguous. So whoever comes from such a projection gets the result back without a copy.
    """
    batch, heads, length, width = shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, length, heads, width)).transpose(1, 2)
    return like.new_empty((batch, heads, length, width))


def to_layout_of(like: Tensor, result: Tensor) -> Tensor:
    """``result`` under the rule of `empty_in_layout_of`; differentiable, and no copy where it lies so already."""
    if like.stride(1) < like.stride(2):
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()


def _has_autocast(device: str) -> bool:
    if torch.compiler.is_compiling():
        # The Dynamo of torch 2.11 cannot trace the question. Of the devices one compiles for, only meta has none.
        return device != "meta"
    return torch.amp.is_autocast_available(device)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype where autocast is on for their device; float64 is left alone, as in torch."""
    device = tensors[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def autocast_disabled(device: str) -> contextlib.AbstractContextManager[Any]:
    """Keeps autocast from lowering the precision of what a reference computes on purpose in float32."""
    if not _has_autocast(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
