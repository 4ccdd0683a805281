"""Xavier initialisation of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsaccel.modules import WindowAttention
from dskernels.checks import is_number, wrong_value

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# What models call a linear layer of queries, keys and values in one.
_QKV = ("qkv", "qkv_proj", "in_proj_qkv", "query_key_value", "Wqkv")


@dataclass(frozen=True)
class XavierInit:
    """What `xavier_` did; ``print`` lists it.

    Attributes:
        drawn: name of each weight that was drawn, as in ``model.named_parameters()``, and in how many parts.
        zeroed: names of the biases that were set to 0.
        left: name and reason of every other parameter.
    """

    drawn: dict[str, int]
    zeroed: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.drawn)} weights drawn, {len(self.zeroed)} biases zeroed, {len(self.left)} left"]
        lines += [f"  drew {name}" + (f" in {n} parts" if n > 1 else "") for name, n in self.drawn.items()]
        lines += [f"  left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def xavier_(
    model: nn.Module,
    *,
    distribution: str = "normal",
    gain: float = 1.0,
    fused: Mapping[str, Sequence[int]] | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
    generator: torch.Generator | None = None,
) -> XavierInit:
    """Draws the weights of linear and convolutional layers anew and sets their biases to 0, in place.

    ``Var(w) = gain^2 * 2 / (fan_in + fan_out)``, which keeps activations and gradients at their size through linear
    layers. Norms, embeddings, weights that are tied to an embedding, and all other parameters stay as they are; the
    report names them. What a model does beyond that, such as smaller weights at the end of residual branches, is lost.

    A weight that holds several projections is drawn part by part, each by its own fans: the queries, keys and values of
    `nn.MultiheadAttention`, of `dsaccel.modules.WindowAttention`, and of linear layers called ``qkv`` (``qkv_proj``,
    ``in_proj_qkv``, ``query_key_value``, ``Wqkv``) with three times as many outputs as inputs; the groups of a
    convolution.

    Args:
        model: any module.
        distribution: ``"normal"`` or ``"uniform"``. Default: ``"normal"``.
        gain: factor of the standard deviation, positive. Default: 1.
        fused: rows of each part of further linear layers, by the last part of their name, for example
            ``{"gate_up_proj": (h, h)}``. Default: none.
        filter: ``filter(name, module)`` says whether to initialise a layer. Default: all.
        generator: on the device of the weights. Default: torch's own.

    Returns:
        Which weights were drawn, which biases zeroed, and which parameters left and why.

    Raises:
        ValueError: ``distribution`` is neither of the two, ``gain`` is not positive, or the rows of ``fused`` do not
            add up to those of a weight; the model is then as it was.

    Source: Glorot and Bengio, "Understanding the Difficulty of Training Deep Feedforward Neural Networks", 2010,
    equation 12 (normal: the variance alone) and 16 (uniform).
    """
    if distribution not in ("normal", "uniform"):
        raise wrong_value("distribution", "one of 'normal', 'uniform'", repr(distribution))
    if not is_number(gain) or not gain > 0:
        raise wrong_value("gain", "a positive number", gain)
    draw = nn.init.xavier_normal_ if distribution == "normal" else nn.init.xavier_uniform_
    rows_of: dict[int, Sequence[int]] = {
        id(m.qkv): _window_rows(m) for m in model.modules() if isinstance(m, WindowAttention)
    }
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    views: dict[str, Sequence[Tensor]] = {}
    biases: dict[str, Tensor] = {}
    left: dict[str, str] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        wanted = filter is None or filter(name, module)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full_name = f"{name}.{key}" if name else key
            reason = _why_left(module, key, parameter)
            if reason is None and id(parameter) in embeddings:
                reason = "it is tied to an embedding"
            if reason is None and not wanted:
                reason = "the filter says so"
            if reason is not None:
                left[full_name] = reason
            elif key.endswith("bias"):
                biases[full_name] = parameter
            else:
                rows = rows_of.get(id(module))
                if rows is None and isinstance(module, nn.Linear):
                    rows = (fused or {}).get(name.rpartition(".")[2])
                views[full_name] = _parts(module, full_name, parameter, rows)
    # Only now, so that an error leaves the model as it was.
    for parts in views.values():
        for part in parts:
            draw(part, gain, generator)
    for bias in biases.values():
        nn.init.zeros_(bias)
    return XavierInit({name: len(parts) for name, parts in views.items()}, tuple(biases), left)


def _why_left(module: nn.Module, key: str, parameter: Tensor) -> str | None:
    of_attention = isinstance(module, nn.MultiheadAttention) and key not in ("bias_k", "bias_v")
    if not (isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or of_attention) or not key.endswith(("weight", "bias")):
        return f"it belongs to {type(module).__name__}"
    if isinstance(parameter, nn.UninitializedParameter):
        return "it has no shape yet"
    if parameter.is_meta:
        return "it is on the meta device"
    if not parameter.is_floating_point():
        return f"it is {parameter.dtype}"
    if parameter.numel() == 0:
        return "it is empty"
    return None


def _window_rows(attention: WindowAttention) -> Sequence[int]:
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    return [count * attention.head_dim for count in heads]


def _parts(module: nn.Module, name: str, weight: Tensor, rows: Sequence[int] | None) -> Sequence[Tensor]:
    # Views of the weight that are drawn for themselves.
    if rows is not None:
        if sum(rows) != weight.shape[0] or min(rows) < 1:
            raise wrong_value("fused", f"positive rows for {name} that add up to {weight.shape[0]}", list(rows))
        return torch.split(weight, list(rows))
    count: int = 1
    if isinstance(module, _CONVOLUTIONS):
        count = module.groups
    elif isinstance(module, nn.MultiheadAttention):
        count = 3 if name.endswith("in_proj_weight") else 1
    elif weight.shape[0] == 3 * weight.shape[1] and name.removesuffix(".weight").rpartition(".")[2] in _QKV:
        count = 3
    return torch.chunk(weight, count)
