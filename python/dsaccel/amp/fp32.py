"""Modules that go on computing in float32 when the model around them goes to half precision."""

from __future__ import annotations

import copyreg
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

_KEPT = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d),
)
# Models bring norms of their own, such as LlamaRMSNorm or FrozenBatchNorm2d, that share no base class.
_NORM_NAME = re.compile("(Layer|RMS|Batch|Group|Instance)Norm")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class KeptFP32:
    """What `keep_fp32` did; ``print`` lists it.

    Attributes:
        kept: names, as in ``model.named_modules()``, of the modules that now stay in float32; those that an earlier
            call keeps included.
        widened: those of ``kept`` with parameters or buffers that were of half precision already. They are float32 now;
            what was rounded off is lost.
        left: name and reason of every norm and softmax that was not kept.
    """

    kept: tuple[str, ...]
    widened: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.kept)} kept in float32, {len(self.left)} left"]
        for name in self.kept:
            was = ": was in half precision" if name in self.widened else ""
            lines.append(f"  kept {name or '(the model itself)'}{was}")
        lines += [f"  left {name or '(the model itself)'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def keep_fp32(
    model: nn.Module,
    *,
    also: tuple[type[nn.Module], ...] = (),
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> KeptFP32:
    """Makes norms and softmaxes in ``model`` stay in float32 when the model goes to half precision; in place::

        print(keep_fp32(model))
        model.bfloat16()  # or .half(), .to(dtype), now and later

    A kept module ``f`` computes ``half(f(float32(x)))``: inputs of half precision are cast to float32, and the output
    back to the dtype of the first such input. Inputs that are float32 or float64 pass as they are. Under autocast,
    which is off inside, the output stays float32, like that of the operators that autocast itself runs in float32. Its
    parameters and buffers become float32 whenever they would become half precision, also by
    ``load_state_dict(assign=True)``; to float64 they follow. Names in the state dict, parameter objects and thus
    optimizers are as before; calling this again changes nothing. Copies and pickles are kept too.

    Kept are `nn.LayerNorm`, `nn.RMSNorm`, batch, group, instance and local response norms, `nn.Softmax`,
    `nn.LogSoftmax`, `nn.Softmin`, `nn.Softmax2d`, their subclasses, and modules without children whose class is named
    like a norm, for example ``LlamaRMSNorm``. Functions such as ``F.softmax`` are no modules and are not seen: torch
    computes them in float32 inside whatever the dtype, so that only their results are rounded.

    A kept module gets a subclass of its class as its class: ``isinstance`` holds, ``type(module) is nn.LayerNorm`` does
    not. So call this after what replaces or converts modules, and before `torch.compile`. torch's encoder layers have a
    fused kernel for inference that takes the weights past the norms and wants one dtype; it is switched off in those
    whose norms are kept.

    Args:
        model: any module.
        also: more classes to keep, with all that is inside, for example the router of a mixture of experts.
            Default: none.
        filter: ``filter(name, module)`` says whether to keep a module that is not kept yet. Default: all.

    Returns:
        Which modules are kept, and which norms and softmaxes are not and why.

    Raises:
        TypeError: ``also`` is not a tuple of classes of modules.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.3 (reductions, as in softmax and batch
    norm, in float32).
    """
    if not isinstance(also, tuple) or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in also):
        raise TypeError(f"also: expected a tuple of subclasses of nn.Module, got {also!r}")
    kept: list[str] = []
    widened: list[str] = []
    left: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, _InFP32):
            if not (isinstance(module, (*_KEPT, *also)) or _is_named_like_a_norm(module)):
                continue
            reason = _why_left(module)
            if reason is None and filter is not None and not filter(name, module):
                reason = "the filter says so"
            if reason is not None:
                left[name] = reason
                continue
        kept.append(name)
        if any(x.dtype in _HALF for x in (*module.parameters(), *module.buffers())):
            widened.append(name)
        if not isinstance(module, _InFP32):
            module.__class__ = _kept_class(type(module))
        _widen(module)
    _avoid_fused_layers(model)
    return KeptFP32(tuple(kept), tuple(widened), left)


class _InFP32(nn.Module):
    # Stands before a module's own class among the bases of its new one.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs: list[Tensor] = []
        wide_args, wide_kwargs = _to_float32(args, inputs), _to_float32(kwargs, inputs)
        device = inputs[0].device.type if inputs else "cpu"
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return super().forward(*wide_args, **wide_kwargs)
        out = super().forward(*wide_args, **wide_kwargs)
        half = next((x.dtype for x in inputs if x.dtype in _HALF), None)
        return out if half is None else _from_float32(out, half)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Every .to(), .half() and .to_empty() ends here. From the tensor as it was: nothing is rounded on the way.
        def apply(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(device=y.device, dtype=torch.float32) if y.dtype in _HALF else y

        return super()._apply(apply, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # With assign=True the tensors of the checkpoint are now the module's.
        _widen(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time; pickle and copy are told how.
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        function, (cls, *arguments), *rest = reduced
        if function is not copyreg.__newobj__ or cls.__bases__[0] is not _InFP32:  # type: ignore[attr-defined]
            return reduced
        return (_new_kept, (cls.__bases__[1], *arguments), *rest)


_kept_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _kept_class(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _kept_classes:
        _kept_classes[base] = type(f"FP32{base.__name__}", (_InFP32, base), {"__doc__": base.__doc__})
    return _kept_classes[base]


def _new_kept(base: type[nn.Module], *arguments: Any) -> nn.Module:
    kept = _kept_class(base)
    return kept.__new__(kept, *arguments)


def _widen(module: nn.Module) -> None:
    if any(x.dtype in _HALF for x in (*module.parameters(), *module.buffers())):
        module._apply(lambda x: x)


def _to_float32(value: Any, inputs: list[Tensor]) -> Any:
    # Appends the floating point tensors, as they came, to `inputs`.
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        inputs.append(value)
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, dict):
        return {key: _to_float32(item, inputs) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_to_float32(item, inputs) for item in value)
    return value


def _from_float32(value: Any, half: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(half) if value.dtype == torch.float32 else value
    if type(value) in (tuple, list):
        return type(value)(_from_float32(item, half) for item in value)
    return value


def _is_named_like_a_norm(module: nn.Module) -> bool:
    name = module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__
    return _NORM_NAME.search(name) is not None and next(module.children(), None) is None


def _why_left(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule, whose class is fixed"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy and will change its class; call the model once first"
    if "forward" in vars(module):
        return "its forward was replaced by another function"
    return None


def _avoid_fused_layers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.norm1, _InFP32) or isinstance(module.norm2, _InFP32):
                # The fused kernel is only for these two activations; forward itself reads `activation`.
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(isinstance(m, _InFP32) for m in module.modules()):
            # Nested tensors are for the fused kernel alone.
            module.use_nested_tensor = False
