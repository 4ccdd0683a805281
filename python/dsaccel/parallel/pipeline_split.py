"""A language model cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.modules import SlidingWindowLM
from dskernels.checks import is_integer, is_number, wrong_type, wrong_value


class StageBlocks(nn.Module):
    """Consecutive blocks of a model, each under the number it has there: ``blocks.3.norm1.weight`` keeps its name."""

    def __init__(self, blocks: dict[int, nn.Module]) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)

    def __iter__(self) -> Iterator[nn.Module]:
        # Not `children`, which leaves out a block that stands here twice.
        return (block for block in self._modules.values() if block is not None)

    def __len__(self) -> int:
        return len(self._modules)


class LanguageModelStage(nn.Module):
    """What `split_stages` returns: some blocks, before them the embedding in the first stage, after them the norm and
    the head in the last.

    Args:
        blocks: by their numbers in the whole model.
        embed, norm: the attributes.
        is_first: whether it takes tokens.

    Attributes:
        embed: of the first and the last stage, else None.
        blocks: an iterable module.
        norm: of the last stage, else None.
        tied: names of parameters that the first and the last stage each have: ``("embed.weight",)`` there.
    """

    def __init__(
        self, blocks: dict[int, nn.Module], embed: nn.Embedding | None, norm: nn.Module | None, *, is_first: bool
    ) -> None:
        super().__init__()
        self.is_first = is_first
        self.embed = embed
        self.blocks = StageBlocks(blocks)
        self.norm = norm
        is_both = is_first and norm is not None
        self.tied: tuple[str, ...] = () if embed is None or is_both else ("embed.weight",)

    def forward(self, x: Tensor) -> Tensor:
        """From tokens ``[B, N]`` in the first stage, else from what the stage before gave, ``[B, N, C]``, to what the
        stage after takes, and in the last to logits ``[B, N, V]``.
        """
        if self.is_first and self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.embed is not None:
            return F.linear(self.norm(x), self.embed.weight)
        # What is sent has to be contiguous.
        return x.contiguous()


def layers_per_stage(
    num_layers: int, count: int, *, input_weight: float = 0.0, output_weight: float = 0.0
) -> list[int]:
    """How many layers each of ``count`` stages gets, so that the most loaded has as little as can be.

    Each stage gets one layer, and each further layer goes to the stage with the least so far, of several to the first:
    5 over 4 are ``[2, 1, 1, 1]``. All layers cost the same, so no other division has a smaller maximum.

    Args:
        num_layers: at least ``count``.
        count: number of stages.
        input_weight: what the embedding costs, in layers. Default: nothing.
        output_weight: what the norm, the head and the loss cost, in layers. A head of ``V`` tokens costs as much as
            about ``V / (12 * dim)`` layers. Default: nothing.

    Raises:
        TypeError, ValueError: an argument is not a number as above.
    """
    for name, value in (("num_layers", num_layers), ("count", count)):
        if not is_integer(value):
            raise wrong_type(name, "an integer", value)
    if count < 1:
        raise wrong_value("count", "at least 1", count)
    if num_layers < count:
        raise wrong_value("count", f"at most a stage for each of {num_layers} layers", count)
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        if not is_number(weight) or not weight >= 0:
            raise wrong_value(name, "a number that is not negative", weight)
    layers = [1] * count
    extra = [0.0] * count
    extra[0] += input_weight
    extra[-1] += output_weight
    for _ in range(num_layers - count):
        layers[min(range(count), key=lambda stage: layers[stage] + extra[stage])] += 1
    return layers


def split_stages(
    model: nn.Module, count: int, index: int, *, input_weight: float = 0.0, output_weight: float = 0.0
) -> LanguageModelStage:
    """Stage ``index`` of ``count`` of a model: a module over its own blocks and parameters, nothing is copied.

    Parameters keep their names (``blocks.3.attn.qkv.weight``). The head is the embedding, so the first and the last
    stage both have ``embed.weight``; in two processes these are two copies, which `Pipeline` keeps equal.

    Args:
        model: a `SlidingWindowLM`. The stages of another model are modules of your own: `Pipeline` takes any.
        count: number of stages.
        index: which one.
        input_weight, output_weight: as in `layers_per_stage`.

    Raises:
        TypeError: the model is of another kind, or a number is none.
        ValueError: there are fewer blocks than stages, no such stage, or blocks of two stages share a parameter.
    """
    if not isinstance(model, SlidingWindowLM):
        raise wrong_type("model", "a SlidingWindowLM", model)
    layers = layers_per_stage(len(model.blocks), count, input_weight=input_weight, output_weight=output_weight)
    if not is_integer(index):
        raise wrong_type("index", "an integer", index)
    if not 0 <= index < count:
        raise wrong_value("index", f"0 to {count - 1}", index)
    starts = [sum(layers[:stage]) for stage in range(count)]
    parts = [range(start, start + size) for start, size in zip(starts, layers, strict=True)]
    _check_apart(model.blocks, parts)
    is_first, is_last = index == 0, index == count - 1
    return LanguageModelStage(
        {number: model.blocks[number] for number in parts[index]},
        model.embed if is_first or is_last else None,
        model.norm if is_last else None,
        is_first=is_first,
    )


def stage_indices(rank: int, ranks: int, stages_per_rank: int = 1) -> list[int]:
    """The stages of a rank of a pipeline: ``rank``, ``rank + ranks``, ``rank + 2 * ranks``, ...

    Args:
        rank: in the pipeline.
        ranks: of the pipeline.
        stages_per_rank: how many. Default: 1.
    """
    return [rank + ranks * turn for turn in range(stages_per_rank)]


def _check_apart(blocks: nn.ModuleList, parts: list[range]) -> None:
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for number in part:
            for name, parameter in blocks[number].named_parameters(f"blocks.{number}"):
                other, theirs = seen.setdefault(parameter, (stage, name))
                if other != stage:
                    got = f"{theirs} in stage {other}, the same as {name} in stage {stage}"
                    raise wrong_value("model", "blocks of different stages to share no parameter", got)
