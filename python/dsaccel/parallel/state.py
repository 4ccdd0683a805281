"""Checkpoints that do not depend on the plan under which they were written."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from dsaccel.parallel.data import take_apart
from dsaccel.parallel.parallelize import ParallelModel
from dsaccel.parallel.tensor import canonical_layout
from dskernels.checks import wrong_value


def save_state(
    path: str | os.PathLike[str], parts: ParallelModel, optimizer: Optimizer | None = None, extra: Any = None
) -> None:
    """Writes a model, the state of its optimizer and what else belongs to a run; all processes call it.

    The format is that of `torch.distributed.checkpoint`, in which each process writes what it has. Names and layouts
    are those of the model before it was made parallel: ``model.<name>``, ``optimizer.<slot>.<name>`` for each slot of a
    parameter's state (``exp_avg``), ``groups.<name>`` for the options of its group, and ``extra``. So `load_state`
    reads it under any other plan.

    Args:
        path: a folder on a file system that all processes see. What is there is replaced when the new one is complete.
        parts: of `parallelize`.
        optimizer: of ``parts.optimizer``. Default: none.
        extra: what the first process wants to have back, of types that ``torch.load(weights_only=True)`` takes:
            numbers, texts, tensors, lists and dictionaries. Default: None.
    """
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in _tensors(parts, saved=True)}
    if optimizer is not None:
        for name, slot, value in _slots(parts, optimizer):
            state[f"optimizer.{slot}.{name}"] = value
        for name, options in _options(parts, optimizer):
            state[f"groups.{name}"] = _packed(options)
    if parts.is_main:
        state["extra"] = _packed(extra)
    path = Path(path)
    part, old = (path.with_name(path.name + ending) for ending in (".part", ".old"))
    if parts.is_main:
        # Of a process that died here, perhaps of more processes than there are now.
        shutil.rmtree(part, ignore_errors=True)
    _wait(parts)
    with _quiet():
        save(state, checkpoint_id=part)
    if parts.is_main:
        # A moment without a checkpoint at `path` has one at `old`.
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
        os.replace(part, path)
        shutil.rmtree(old, ignore_errors=True)
    _wait(parts)


@torch.no_grad()
def load_state(path: str | os.PathLike[str], parts: ParallelModel, optimizer: Optimizer | None = None) -> Any:
    """Puts a model and its optimizer where `save_state` was called, under any plan; all processes call it.

    Args:
        path: as `save_state` got it.
        parts: of `parallelize`, a model of the same names and shapes.
        optimizer: of ``parts.optimizer``: of the same class, and groups of the same parameters. Default: its state is
            left alone.

    Returns:
        ``extra``, in every process.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the checkpoint has no state of an optimizer, or lacks a tensor of the model, or has one of another
            shape; nothing was changed then.
    """
    path = Path(path)
    if not path.exists():
        path = path.with_name(path.name + ".old")
    if not (path / ".metadata").exists():
        raise FileNotFoundError(f"path: expected a checkpoint of save_state, got {path.with_suffix('')}")
    reader = FileSystemReader(path)
    stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    targets = dict(_tensors(parts, saved=False))
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in targets.items()} | {"extra": b""}
    _check_shapes(targets, stored)
    if optimizer is not None:
        state |= _templates(parts, optimizer, stored)
    with _quiet():
        load(state, storage_reader=reader)
    layout = _layout(parts)
    for name, parameter in parts.named_parameters():
        if name in layout:
            parameter.copy_(layout[name][1](targets[name]))
    if optimizer is not None:
        _restore(parts, optimizer, state)
    _wait(parts)
    return _unpacked(state["extra"])


def _tensors(parts: ParallelModel, saved: bool) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers here; copies are read but not written."""
    for module in parts.modules:
        take_apart(module)
    layout = _layout(parts)
    copies = parts.copies if saved else {}
    parameters = dict(parts.named_parameters())
    for name, parameter in parameters.items():
        if name not in copies:
            # A new tensor where the layout is another, else the parameter itself, which is then read into.
            yield name, layout[name][0](parameter) if name in layout else parameter.detach()
    for stage in parts.stages:
        known = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        for name, value in stage.state_dict().items():
            if not isinstance(value, Tensor):
                raise wrong_value(
                    "parts", "a model whose state dict holds tensors alone", f"{name} ({type(value).__name__})"
                )
            if name not in known:
                yield name, value


