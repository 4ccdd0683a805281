"""A model made parallel by a plan, and what a training loop needs of it: the same calls whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from dsaccel.parallel.context import context_parallel
from dsaccel.parallel.data import data_parallel, exchange_gradients, sharded_optimizer, take_apart
from dsaccel.parallel.gradients import clip_grad_norm_
from dsaccel.parallel.mesh import check_mesh, make_mesh
from dsaccel.parallel.pipeline import Pipeline, split_stages, stage_indices
from dsaccel.parallel.plan import ParallelPlan
from dsaccel.parallel.tensor import tensor_parallel
from dskernels.checks import wrong_value

Loss = Callable[[Tensor, Tensor], Tensor]

# Two halve the idle time, and send twice as much.
INTERLEAVED_STAGES = 2


class ParallelModel:
    """What `parallelize` makes: this process's part of a model.

    Args:
        plan, mesh, stages, modules: the attributes.
        loss_fn: as in `parallelize`.

    Attributes:
        plan: as given.
        mesh: the device mesh, with a dimension for each of the plan's; None for one process.
        stages: the parts of the model that are here; one, or two of an interleaved pipeline.
        modules: the same as they are called: within DistributedDataParallel where that is used.
        pipeline: what runs the modules if there is more than one stage, else None.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        mesh: DeviceMesh | None,
        stages: list[nn.Module],
        modules: list[nn.Module],
        loss_fn: Loss,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.stages = stages
        self.modules = modules
        self.pipeline: Pipeline | None = None
        if mesh is not None and plan.pp > 1:
            self.pipeline = Pipeline(
                modules, mesh["pp"], schedule=plan.schedule, microbatches=plan.microbatches or plan.pp, loss_fn=loss_fn
            )
        self._loss_fn = loss_fn

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes logs: the first of all."""
        return self.mesh is None or torch.distributed.get_rank() == 0

    @property
    def copies(self) -> dict[str, nn.Parameter]:
        """The parameters here that an earlier stage has as well, by name: the head that is tied to the embedding."""
        return {} if self.pipeline is None else self.pipeline.duplicates

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are here, each once, with their names in the model before it was made parallel."""
        for stage in self.stages:
            yield from stage.named_parameters()

    def optimizer(self, factory: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
        """The optimizer that ``factory`` makes of the parameters that are here; with ``zero = 1`` its state is sharded.

        Args:
            factory: takes a list of parameters, all of this process, and makes groups of them if it likes.
        """
        parameters = [parameter for _, parameter in self.named_parameters()]
        if self.mesh is None or self.plan.shard == 1 or self.plan.zero != 1:
            return factory(parameters)
        return sharded_optimizer(factory, parameters, self.mesh.get_group("shard"))

    def local_batch(self, x: Tensor) -> Tensor:
        """This process's part of a batch that all have, shape ``[B, N, ...]``: rows, and a slice of the sequence.

        Raises:
            ValueError: ``B`` is no multiple of ``dp * shard``, or ``N`` none of ``cp``.
        """
        rows, columns = self.plan.dp * self.plan.shard, self.plan.cp
        if x.dim() < 2 or x.shape[0] % rows or x.shape[1] % columns:
            raise wrong_value("x", f"shape [B, N] with B a multiple of {rows} and N of {columns}", list(x.shape))
        if self.mesh is None:
            return x
        row = self.mesh.get_local_rank("dp") * self.plan.shard + self.mesh.get_local_rank("shard")
        return x.chunk(rows)[row].chunk(columns, 1)[self.mesh.get_local_rank("cp")]

    def forward_backward(
        self, inputs: Tensor, targets: Tensor, *, factor: float | Tensor = 1.0, last: bool = True
    ) -> Tensor:
        """Adds the gradients of ``factor`` times the mean loss of a batch, of which every process has its part.

        Args:
            inputs, targets: as `local_batch` gives them.
            factor: of the gradients: one over the number of batches that are accumulated, the loss scale, or both.
                Default: 1.
            last: whether the gradients are used next: before that the processes exchange them, after other calls they
                need not. A pipeline exchanges them each time. Default: True.

        Returns:
            The mean loss over all processes, the same in each, without ``factor``.
        """
        if self.pipeline is not None:
            loss = self.pipeline.forward_backward(inputs, targets, factor)
            if last:
                self.pipeline.sync_tied_gradients()
            return self._mean(loss)
        exchange_gradients(self.modules[0], last)
        loss = self._loss_fn(self.modules[0](inputs), targets)
        (factor * loss).backward()
        return self._mean(loss.detach())

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over all processes in evaluation mode (without dropout), the same in each.

        Args:
            inputs, targets: as `local_batch` gives them.
        """
        modes = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        if self.pipeline is not None:
            loss = self.pipeline.evaluate(inputs, targets)
        else:
            loss = self._loss_fn(self.modules[0](inputs), targets)
        for module, mode in zip(self.modules, modes, strict=True):
            module.train(mode)
            take_apart(module)
        return self._mean(loss)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the norm of the whole model's gradients, each parameter counted once, as `clip_grad_norm_` does.

        Returns:
            What it was: float32, the same in every process.
        """
        pipeline = None if self.mesh is None or self.pipeline is None else self.mesh.get_group("pp")
        parameters = [parameter for _, parameter in self.named_parameters()]
        return clip_grad_norm_(parameters, max_norm, copies=self.copies.values(), pipeline=pipeline).total_norm

    def _mean(self, loss: Tensor) -> Tensor:
        if self.mesh is None:
            return loss
        # Processes of one tensor parallel group or pipeline have the same.
        total = loss.clone()
        torch.distributed.all_reduce(total)
        return total / self.plan.world_size


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    loss_fn: Loss,
    mesh: DeviceMesh | None = None,
    checkpoint: Callable[[nn.Module], Any] | None = None,
    unused_parameters: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> ParallelModel:
    """Makes ``model`` parallel as ``plan`` says: stages, then ``tp``, ``cp``, checkpointing, and data parallelism.

    With one process nothing is done to it, and `torch.distributed` is not needed. Losses, gradients, their norm and
    the parameters after a step are those of one process on the whole batch, up to rounding.

    Args:
        model: with the same weights in every process, on its device. It is changed in place, and the parts are what to
            use afterwards. ``pp`` and ``tp`` take a `SlidingWindowLM`, ``cp`` any model of `WindowAttention`.
        plan: for as many processes as there are.
        loss_fn: ``loss_fn(logits, targets)``, the mean over all targets: each process has equally many, so that the
            mean of their means is the whole one's. Targets to be ignored are not equally many: give them the logits'
            share some other way.
        mesh: of `make_mesh`. Default: one is made, by hosts and local ranks.
        checkpoint: what to do to each stage for activation checkpointing, in place. Default: nothing.
        unused_parameters, mp_policy: as in `data_parallel`.

    Raises:
        ValueError: a part of the plan does not fit the model or the processes.
        RuntimeError: the plan is for several processes, and `torch.distributed` was not initialised.
        ImportError: a pipeline, without ``torch.distributed.pipelining``.
    """
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    if mesh is not None:
        check_mesh(plan, mesh)
    elif plan.world_size > 1 or (there and distributed.get_world_size() > 1):
        mesh = make_mesh(plan, next(model.parameters()).device.type)
    stages = [model]
    if mesh is not None and plan.pp > 1:
        count = INTERLEAVED_STAGES if plan.schedule == "interleaved" else 1
        indices = stage_indices(mesh.get_local_rank("pp"), plan.pp, count)
        stages = [split_stages(model, plan.pp * count, index) for index in indices]
    modules = []
    for stage in stages:
        if mesh is not None and plan.tp > 1:
            tensor_parallel(stage, mesh["tp"], sequence_parallel=plan.sequence_parallel)
        if mesh is not None and plan.cp > 1:
            context_parallel(stage, mesh["cp"])
        if checkpoint is not None:
            checkpoint(stage)
        if mesh is not None:
            stage = data_parallel(stage, plan, mesh, unused_parameters=unused_parameters, mp_policy=mp_policy)
        modules.append(stage)
    return ParallelModel(plan, mesh, stages, modules, loss_fn)
