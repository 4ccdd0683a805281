"""Hooks that tensor parallelism puts around modules: where tensors change their layout, ranks talk to each other."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor


def in_layout(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """``x`` as a DTensor; a plain tensor is taken to be whole on every rank. Gradients of parts are added up."""
    there = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return _contiguous(there.redistribute(placements=[placement]))


def _contiguous(x: DTensor) -> DTensor:
    # Slices of different lengths are gathered with padding, of which torch 2.11 leaves a view that it cannot multiply.
    return x if x.to_local().is_contiguous() else cast(DTensor, x.clone(memory_format=torch.contiguous_format))


def gather_gradients(module: nn.Module) -> None:
    """The gradient of what the module returns, before later hooks scatter it, is contiguous as in `in_layout`."""

    def watch(_module: nn.Module, _args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(_contiguous)

    module.register_forward_hook(watch, prepend=True)


def whole(x: Tensor) -> Tensor:
    """``x`` as a plain tensor, whole and contiguous on every rank; its gradient is taken to be the same on all."""
    return x.redistribute(placements=[Replicate()]).to_local().contiguous() if isinstance(x, DTensor) else x


def enter(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """The first argument comes in a layout."""
    module.register_forward_pre_hook(lambda _, args: (in_layout(args[0], mesh, placement), *args[1:]))


def leave_whole(module: nn.Module) -> None:
    """What the module returns is plain."""
    module.register_forward_hook(lambda _module, _args, out: whole(out))


def leave_replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """What the module returns is a DTensor, whole on every rank; the parts of its gradient are added up."""
    module.register_forward_hook(lambda _module, _args, out: in_layout(out, mesh, Replicate()))


def replicate_norm(norm: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Parameters become DTensors that are whole on every rank: those of the first. The input comes in a layout."""
    for name, parameter in list(norm.named_parameters(recurse=False)):
        replicated = nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()]), parameter.requires_grad)
        if parameter.requires_grad:
            # Of a slice of the sequence, each rank has a part of the sum; ``fully_shard`` sees to that itself.
            replicated.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))
        norm.register_parameter(name, replicated)
    enter(norm, mesh, placement)


def split_score_bias(attention: nn.Module, mesh: DeviceMesh, heads: int) -> None:
    """The ``bias`` of scores, which comes with all ``heads`` or with one for all, becomes that of the rank's heads."""

    def split(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        bias = kwargs.get("bias")
        if bias is None:
            return None
        x = in_layout(bias, mesh, Replicate())
        if bias.dim() >= 3 and bias.shape[-3] == heads > 1:
            local = x.redistribute(placements=[Shard(bias.dim() - 3)]).to_local()
        else:
            # Each rank has the gradient of its heads' scores only.
            local = x.to_local(grad_placements=[Partial()])
        return args, {**kwargs, "bias": local}

    attention.register_forward_pre_hook(split, with_kwargs=True)
