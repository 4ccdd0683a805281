"""What tensor parallelism can split; everything is looked at before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dsaccel.modules import (
    GeluMLP,
    SlidingWindowLM,
    SwiGLU,
    SwinAttention,
    TransformerBlock,
    WindowAttention,
    WindowMultiheadAttention,
)
from dskernels.checks import wrong_type, wrong_value


def is_decoder(module: nn.Module) -> bool:
    """Whether blocks follow each other in ``module`` as in `SlidingWindowLM`: that, or a part such as a stage of it."""
    blocks = module._modules.get("blocks")
    if blocks is None or not all(isinstance(block, TransformerBlock) for block in blocks.children()):
        return False
    # What else there is may add something plain to what is sharded between the blocks.
    names = {name for name, _ in module.named_children()}
    only_known = names <= {"embed", "blocks", "norm"} and not list(module.parameters(recurse=False))
    return only_known or isinstance(module, SlidingWindowLM)


def check_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raises what `tensor_parallel` says it raises."""
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a module", model)
    if not isinstance(mesh, DeviceMesh):
        raise wrong_type("mesh", "a DeviceMesh", mesh)
    if mesh.ndim != 1:
        raise wrong_value("mesh", "one dimension, as of mesh['tp']", f"{mesh.ndim}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            expected = "plain parameters, as tensor_parallel comes before what else splits them"
            raise wrong_value("model", expected, f"a DTensor as {name}")
    # Which layers are split, and how: whoever shares a parameter has to agree.
    roles: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        roles.update(_checked_parts(f"{name}." if name else "", module, mesh.size()))
    if not roles:
        raise wrong_value(
            "model", "a WindowAttention, SwiGLU, GeluMLP or what is made of them", f"{type(model).__name__} without one"
        )
    _check_sharing(model, roles)


def _checked_parts(prefix: str, module: nn.Module, ranks: int) -> dict[str, str]:
    """The role of each layer of ``module`` that is split, by name."""
    if isinstance(module, (SwinAttention, WindowMultiheadAttention)):
        expected = f"no {type(module).__name__}, which is not split over ranks yet"
        raise wrong_value("model", expected, f"one as {prefix[:-1] or 'the model itself'}")
    if isinstance(module, WindowAttention):
        _check_linears(prefix, module, ("qkv", "proj"))
        _check_multiple(prefix + "num_heads", module.num_heads, ranks)
        _check_multiple(prefix + "num_kv_heads", module.num_kv_heads, ranks)
        return {f"{prefix}qkv": "qkv", f"{prefix}proj": "rows"}
    if isinstance(module, (SwiGLU, GeluMLP)):
        names = ("gate_proj", "up_proj", "down_proj") if isinstance(module, SwiGLU) else ("fc1", "fc2")
        _check_linears(prefix, module, names)
        _check_multiple(f"{prefix}{names[-1]}.in_features", getattr(module, names[-1]).in_features, ranks)
        return {f"{prefix}{name}": "rows" if name == names[-1] else "columns" for name in names}
    if isinstance(module, TransformerBlock):
        _check_types(prefix, module, ("mlp",), (SwiGLU, GeluMLP))
        _check_types(prefix, module, ("attn",), (WindowAttention,))
        _check_types(prefix, module, ("norm1", "norm2"), (nn.RMSNorm, nn.LayerNorm))
        return {f"{prefix}norm1": "norm", f"{prefix}norm2": "norm"}
    return _checked_decoder(prefix, module, ranks) if is_decoder(module) else {}


def _checked_decoder(prefix: str, module: nn.Module, ranks: int) -> dict[str, str]:
    roles = {}
    if module._modules.get("embed") is not None:
        _check_types(prefix, module, ("embed",), (nn.Embedding,))
        embed = module.get_submodule("embed")
        _check_multiple(f"{prefix}embed.num_embeddings", embed.num_embeddings, ranks)  # type: ignore[arg-type]
        if embed.max_norm is not None:
            raise wrong_value("model", f"{prefix}embed.max_norm None", embed.max_norm)
        roles[f"{prefix}embed"] = "vocabulary"
    if module._modules.get("norm") is not None:
        _check_types(prefix, module, ("norm",), (nn.RMSNorm, nn.LayerNorm))
        roles[f"{prefix}norm"] = "norm"
    return roles


def _check_multiple(name: str, count: int, ranks: int) -> None:
    if count % ranks:
        raise wrong_value("model", f"{name} a multiple of {ranks} ranks", count)


def _check_linears(prefix: str, module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        linear = module.get_submodule(name)
        # A quantized layer, or one with adapters, has other parameters than these; a subclass computes something else.
        if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
            raise wrong_value("model", f"a plain nn.Linear as {prefix}{name}", _described(linear))


def _described(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    return type(module).__name__ + (f" of {type(weight).__name__}" if type(module) is nn.Linear else "")


def _check_types(prefix: str, module: nn.Module, names: Iterable[str], types: tuple[type[nn.Module], ...]) -> None:
    for name in names:
        part = module.get_submodule(name)
        if not isinstance(part, types):
            expected = " or ".join(type_.__name__ for type_ in types)
            raise wrong_value("model", f"{expected} as {prefix}{name}", type(part).__name__)


def _check_sharing(model: nn.Module, roles: dict[str, str]) -> None:
    owners: dict[int, tuple[str, str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        first, role = owners.setdefault(id(parameter), (owner, roles.get(owner)))
        if role != roles.get(owner):
            raise wrong_value("model", "parameters shared only by layers that are split alike", f"{first} and {owner}")
