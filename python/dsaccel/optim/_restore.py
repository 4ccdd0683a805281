"""Puts everything that training changes back, to the last bit and in the same objects."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Back = Callable[[], Any]


@contextlib.contextmanager
def restoring(model: nn.Module, optimizer: Optimizer, scaler: Any, *sources: Any) -> Iterator[None]:
    """Whatever happens inside leaves no trace.

    Of ``model`` its parameters, their gradients, all buffers and the modes; of ``optimizer`` the state and the groups;
    all of ``scaler``; the random states of Python, NumPy (if imported), torch and CUDA (if in use); and the positions
    of ``sources``: of whatever has ``state_dict`` and ``load_state_dict``, and of generators, down to the samplers of a
    loader. Costs a copy of all that on its device.
    """
    memo: dict[int, Back] = {}
    backs = _random_states()
    _reshard(model)
    for module in model.modules():
        backs += [_keep(module._parameters, memo), _keep(module._buffers, memo), _keep_mode(module)]
    # An optimizer may step what is outside of the model, too.
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    backs += [_keep_gradient(parameter, memo) for parameter in dict.fromkeys((*model.parameters(), *stepped))]
    # ZeroRedundancyOptimizer has what really steps inside.
    for each in (optimizer, getattr(optimizer, "optim", None)):
        if isinstance(each, Optimizer):
            backs += [_keep(each.state, memo), _keep(each.param_groups, memo)]
    backs.append(_keep(vars(scaler), memo))
    for source in sources:
        backs += _positions(source)
    is_finished = False
    try:
        yield
        is_finished = True
    finally:
        # The last is the first, and none keeps the others from their part.
        with contextlib.ExitStack() as stack:
            for back in backs:
                stack.callback(back)
            stack.callback(_reshard, model, is_finished)


def _keep(value: Any, memo: dict[int, Back]) -> Back:
    """What gives ``value`` back as it is now: the same tensors and containers, with the same in them."""
    if id(value) not in memo:
        # Before what is in it, which may contain it.
        memo[id(value)] = lambda: value
        memo[id(value)] = _kept(value, memo)
    return memo[id(value)]


def _kept(value: Any, memo: dict[int, Back]) -> Back:
    if isinstance(value, Tensor):
        data = _once(value.detach()).clone()

        def back() -> Any:
            with torch.no_grad():
                _once(value).copy_(data)
            return value

    elif isinstance(value, MutableMapping):
        entries = [(key, _keep(entry, memo)) for key, entry in value.items()]

        def back() -> Any:
            value.clear()
            value.update({key: entry() for key, entry in entries})
            return value

    elif isinstance(value, (MutableSequence, MutableSet)):
        parts = [_keep(part, memo) for part in value]

        def back() -> Any:
            value.clear()
            for part in parts:
                value.append(part()) if isinstance(value, MutableSequence) else value.add(part())
            return value

    elif isinstance(value, tuple):
        parts = [_keep(part, memo) for part in value]

        def back() -> Any:
            for part in parts:
                part()
            return value

    else:

        def back() -> Any:
            return value

    return back


def _once(x: Tensor) -> Tensor:
    """Without the repetitions of what `Tensor.expand` made, as torch refuses to write to one place many times."""
    if x.layout is torch.strided:
        for dim, stride in enumerate(x.stride()):
            if stride == 0:
                x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return x


def _keep_mode(module: nn.Module) -> Back:
    training = module.training

    def back() -> None:
        module.training = training

    return back


def _keep_gradient(parameter: Tensor, memo: dict[int, Back]) -> Back:
    # Contents, too: buckets of DistributedDataParallel are written to by the next backward.
    gradient = _keep(parameter.grad, memo)

    def back() -> None:
        parameter.grad = gradient()

    return back


def _random_states() -> list[Back]:
    python, cpu = random.getstate(), torch.get_rng_state()
    backs: list[Back] = [lambda: random.setstate(python), lambda: torch.set_rng_state(cpu)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
        backs.append(lambda: torch.cuda.set_rng_state_all(cuda))
    if "numpy" in sys.modules:
        import numpy as np

        # What others draw from the global state is put back, whatever NumPy advises to new code.
        state = np.random.get_state()  # noqa: NPY002
        backs.append(lambda: np.random.set_state(state))  # noqa: NPY002
    return backs


def _positions(source: Any) -> list[Back]:
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        # A copy, as the state may share its tensors with the source.
        state = copy.deepcopy(source.state_dict())
        return [lambda: source.load_state_dict(state)]
    backs: list[Back] = []
    generator = getattr(source, "generator", None)
    if isinstance(generator, torch.Generator):
        position = generator.get_state()
        backs.append(lambda: generator.set_state(position))
    for name in ("sampler", "batch_sampler"):
        inner = getattr(source, name, None)
        if inner is not None:
            backs += _positions(inner)
    return backs


def _reshard(model: nn.Module, is_finished: bool = True) -> None:
    """Parameters of ``fully_shard`` are kept and restored as the shards that the optimizer steps."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    if not is_finished and hasattr(FSDPModule, "reset_iter_state"):
        # Of torch 2.13: what the roots keep of a pass that an exception ended.
        for module in _outermost(model, FSDPModule):
            # One that has never run has nothing to forget, and lacks what would be looked at.
            with contextlib.suppress(AttributeError):
                module.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _outermost(module: nn.Module, kind: type) -> Iterator[Any]:
    if isinstance(module, kind):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, kind)
