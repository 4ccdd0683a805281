"""Puts windowed attention in the place of the attention of a model that is there already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from dsaccel.modules.multihead import WindowMultiheadAttention, why_not_windowed
from dsaccel.modules.rotary import RotaryEmbedding

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass(frozen=True)
class ReplacedAttention:
    """What `replace_attention` did; ``print`` lists it.

    Attributes:
        replaced: names of the modules that were replaced, as in ``model.named_modules()``.
        kept: name and reason of every `nn.MultiheadAttention` that was not.
    """

    replaced: tuple[str, ...]
    kept: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.kept)} kept"]
        lines += [f"  replaced {name}" for name in self.replaced]
        lines += [f"  kept {name or '(the model itself)'}: {reason}" for name, reason in self.kept.items()]
        return "\n".join(lines)


def replace_attention(
    model: nn.Module,
    *,
    window: tuple[int | None, int | None],
    rope: RotaryEmbedding | None = None,
    filter: Callable[[str, nn.MultiheadAttention], bool] | None = None,
    ignore_dropout: bool = False,
) -> ReplacedAttention:
    """Replaces each `nn.MultiheadAttention` in ``model`` by a `WindowMultiheadAttention`, in place.

    Parameters stay the same objects under the same names: optimizers and checkpoints are not disturbed. A module that
    is used in several places is replaced in all. Whether a module is used as self-attention shows only when it is
    called: one that is called with a ``key`` other than its ``query`` then raises; keep such ones by ``filter``. Those
    of `nn.TransformerDecoderLayer` are known and kept.

    Args:
        model: any module; `nn.TransformerEncoder` and the like go on working, in training and inference.
        window: ``(left, right)``, inclusive, as in `dskernels.window_attention`.
        rope: rotary positions, shared by all. Default: none.
        filter: ``filter(name, module)`` says whether to replace a module. Default: all.
        ignore_dropout: replace modules with dropout of their attention weights, too, and leave that dropout out;
            `nn.TransformerEncoderLayer` has 0.1 unless told otherwise. Default: False, they are kept.

    Returns:
        Which modules were replaced, and which were not and why.

    Raises:
        ValueError: ``rope`` was made for heads of another size than those of a module to be replaced.
    """
    fresh: dict[nn.Module, WindowMultiheadAttention] = {}
    kept: dict[str, str] = {}
    places: list[tuple[str, nn.Module, str]] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        parent_name, _, attribute = name.rpartition(".")
        parent = modules[parent_name] if name else None
        reason = _why_kept(module, parent, attribute, ignore_dropout)
        if reason is None and filter is not None and not filter(name, module):
            reason = "the filter says so"
        if reason is not None or parent is None:
            kept[name] = reason or "it has no parent; see WindowMultiheadAttention.from_multihead_attention"
            continue
        if module not in fresh:
            fresh[module] = WindowMultiheadAttention.from_multihead_attention(
                module, window=window, rope=rope, ignore_dropout=ignore_dropout
            )
        places.append((name, parent, attribute))
    # Only now, so that an error leaves the model as it was.
    for _, parent, attribute in places:
        setattr(parent, attribute, fresh[getattr(parent, attribute)])
    _keep_dense(model)
    return ReplacedAttention(tuple(name for name, _, _ in places), kept)


def _why_kept(
    module: nn.MultiheadAttention, parent: nn.Module | None, attribute: str, ignore_dropout: bool
) -> str | None:
    if isinstance(module, WindowMultiheadAttention):
        return "it is windowed already"
    if type(module) is not nn.MultiheadAttention:
        return f"it is a {type(module).__name__}, which may compute something else"
    if isinstance(parent, nn.TransformerDecoderLayer) and attribute == "multihead_attn":
        return "it is cross-attention"
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    return why_not_windowed(module, ignore_dropout)


def _keep_dense(model: nn.Module) -> None:
    # In inference the encoder hands its layers nested tensors of what is not padding, for their fused path, which is
    # not taken any more.
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, WindowMultiheadAttention) for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False
