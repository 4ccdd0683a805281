"""Parameters that the first and the last stage of a pipeline both have, such as an embedding that is also the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor


class Ties:
    """The parameters of this rank that another rank of the pipeline has, too.

    Args:
        modules: this rank's stages. The names of shared parameters are in the attribute ``tied`` of the first and of
            the last stage, or of a module within, as `fully_shard` and DistributedDataParallel wrap one.
        group: the ranks of the pipeline.
    """

    def __init__(self, modules: list[nn.Module], group: distributed.ProcessGroup) -> None:
        self._group = group
        last = distributed.get_world_size(group) - 1
        self._is_last = distributed.get_rank(group) == last
        self._peer = 0 if self._is_last else last
        self._owners: list[tuple[nn.Module, str]] = []
        if distributed.get_rank(group) in (0, last):
            # The first of a rank's stages is the pipeline's first if any is, its last one likewise.
            stage = modules[-1 if self._is_last else 0]
            owner = next((module for module in stage.modules() if hasattr(module, "tied")), stage)
            self._owners = [(owner, name) for name in getattr(owner, "tied", ())]
        self._is_synced = True

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The shared parameters that are here. They are looked up anew, because ``fully_shard`` replaces them."""
        return {name: owner.get_parameter(name) for owner, name in self._owners}

    def duplicates(self) -> dict[str, nn.Parameter]:
        """Those of them that the first stage stands for: the last stage's."""
        return self.named_parameters() if self._is_last else {}

    def description(self) -> list[tuple[str, list[int], torch.dtype, bool]]:
        """What has to be equal in the first and the last stage."""
        return [
            (name, list(_local(parameter).shape), parameter.dtype, parameter.requires_grad)
            for name, parameter in self.named_parameters().items()
        ]

    @torch.no_grad()
    def copy_parameters(self) -> None:
        """Gives the last stage the values of the first."""
        for parameter in self.named_parameters().values():
            local = _local(parameter)
            if local.is_meta:
                continue
            if self._is_last:
                received = torch.empty_like(local, memory_format=torch.contiguous_format)
                distributed.recv(received, group=self._group, group_src=self._peer)
                local.copy_(received)
            else:
                distributed.send(local.contiguous(), group=self._group, group_dst=self._peer)

    def begin(self) -> None:
        """Before gradients are added: what `sync_gradients` summed counts once from here on, in the first stage."""
        if self._is_synced:
            for parameter in self.duplicates().values():
                parameter.grad = None
        self._is_synced = False

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Gives both stages the sum of their gradients, the same bits in both; nothing if that was done already."""
        if self._is_synced:
            return
        self._is_synced = True
        for parameter in self.named_parameters().values():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = _local(_placed_like(parameter))
            gradient.add_(self._exchanged(gradient.contiguous()))

    def _exchanged(self, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor)
        operations: list[Any] = [
            distributed.P2POp(distributed.isend, tensor, group=self._group, group_peer=self._peer),
            distributed.P2POp(distributed.irecv, received, group=self._group, group_peer=self._peer),
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        return received


def _placed_like(parameter: nn.Parameter) -> Tensor:
    """The gradient, which DTensors of the head and of the embedding can have in other pieces than the parameter."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return grad  # type: ignore[return-value]


def _local(tensor: Tensor) -> Tensor:
    # Both stages are sharded in the same way, so shards of gradients add up as the gradients do.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
