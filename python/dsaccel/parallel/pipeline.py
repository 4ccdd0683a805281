"""Pipeline parallelism: stages of a model on different ranks, with the gradients of the whole batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from dsaccel.parallel.pipeline_split import LanguageModelStage, layers_per_stage, split_stages, stage_indices
from dsaccel.parallel.pipeline_ties import Ties
from dskernels.checks import is_integer, shape_of, wrong_type, wrong_value

__all__ = ["LanguageModelStage", "Pipeline", "layers_per_stage", "split_stages", "stage_indices"]

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Pipeline:
    """Runs the stages of a model, a rank each or several, on microbatches of a batch.

    Over the ranks, the gradients and the loss are those of one process on the whole batch, up to rounding::

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stage = split_stages(model, 2, mesh.get_local_rank())
        pipeline = Pipeline(stage, mesh, schedule="1f1b", microbatches=4, loss_fn=loss_fn)
        loss = pipeline.forward_backward(tokens, targets)
        pipeline.sync_tied_gradients()
        optimizer.step()

    Every rank makes the same calls, with inputs and targets of the same shape; the values of inputs are read in the
    first stage, those of targets in the last. A stage may be wrapped by ``fully_shard`` or DistributedDataParallel:
    gradients are then exchanged once a call, after the last microbatch. Under autocast, forward and loss run under it,
    backward does not.

    Args:
        stages: this rank's stage, or its stages in order: those of `stage_indices`. A stage takes one tensor, tokens
            in the first, and returns one. The names in its attribute ``tied``, if it has one, are of parameters that
            the first and the last stage share; the last gets the first one's values here.
        mesh: with one dimension, of two ranks or more.
        schedule: ``"gpipe"``: all microbatches forward, then all backward, for any number of them. ``"1f1b"``: in turn
            as soon as can be, so that no rank holds the activations of more microbatches than there are ranks.
            ``"interleaved"``: 1F1B with several stages a rank, which divides the idle time by their number and sends
            as many times more. Default: ``"1f1b"``.
        microbatches: into how many equal parts the rows of a batch are cut: for 1F1B at least as many as there are
            ranks; for interleaved a multiple of ``max(1, microbatches // ranks)``, best a multiple of the ranks.
        loss_fn: ``loss_fn(outputs, targets)`` of a microbatch: the mean over its rows, a scalar. Where rows weigh
            differently, as with ignored targets, the mean over microbatches is not that over the batch.

    Raises:
        ImportError: this PyTorch has no ``torch.distributed.pipelining``.
        TypeError: an argument has the wrong type.
        ValueError: an argument is not as above, or not the same on all ranks.

    Sources: Huang et al., "GPipe", 2019, section 2.3; Narayanan et al., "PipeDream", 2019, section 3.2 (1F1B), and
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2 (1F1B with a
    flush, interleaved).
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        schedule: str = "1f1b",
        microbatches: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise wrong_type("mesh", "a DeviceMesh", mesh)
        if mesh.ndim != 1 or mesh.size() < 2:
            raise wrong_value("mesh", "one dimension of two ranks or more", f"shape {list(mesh.shape)}")
        modules = list(stages) if isinstance(stages, Sequence) else [stages]
        for module in modules:
            if not isinstance(module, nn.Module):
                raise wrong_type("stages", "a module or a sequence of modules", module)
        if not callable(loss_fn):
            # The last rank alone would find out, while the others wait for it.
            raise wrong_type("loss_fn", "a function of outputs and targets", loss_fn)
        _check_schedule(schedule, microbatches, len(modules), mesh.size())
        self._pipelining = _import_schedules()
        self.modules = modules
        self.schedule = schedule
        self.microbatches = microbatches
        self._loss_fn = loss_fn
        self._group = mesh.get_group()
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()
        self._kind = mesh.device_type
        self._device = _current_device(mesh.device_type)
        self._ties = Ties(modules, self._group)
        self._check_agreement()
        self._ties.copy_parameters()
        self._shapes: dict[Any, Any] = {}
        self._schedules: dict[bool, tuple[Any, Any]] = {}
        self._factor: float | Tensor = 1.0
        self._losses: list[Tensor] = []

    @property
    def duplicates(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank that the first stage has as well, by name: they count there, in a norm for one."""
        return self._ties.duplicates()

    def forward_backward(self, inputs: Tensor, targets: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        """Adds the gradients of ``factor`` times the mean loss to those that are there.

        The sum for parameters that the first and the last stage share is made by `sync_tied_gradients`, once before
        gradients are used.

        Args:
            inputs: of the first stage, shape ``[B, ...]``, where ``B`` is a multiple of ``microbatches``.
            targets: of the loss, shape ``[B, ...]``.
            factor: of the gradients: one over the number of calls that are accumulated, a loss scale, or both; a number
                or a tensor of one. That of the last stage counts. Default: 1.

        Returns:
            The mean loss without ``factor``, float64, the same on every rank.

        Raises:
            ValueError: ``B`` does not divide, on every rank, before anything is sent.
            RuntimeError: a stage failed on the first inputs of a shape, or gradients are disabled.
        """
        rows = inputs.shape[0] if inputs.dim() else 0
        if rows < 1 or rows % self.microbatches:
            expected = f"rows that divide into {self.microbatches} microbatches"
            raise wrong_value("inputs", expected, f"shape {shape_of(inputs)}")
        self._ties.begin()
        self._factor = factor
        return self._run(inputs, targets, self.microbatches, is_training=True)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, without gradients, of modules in the mode in which they are.

        The rows are cut into as many microbatches as divide both them and ``microbatches``, so any number of rows does.

        Args:
            inputs, targets: as `forward_backward`, with any ``B`` but 0.

        Returns:
            As `forward_backward`.

        Raises:
            ValueError: there is no row.
            RuntimeError: a stage failed on the first inputs of a shape.
        """
        if inputs.dim() == 0 or inputs.shape[0] < 1:
            raise wrong_value("inputs", "at least one row", f"shape {shape_of(inputs)}")
        count = math.gcd(inputs.shape[0], self.microbatches)
        return self._run(inputs, targets, count, is_training=False)

    def sync_tied_gradients(self) -> None:
        """Sums the gradients of shared parameters over the first and the last stage, the same bits in both.

        To be called on every rank after the last `forward_backward` before a step, and before the gradients' norm,
        in which `duplicates` must be left out. Further calls do nothing until the next `forward_backward`.
        """
        self._ties.sync_gradients()

    def _run(self, inputs: Tensor, targets: Tensor, count: int, *, is_training: bool) -> Tensor:
        if targets.dim() == 0 or targets.shape[0] != inputs.shape[0]:
            raise wrong_value("targets", f"{inputs.shape[0]} rows like inputs", f"shape {shape_of(targets)}")
        self._losses.clear()
        # With the strides that its shape has by default: PyTorch 2.11 compares them between calls.
        inputs = inputs.clone(memory_format=torch.contiguous_format)
        is_mixed = torch.is_autocast_enabled(self._kind)
        schedule, stages = self._schedule(inputs, count, is_training)
        arguments = {"target": targets} if self._rank == self._ranks - 1 else {}
        step = schedule.step if is_training else schedule.eval
        try:
            # The stages enter autocast again, for forward alone.
            with torch.autocast(self._kind, enabled=False) if is_mixed else nullcontext():
                step(*((inputs,) if self._rank == 0 else ()), **arguments, return_outputs=False)
        except BaseException:
            # What it has begun is of no use to another call.
            self._schedules.pop(is_training)
            raise
        if not is_training:
            # All outputs are held otherwise.
            for stage in stages:
                stage.clear_runtime_states()
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._losses:
            loss = torch.stack(self._losses).to(loss).mean()
        distributed.broadcast(loss, group=self._group, group_src=self._ranks - 1)
        return loss

    def _schedule(self, inputs: Tensor, count: int, is_training: bool) -> Any:
        dtype = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        size = (inputs.shape[0] // count, *inputs.shape[1:])
        context = functools.partial(torch.autocast, self._kind, dtype=dtype) if dtype is not None else nullcontext
        known = (size, inputs.dtype, dtype)
        if known not in self._shapes:
            self._shapes[known] = self._find_shapes(inputs[: size[0]], context)
        if self._schedules.get(is_training, (None, None))[0] != (known, count):
            # One each is kept: its buffers are as large as the hidden states of a batch.
            self._schedules.pop(is_training, None)
            made = self._pipelining.make_schedule(
                self.schedule if is_training else "forward",
                self.modules,
                self._shapes[known],
                count,
                functools.partial(self._loss, count, context),
                group=self._group,
                device=self._device,
                context=context,
            )
            self._schedules[is_training] = ((known, count), made)
        return self._schedules[is_training][1]

    def _loss(self, count: int, context: Callable[[], AbstractContextManager[Any]], *arguments: Tensor) -> Tensor:
        with context():
            loss = self._loss_fn(*arguments)
        if loss.dim():
            raise wrong_value("loss_fn", "a scalar", f"shape {shape_of(loss)}")
        self._losses.append(loss.detach())
        factor = self._factor
        return loss * ((factor.to(loss).reshape(()) if isinstance(factor, Tensor) else factor) / count)

    @torch.no_grad()
    def _find_shapes(self, inputs: Tensor, context: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
        # Stage by stage, all ranks hear what came out: one that fails stops the others, which would wait in vain.
        shapes: list[Any] = [(tuple(inputs.shape), inputs.stride(), inputs.dtype)]
        last = self._ranks * len(self.modules) - 1
        devices = [] if self._device.type == "cpu" else [self._device]
        for index in range(last + 1):
            turn, owner = divmod(index, self._ranks)
            heard: list[Any] = [None]
            failure: Exception | None = None
            if owner == self._rank:
                size, _, dtype = shapes[-1]
                x = inputs if index == 0 else torch.zeros(size, dtype=dtype, device=self._device)
                try:
                    with torch.random.fork_rng(devices, device_type=self._device.type), context():
                        out = self.modules[turn](x)
                    heard = [self._pipelining.shape_from(out, is_last=index == last)]
                except Exception as error:
                    failure, heard = error, [f"stage {index}: {type(error).__name__}: {error}"]
            distributed.broadcast_object_list(heard, group=self._group, group_src=owner)
            if isinstance(heard[0], str):
                raise RuntimeError(heard[0]) from failure
            shapes.append(heard[0])
        return shapes

    def _check_agreement(self) -> None:
        mine = {
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "stages": len(self.modules),
            "tied": self._ties.description(),
        }
        all_of_them: list[Any] = [None] * self._ranks
        distributed.all_gather_object(all_of_them, mine, group=self._group)
        for name in mine:
            values = [theirs[name] for theirs in all_of_them]
            if name == "tied":
                values = [values[0], values[-1]]
            if any(value != values[0] for value in values):
                raise wrong_value(name, "the same on every rank", values)


def _check_schedule(schedule: str, microbatches: int, stages: int, ranks: int) -> None:
    if schedule not in SCHEDULES:
        raise wrong_value("schedule", f"one of {', '.join(SCHEDULES)}", repr(schedule))
    if not is_integer(microbatches):
        raise wrong_type("microbatches", "an integer", microbatches)
    if microbatches < 1:
        raise wrong_value("microbatches", "at least 1", microbatches)
    if stages < 1 or (stages > 1 and schedule != "interleaved"):
        expected = "at least one" if schedule == "interleaved" else f"one for {schedule}"
        raise wrong_value("stages", expected, stages)
    if schedule == "1f1b" and microbatches < ranks:
        raise wrong_value("microbatches", f"at least {ranks} for 1f1b, as many as ranks", microbatches)
    rounds = max(1, microbatches // ranks)
    if schedule == "interleaved" and microbatches % rounds:
        raise wrong_value("microbatches", f"a multiple of {rounds}, best of {ranks}, for interleaved", microbatches)


def _current_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _import_schedules() -> ModuleType:
    try:
        from dsaccel.parallel import pipeline_schedules
    except ImportError as error:
        raise ImportError(f"a pipeline needs torch.distributed.pipelining as of PyTorch 2.11: {error}") from error
    return pipeline_schedules