def _check_shapes(targets: dict[str, Tensor], stored: dict[str, Any]) -> None:
    for name, tensor in targets.items():
        found = stored.get(f"model.{name}")
        shape = list(found.size) if isinstance(found, TensorStorageMetadata) else None
        if shape != list(tensor.shape):
            raise wrong_value("path", f"a checkpoint with {name} of shape {list(tensor.shape)}", shape)


def _layout(parts: ParallelModel) -> dict[str, Any]:
    return {name: both for stage in parts.stages for name, both in canonical_layout(stage).items()}


def _inner(optimizer: Optimizer) -> Optimizer:
    """What holds the state: of a sharded optimizer the part that is here."""
    inner: Optimizer = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return inner


def _slots(parts: ParallelModel, optimizer: Optimizer) -> Iterator[tuple[str, str, Any]]:
    layout, state, copies = _layout(parts), _inner(optimizer).state, parts.copies
    for name, parameter in parts.named_parameters():
        for slot, value in state.get(parameter, {}).items() if name not in copies else ():
            follows = isinstance(value, Tensor) and value.shape == parameter.shape and name in layout
            yield (
                name,
                slot,
                layout[name][0](value) if follows else value if isinstance(value, Tensor) else _packed(value),
            )


def _options(parts: ParallelModel, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {id(parameter): name for name, parameter in parts.named_parameters()}
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        yield from ((names[id(parameter)], options) for parameter in group["params"])


def _templates(parts: ParallelModel, optimizer: Optimizer, stored: dict[str, Any]) -> dict[str, Any]:
    """What to read the state of the parameters into that ``optimizer`` holds here."""
    names = {id(parameter): name for name, parameter in parts.named_parameters()}
    templates: dict[str, Any] = {f"groups.{name}": b"" for name in names.values() if f"groups.{name}" in stored}
    if names and not templates:
        raise wrong_value("optimizer", "None for a checkpoint without an optimizer's state", type(optimizer).__name__)
    slots: dict[str, list[str]] = {}
    for key in stored:
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            slot, _, name = rest.partition(".")
            slots.setdefault(name, []).append(slot)
    for group in _inner(optimizer).param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for slot in slots.get(name, []):
                key = f"optimizer.{slot}.{name}"
                templates[key] = _template(parameter, stored[key])
    return templates


def _template(parameter: Tensor, stored: Any) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return b""
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)


def _restore(parts: ParallelModel, optimizer: Optimizer, read: dict[str, Any]) -> None:
    layout, inner = _layout(parts), _inner(optimizer)
    names = {id(parameter): name for name, parameter in parts.named_parameters()}
    of_parameters: dict[str, dict[str, Any]] = {}
    for key, value in read.items():
        kind, _, rest = key.partition(".")
        slot, _, name = rest.partition(".")
        if kind == "optimizer":
            found = value if isinstance(value, Tensor) else _unpacked(value)
            follows = name in layout and isinstance(found, Tensor) and found.dim() > 0
            of_parameters.setdefault(name, {})[slot] = layout[name][1](found) if follows else found
    for each in {id(optimizer): optimizer, id(inner): inner}.values():
        for group in each.param_groups:
            known = (read.get(f"groups.{names[id(parameter)]}") for parameter in group["params"])
            packed = next((options for options in known if options is not None), None)
            # A group of which nothing is here keeps its options, which nothing uses.
            group.update({} if packed is None else _unpacked(packed))
    held = inner.state_dict()
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    # torch's own knows which slots follow the parameter's dtype and device.
    held["state"] = {
        index: of_parameters[names[id(parameter)]]
        for index, parameter in enumerate(parameters)
        if names[id(parameter)] in of_parameters
    }
    inner.load_state_dict(held)


def _packed(value: Any) -> bytes:
    # Whole: torch.distributed.checkpoint would take dictionaries apart.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)


def _wait(parts: ParallelModel) -> None:
    if parts.mesh is not None:
        torch.distributed.barrier()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process is what is meant where there is no torch.distributed.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
