"""Layers that share their parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

from dskernels.checks import is_integer, wrong_type, wrong_value

MODES = ("sequence", "cycle", "cycle_rev")


@dataclass(frozen=True)
class SharedBlocks:
    """What `share_blocks` did.

    Attributes:
        assignment: for each layer, the index of the layer whose module it is now.
        parameters_before: of what was given, each counted once.
        parameters_after: likewise.
    """

    assignment: tuple[int, ...]
    parameters_before: int
    parameters_after: int

    @property
    def saved(self) -> float:
        """By which part the parameters are fewer."""
        return 1 - self.parameters_after / self.parameters_before if self.parameters_before else 0.0

    def __str__(self) -> str:
        layers = " ".join(map(str, self.assignment))
        return (
            f"layers {layers}: {self.parameters_before:,} parameters became {self.parameters_after:,},"
            f" {self.saved:.1%} fewer"
        )


def share_blocks(model: nn.Module, groups: int, *, mode: str = "cycle", part: str | None = None) -> SharedBlocks:
    """Lets the layers of a model share ``groups`` sets of parameters, in place.

    Layers that share are one module that stands at several places, so there is one parameter, which every copy, state
    dict, optimizer and wrapper sees as one. Its gradient is the sum over the places. What each layer keeps per place,
    as the caches of `SlidingWindowLM`, stays apart. With ``N`` layers and ``M`` groups, layer ``i`` (from 0) has set

    - ``"sequence"``: ``i * M // N``, as 0 0 1 1 2 2;
    - ``"cycle"``: ``i % M``, as 0 1 2 0 1 2;
    - ``"cycle_rev"``: ``i % M``, but in the last ``M`` or fewer layers, the last cycle, ``M - 1 - i % M``: 0 1 2 2 1 0.

    Layers of one set have the parameters that the first of them had. Call it before the optimizer is made, and before
    what wraps or moves layers (DistributedDataParallel, ``fully_shard``, tensor parallelism).

    Args:
        model: an `nn.ModuleList` or `nn.Sequential` of ``N`` layers, or a module with one as ``blocks``.
        groups: ``M``, from 1 to ``N``.
        mode: one of the three. Default: ``"cycle"``.
        part: name of a submodule, as ``"attn"`` or ``"mlp"``: only this part of the layers is shared. Default: all.

    Returns:
        Which layer shares with which, and how many parameters that saves.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit, or layers that would share are not built alike; the model is then as it was.
            Compared are their printed forms, and the shapes and dtypes of their parameters and buffers.

    Sources: Takase and Kiyono, "Lessons on Parameter Sharing across Layers in Transformers", 2023, algorithm 1 (the
    modes; its sequence differs where M does not divide N); Lan et al., "ALBERT", 2020, section 3.1 (one set for all
    layers, and sharing of a part).
    """
    blocks = getattr(model, "blocks", None) if not isinstance(model, (nn.ModuleList, nn.Sequential)) else model
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise wrong_type("model", "a ModuleList or Sequential of layers, or a module with one as blocks", type(model))
    count = len(blocks)
    if not is_integer(groups):
        raise wrong_type("groups", "an integer", groups)
    if not 1 <= groups <= count:
        raise wrong_value("groups", f"a number from 1 to {count}, the layers", groups)
    assignment = _assignment(count, groups, mode)
    shared = [_part(blocks[index], index, part) for index in range(count)]
    for index, source in enumerate(assignment):
        _check_alike(shared[source], shared[index], source, index)
    before = unique_parameter_count(model)
    for index, source in enumerate(assignment):
        if part is None:
            blocks[index] = shared[source]
        else:
            parent, _, name = part.rpartition(".")
            setattr(blocks[index].get_submodule(parent), name, shared[source])
    return SharedBlocks(tuple(assignment), before, unique_parameter_count(model))


def unique_parameter_count(model: nn.Module) -> int:
    """Number of elements of all parameters of ``model``, those that several places share counted once.

    Sharded parameters (DTensor) count in full.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def shared_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with parameters that stand at several places of ``model``, without those inside them; in order.

    ``fully_shard`` them before the layers around them, and no layer twice::

        for module in dict.fromkeys((*shared_modules(model), *model.blocks)):
            fully_shard(module)
        fully_shard(model)
    """
    places: Counter[nn.Module] = Counter()
    for parent in model.modules():
        places.update(module for module in parent._modules.values() if module is not None)
    return [module for module in model.modules() if places[module] > 1 and next(module.parameters(), None) is not None]


def _assignment(count: int, groups: int, mode: str) -> list[int]:
    if mode == "sequence":
        sets = [index * groups // count for index in range(count)]
    elif mode == "cycle":
        sets = [index % groups for index in range(count)]
    elif mode == "cycle_rev":
        # The last cycle, which may be cut short, runs backwards.
        last = (count - 1) // groups * groups
        sets = [index % groups if index < last else groups - 1 - index % groups for index in range(count)]
    else:
        raise wrong_value("mode", f"one of {', '.join(map(repr, MODES))}", repr(mode))
    return [sets.index(number) for number in sets]


def _part(block: nn.Module, index: int, part: str | None) -> nn.Module:
    if part is None:
        return block
    if not isinstance(part, str) or not part:
        raise wrong_type("part", "the name of a submodule, or None", part)
    try:
        return block.get_submodule(part)
    except AttributeError:
        names = ", ".join(name for name, _ in block.named_children())
        raise wrong_value("part", f"a submodule of layer {index}, which has {names}", repr(part)) from None


def _check_alike(source: nn.Module, other: nn.Module, source_index: int, index: int) -> None:
    lines = zip(repr(source).splitlines(), repr(other).splitlines(), strict=False)
    differences = [f"{one.strip()} and {two.strip()}" for one, two in lines if one != two]
    found, expected = _described(other), _described(source)
    differences += [f"another {name}" for name in sorted({name for name, _ in found.items() ^ expected.items()})]
    if differences:
        raise wrong_value("model", f"layers {source_index} and {index}, which would share, to be alike", differences[0])


def _described(module: nn.Module) -> dict[str, tuple[object, ...]]:
    def described(x: Tensor) -> tuple[object, ...]:
        return tuple(x.shape), x.dtype, x.requires_grad

    return {name: described(x) for name, x in (*module.named_parameters(), *module.named_buffers())}
