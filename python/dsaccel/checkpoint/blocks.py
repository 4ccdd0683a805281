"""Blocks that are computed again in backward instead of being remembered."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dskernels
from dsaccel.checkpoint._saved import Kept, counters
from dsaccel.checkpoint.offload import offload_activations
from dsaccel.checkpoint.policy import BlockPolicy
from dsaccel.modules import SwinBlock, TransformerBlock
from dskernels.checks import wrong_type, wrong_value

Blocks = Iterable[nn.Module] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class CheckpointedBlocks:
    """What `checkpoint_blocks` did; ``print`` lists it.

    Attributes:
        policy: what was asked for.
        recomputed: names of the blocks that are recomputed, as in ``model.named_modules()``.
        kept: names of the other blocks.
    """

    policy: BlockPolicy
    recomputed: tuple[str, ...]
    kept: tuple[str, ...]
    _changed: tuple[nn.Module, ...]

    def remove(self) -> None:
        """Undoes the call; a second time does nothing."""
        for block in self._changed:
            if isinstance(vars(block).get("forward"), BlockForward):
                del block.forward

    def __str__(self) -> str:
        lines = [f"{self.policy}: {len(self.recomputed)} blocks recomputed, {len(self.kept)} kept"]
        lines += [f"  recomputed {name}" for name in self.recomputed]
        return "\n".join(lines + [f"  kept {name}" for name in self.kept])


def checkpoint_blocks(
    model: nn.Module,
    policy: str | BlockPolicy,
    *,
    blocks: Blocks | None = None,
    offload: offload_activations | None = None,
) -> CheckpointedBlocks:
    """Lets ``model`` forget what blocks compute in forward, and compute it again in backward; in place.

    `torch.utils.checkpoint.checkpoint` with ``use_reentrant=False`` around the ``forward`` of each block. Modules,
    their classes, parameters and the state dict stay as they are, and so do results and gradients to the last bit:
    the states of the random generators (dropout) and autocast are those of the forward. Without gradients, as under
    ``torch.no_grad()``, blocks run as before. A copy of the model, by `copy.deepcopy` or pickle, is checkpointed, too.

    What a block does besides its result it does twice: a BatchNorm updates its statistics twice, a count counts twice.
    Hooks on a block itself run once. With ``"selective"``, backward runs once (no ``retain_graph=True``).

    Args:
        model: any module. Call this before ``fully_shard``, DistributedDataParallel or ``torch.compile``.
        policy: ``"none"``, ``"full"``, ``"every:k"`` or ``"selective"``: see `BlockPolicy`.
        blocks: modules inside ``model``, none inside another, or ``blocks(name, module)``, which says what is one.
            They count in the order of ``model.named_modules()``. Default: each `TransformerBlock` and `SwinBlock`;
            in a model without, the elements of each outermost ``nn.ModuleList`` of at least two modules of one class.
        offload: under which the blocks run, those that are not recomputed too; see `offload_activations`.
            Default: none.

    Returns:
        Which blocks are recomputed; its ``remove()`` undoes the call.

    Raises:
        TypeError: ``policy``, ``blocks`` or ``offload`` is of another type.
        ValueError: the policy is unknown; there is no block, one is not in the model, is inside another, or has a
            ``forward`` that was replaced before, by this function for one: call its ``remove()`` first.

    Source: as `BlockPolicy`.
    """
    parsed = BlockPolicy.parse(policy)
    if offload is not None and not isinstance(offload, offload_activations):
        raise wrong_type("offload", "an offload_activations or None", offload)
    found = find_blocks(model, blocks)
    for name, block in found.items():
        if "forward" in vars(block):
            by = " by checkpoint_blocks: call remove() first" if isinstance(block.forward, BlockForward) else ""
            raise wrong_value("blocks", "modules with the forward of their class", f"{name!r}, replaced{by}")
    again = [name for index, name in enumerate(found) if parsed.kind != "none" and index % parsed.every == 0]
    changed = []
    for name, block in found.items():
        if name in again or offload is not None:
            # No Module, so that it is no child; in the instance, so that the class and what it says of itself stay.
            vars(block)["forward"] = BlockForward(block, parsed.kind if name in again else "none", offload)
            changed.append(block)
    kept = tuple(name for name in found if name not in again)
    return CheckpointedBlocks(parsed, tuple(again), kept, tuple(changed))


def find_blocks(model: nn.Module, blocks: Blocks | None) -> dict[str, nn.Module]:
    """The blocks of ``model`` by name; arguments and errors as in `checkpoint_blocks`."""
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a module", model)
    modules = dict(model.named_modules())
    found: dict[str, nn.Module]
    if blocks is None:
        found = {name: module for name, module in modules.items() if isinstance(module, (TransformerBlock, SwinBlock))}
        found = found or _repeated(modules)
    elif callable(blocks) and not isinstance(blocks, nn.Module):
        found = {name: module for name, module in modules.items() if blocks(name, module)}
    elif isinstance(blocks, Iterable):
        wanted = list(blocks)
        missing = next((block for block in wanted if not any(block is module for module in modules.values())), None)
        if missing is not None:
            raise wrong_value("blocks", "modules of the model", repr(missing))
        found = {name: module for name, module in modules.items() if any(module is block for block in wanted)}
    else:
        raise wrong_type("blocks", "modules or a function of name and module", blocks)
    if not found:
        raise wrong_value("blocks", "at least one in the model", "none; name them by blocks=")
    inside = {id(part): name for name, block in found.items() for part in block.modules() if part is not block}
    for name, block in found.items():
        if id(block) in inside:
            raise wrong_value("blocks", "none inside another", f"{name!r} inside {inside[id(block)]!r}")
    return found


def _repeated(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        # What lies inside a block comes after it, and is part of it.
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            classes = {type(part) for part in module}
            # Lists of lists are called by nobody; the inner ones count.
            if len(module) > 1 and len(classes) == 1 and not classes & {nn.ModuleList, nn.ModuleDict}:
                found.update({f"{name}.{key}" if name else key: part for key, part in module.named_children()})
    return found


_COSTLY = dskernels.kept_ops()
_SELECTIVE: dict[str, Any] = {
    "context_fn": functools.partial(checkpoint.create_selective_checkpoint_contexts, list(_COSTLY))
}
# Torch 2.14 hands what it keeps of a block to hooks on saved tensors, where asked to; before, no hook sees it.
_HOOKED = "respect_saved_tensors_hooks" in inspect.signature(checkpoint.checkpoint).parameters
if _HOOKED:
    _SELECTIVE["respect_saved_tensors_hooks"] = True


class BlockForward:
    """Stands in an instance where its class has its ``forward``."""

    # Holds the block itself, not a bound method, so that copy and pickle lead to the copy.

    def __init__(self, block: nn.Module, kind: str, offload: offload_activations | None) -> None:
        self.block = block
        self.kind = kind
        self.offload = offload
        self.preserve_rng_state = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.block).forward
        if not torch.is_grad_enabled():
            return forward(self.block, *args, **kwargs)
        with self.offload or contextlib.nullcontext():
            if self.kind == "none":
                return forward(self.block, *args, **kwargs)
            run, kwargs["preserve_rng_state"] = functools.partial(forward, self.block), self.preserve_rng_state
            if self.kind == "full":
                return checkpoint.checkpoint(run, *args, use_reentrant=False, **kwargs)
            # A compiled graph keeps what it keeps as saved tensors.
            unseen = not (_HOOKED or torch.compiler.is_compiling()) and counters
            with _Watch(run) if unseen else contextlib.nullcontext():
                return checkpoint.checkpoint(run, *args, use_reentrant=False, **_SELECTIVE, **kwargs)


class _Watch(TorchDispatchMode):
    # Tells the counters what torch keeps of a block unseen by hooks: as long as `run`, which it calls in backward.

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._kept: list[Kept] = []
        weakref.finalize(run, self._kept.clear)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op in _COSTLY:
            self._kept.extend(Kept(x) for x in tree_leaves(out))
        return out
