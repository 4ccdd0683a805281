"""Data parallelism: replicas of a model, and state that is sharded over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dsaccel.parallel.plan import ParallelPlan
from dskernels.checks import wrong_type, wrong_value


def data_parallel(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    *,
    units: Sequence[nn.Module] | None = None,
    unused_parameters: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """``module`` such that its gradients are means over the ``dp * shard * cp`` processes that have other data.

    - Plain parameters that nothing shards: DistributedDataParallel. So with ``zero = 1``, whose optimizer is that of
      `sharded_optimizer`.
    - ``shard > 1`` with ``zero`` 2 or 3: ``fully_shard``, each unit and the rest. Parameters, gradients and the
      optimizer's state are sharded over ``shard * cp`` processes and replicated over ``dp``. With 2 the parameters are
      put together once for forward and backward, with 3 once for each.
    - Parameters that tensor parallelism has made DTensors, which DistributedDataParallel cannot take:
      ``fully_shard`` over one process, which leaves of it the averaging.

    Args:
        module: with the same weights in every process. It is changed in place.
        plan: what to do.
        mesh: of `make_mesh`.
        units: modules whose parameters are put together at a time, by ``fully_shard``; each has to be called by all
            processes, in the same order. Default: `sharding_units`.
        unused_parameters: whether there may be parameters that get a gradient in some processes only; without it, such
            a step fails or waits for ever. It costs DistributedDataParallel a walk over the graph in each step; with
            ``fully_shard``, a parameter that no process uses has the gradient 0 instead of none. Default: False.
        mp_policy: dtypes that ``fully_shard`` computes and reduces in. Default: those of the parameters.

    Returns:
        What to call: ``module`` itself, or DistributedDataParallel around it.

    Raises:
        TypeError: ``mp_policy`` is none.
        ValueError: ``mp_policy`` is given where ``fully_shard`` is not used (there, use autocast).
        RuntimeError: ``unused_parameters`` needs a later torch than 2.11.

    Sources: Li et al., "PyTorch Distributed", 2020; Zhao et al., "PyTorch FSDP", 2023; Rajbhandari et al., "ZeRO",
    2020, section 5.
    """
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise wrong_type("mp_policy", "a MixedPrecisionPolicy", mp_policy)
    shards = plan.shard > 1 and plan.zero >= 2
    is_split = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if plan.data_size > 1 and (shards or is_split):
        _fully_shard(module, plan, mesh, units, mp_policy)
        if unused_parameters:
            _include_unused(module)
        return module
    if mp_policy is not None:
        raise wrong_value("mp_policy", "None where fully_shard is not used: autocast does it there", mp_policy)
    if plan.data_size == 1:
        return module
    return _replicate(module, mesh, unused_parameters)


def sharding_units(module: nn.Module) -> list[nn.Module]:
    """The modules that ``fully_shard`` should take one by one: the layers in the outermost lists of ``module``.

    One that shares a parameter with anything outside it is left out: its parameters are then put together with the
    rest, as ``fully_shard`` has to see all that use a parameter at once.
    """
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [layer for layer in _layers(module) if _owns(layer, uses)]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        # What cannot be called is a list of layers, such as nn.ModuleList.
        if type(child).forward is nn.Module.forward:
            yield from child.children()
        else:
            yield from _layers(child)


def _owns(layer: nn.Module, uses: dict[int, int]) -> bool:
    inside: dict[int, int] = {}
    for _, parameter in layer.named_parameters(remove_duplicate=False):
        inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return bool(inside) and all(uses[key] == count for key, count in inside.items())


def _fully_shard(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    units: Sequence[nn.Module] | None,
    mp_policy: MixedPrecisionPolicy | None,
) -> None:
    # Over cp parameters are alike as over dp; where something is sharded, cp helps.
    shards = plan.shard > 1 and plan.zero >= 2
    outer, inner = (("dp",), ("shard", "cp")) if shards else (("dp", "cp"), ("shard",))
    options: dict[str, Any] = {"mesh": _joined(mesh, outer, inner)}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    for unit in sharding_units(module) if units is None else units:
        fully_shard(unit, reshard_after_forward=shards and plan.zero == 3, **options)
    # The rest is needed at both ends of forward and backward.
    fully_shard(module, reshard_after_forward=False, **options)


def _joined(mesh: DeviceMesh, outer: tuple[str, ...], inner: tuple[str, ...]) -> DeviceMesh:
    """A mesh of two dimensions, each made of some of ``mesh``; of the inner one if the outer has one process."""
    parts = [mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names)) for names in (outer, inner)]
    return DeviceMesh._concatenate(parts) if parts[0].size() > 1 else parts[1]


def _include_unused(module: Any) -> None:
    if not hasattr(module, "set_reduce_scatter_unused_params"):
        raise RuntimeError(
            f"unused_parameters: fully_shard needs torch 2.13 for it, got {torch.__version__}; zero = 0 or 1 without tp"
            " does without fully_shard"
        )
    module.set_reduce_scatter_unused_params(True)


def _replicate(module: nn.Module, mesh: DeviceMesh, unused_parameters: bool) -> DistributedDataParallel:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    # Buffers outside the state dict are tables that follow from arguments: they are the same everywhere.
    has_state = any(name not in parameters for name in module.state_dict())
    # The later of the two names came with torch 2.13.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: has_state}
    return DistributedDataParallel(
        module,
        process_group=mesh["dp", "shard", "cp"]._flatten("data").get_group(),
        find_unused_parameters=unused_parameters,
        gradient_as_bucket_view=True,
        **options,
    )


def exchange_gradients(module: nn.Module, exchanges: bool) -> None:
    """Whether the next backward passes of a module of `data_parallel` exchange gradients."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = exchanges
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(exchanges)


def take_apart(module: nn.Module) -> None:
    """Frees parameters that ``fully_shard`` has put together for a forward pass that no backward pass follows."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def sharded_optimizer(
    factory: Callable[[list[nn.Parameter]], Optimizer],
    parameters: Sequence[nn.Parameter],
    group: torch.distributed.ProcessGroup,
) -> ZeroRedundancyOptimizer:
    """The optimizer that ``factory`` makes of ``parameters``, with its state sharded over ``group``.

    Every process updates about a share of the parameters, and sends them to the others.

    Args:
        factory: whose optimizer's class takes what is in its ``defaults``, as those of torch do. Groups of parameters
            that it makes are kept.
        parameters: plain tensors, the same in every process.
        group: the processes.

    Source: Rajbhandari et al., "ZeRO", 2020, section 5.1 (ZeRO-1).
    """
    whole = factory(list(parameters))
    # Some defaults are no arguments: AdamW has one that it sets itself.
    taken = inspect.signature(type(whole)).parameters
    defaults = {name: value for name, value in whole.defaults.items() if name in taken}
    return ZeroRedundancyOptimizer(whole.param_groups, type(whole), process_group=group, **defaults)
