"""The training loop."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from dsaccel.amp import AutocastPolicy, LossScaler, Microbatch, accumulate
from dsaccel.checkpoint import checkpoint_blocks, offload_activations
from dsaccel.parallel import ParallelPlan, parallelize
from dsaccel.train.batches import make_batches
from dsaccel.train.config import TrainConfig
from dsaccel.train.folder import RunFolder
from dsaccel.train.interruption import Interrupted, Interruption
from dsaccel.train.losses import MeanLoss
from dsaccel.train.precision import run_under_autocast
from dsaccel.train.progress import Progress, status_line
from dsaccel.train.state import load, save
from dskernels.checks import wrong_type, wrong_value


class Trainer:
    """Trains a model; may be interrupted at any moment, and goes on exactly::

        trainer = Trainer(TrainConfig(steps=1000), model=model, loss_fn=loss_fn, data=dataset, folder="runs/first")
        trainer.run()

    One step is: `dsaccel.amp.accumulate` hands out microbatches; each goes forward and backward, by the plan; the loss
    scaler unscales; gradients are clipped by the norm of the whole model; the optimizer and the schedule step. On
    several ranks (``torchrun``) each runs this same loop, loads the same batches, and works on its part of them.

    Args:
        config: the options.
        model: all of it, the same on each rank. It is changed in place: by the plan, by the checkpoint policy, and,
            with ``amp``, to run under autocast.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over the batch as a scalar; or the loss of each item, shape
            ``[B]``, of which the mean is taken; the sampler ``"dynamic"`` needs the latter.
        data: a dataset with ``len``, whose items are pairs of inputs and targets: the configuration tells the order and
            the batch, and what is left of an epoch when no whole batch is, is left out. Or an iterable of batches,
            pairs ``(inputs, targets)``: each iteration is what is left of an epoch, and ``state_dict`` and
            ``load_state_dict`` hold where it stands, as those of `dsaccel.data.ResumableLoader`.
        folder: of checkpoints and log.
        optimizer: gives the optimizer for a list of parameters. Default: AdamW with ``config.lr``.
        validation: batches as those of ``data``, the same in each iteration. Default: no validation.
        difficulty: of each item of a dataset, for the sampler ``"curriculum"``.
        identity: what else must be the same where a run resumes, such as the sizes of the model and a digest of the
            data; plain values. Default: nothing.
        progress: where to show how far it is; on the first rank only. Default: nowhere.
        status: what to show. Default: `status_line`.

    Attributes:
        step: how many steps are done.
        seconds: how long they took, validations included, over all resumptions.
        folder: the `RunFolder`.
        parts: what `dsaccel.parallel.parallelize` made of the model.
        recent: the last 20 events of the log.
        validation_loss: the last; None before the first validation.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: nn.Module,
        loss_fn: Callable[[Any, Tensor], Tensor],
        data: Any,
        folder: str | Path,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        validation: Iterable[tuple[Tensor, Tensor]] | None = None,
        difficulty: Any = None,
        identity: dict[str, Any] | None = None,
        progress: Progress | None = None,
        status: Callable[[Trainer], str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise wrong_type("model", "a module", model)
        for name, function in (("loss_fn", loss_fn), ("optimizer", optimizer)):
            if not (callable(function) or (name == "optimizer" and function is None)):
                raise wrong_type(name, "a function", function)
        if not isinstance(identity, dict | None):
            raise wrong_type("identity", "a dictionary or None", identity)
        self.config = config
        self._plan = cast(ParallelPlan, config.plan)
        self.folder = RunFolder(folder)
        self.identity = json.loads(json.dumps(config.what_decides_the_result() | (identity or {})))
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise wrong_value("model", "a module with parameters", type(model).__name__)
        if validation is not None and iter(validation) is validation:
            raise wrong_type("validation", "an iterable that can be gone through again, as a list", validation)
        self.device = parameter.device
        # Before the model is changed, as wrong data may be.
        self.data = make_batches(data, config, difficulty)
        self.loss = MeanLoss(loss_fn, remember=config.sampler == "dynamic")
        self.parts = parallelize(model, self._plan, loss_fn=self.loss, checkpoint=self._prepare)
        self.optimizer = self.parts.optimizer(optimizer or self._adamw)
        group = distributed.group.WORLD if self.is_spread else None
        self.scaler = LossScaler(self.device, enabled=config.amp == "fp16", process_group=group)
        self.scheduler = config.scheduler(self.optimizer)
        self.validation = validation
        self.step = 0
        self.seconds = 0.0
        self.recent: list[dict[str, Any]] = []
        self.validation_loss: float | None = None
        self._progress = progress if self.parts.is_main else None
        self._status = status or status_line
        self._microbatches = self._endless()
        self._resumed = False
        self.seed_random_numbers(after=0)

    @property
    def is_spread(self) -> bool:
        """Whether there is more than one process."""
        return self._plan.world_size > 1

    @property
    def _data_rank(self) -> int:
        """Which part of the batches this rank has; ranks that share one draw the same random numbers."""
        rank, mesh = 0, self.parts.mesh
        if mesh is not None:
            for name in ("dp", "shard", "cp"):
                rank = rank * mesh[name].size() + mesh.get_local_rank(name)
        return rank

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.config.steps

    def resume(self) -> bool:
        """Goes to where the checkpoint in the folder is, and cuts the log to it; without one, removes the log.

        Returns:
            Whether there is a checkpoint.

        Raises:
            RunMismatchError: it is of a run with other options that decide the result.
        """
        self._resumed = True
        found = load(self)
        self._microbatches = self._endless()
        return found

    def run(self) -> bool:
        """Trains from the checkpoint in the folder, if there is one, to the last step.

        Returns:
            True; or False where ``config.minutes`` are over before.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came, to any rank. As in the other cases, the checkpoint has the last step.
            RunMismatchError: as in `resume`.
        """
        if not self._resumed:
            self.resume()
        config = self.config
        start = saved = time.monotonic()
        with Interruption() as interruption:
            if self.step == 0:
                self._validate()
            while not self.finished:
                begin = time.monotonic()
                self._note(self.advance())
                if self.finished or (config.validate_every and self.step % config.validate_every == 0):
                    self._validate()
                now = time.monotonic()
                self.seconds += now - begin
                over = config.minutes is not None and now - start >= 60 * config.minutes
                due = now - saved >= config.save_seconds
                number, is_over, is_due = self._agreed(interruption.requested, over, due)
                if number or is_over or is_due or self.finished:
                    self.save()
                    saved = time.monotonic()
                if self._progress is not None:
                    self._progress.update(self._status(self), force=self.finished)
                if number:
                    raise Interrupted(number)
                if is_over:
                    break
        return self.finished

    def advance(self) -> dict[str, Any]:
        """Does the next step; returns its event: ``step``, ``loss``, ``lr``, ``seconds`` and what else there is."""
        begin, loss, samples = time.monotonic(), torch.zeros((), device=self.device), 0
        for micro in self._microbatches:
            inputs, targets = map(self._local, micro.batch[-2:])
            factor = self._scaled(micro.mean_factor)
            mean = self.parts.forward_backward(inputs, targets, factor=factor, last=micro.last)
            loss += micro.mean_factor * mean
            samples += len(micro.batch[-1])
            if self.config.sampler == "dynamic":
                self.data.sampler.update(micro.batch[0], self.loss.take(self.parts, len(micro.batch[0])))
            if micro.last:
                break
        event = {"event": "train", "step": self.step + 1, "loss": loss.item(), "lr": self.scheduler.get_last_lr()[0]}
        return event | self._update() | {"samples": samples, "seconds": time.monotonic() - begin}

    def validate(self) -> float:
        """The mean loss over the validation batches, each item counted once."""
        total, count = 0.0, 0
        for batch in self.validation or ():
            inputs, targets = map(self._local, batch)
            total += self.parts.evaluate(inputs, targets).item() * len(batch[0])
            count += len(batch[0])
        if not count:
            raise ValueError("validation: expected at least one batch, got none")
        return total / count

    def save(self) -> None:
        """Writes a checkpoint; all ranks call it."""
        save(self)

    def seed_random_numbers(self, after: int) -> None:
        """Seeds torch's random numbers, of dropout for one, by the configuration's seed and the step."""
        torch.manual_seed(random.Random(f"{self.config.seed} {after} {self._data_rank}").getrandbits(63))

    def note(self, event: dict[str, Any]) -> None:
        """Adds a line to the log, on the first rank."""
        if self.parts.is_main:
            self.folder.append(event)

    def _update(self) -> dict[str, Any]:
        found: dict[str, Any] = {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}
        limit = self.config.max_grad_norm
        if self.is_spread and limit is not None:
            # The scaler knows the gradients of this process alone.
            self.scaler.unscale_(self.optimizer)
            found["grad_norm"] = self.parts.clip_grad_norm_(limit).item()
            limit = None
        result = self.scaler.step(self.optimizer, max_norm=limit)
        if limit is not None and result.total_norm is not None:
            found["grad_norm"] = result.total_norm.item()
        self.scaler.update()
        self.scaler.step_scheduler(self.scheduler)
        self.optimizer.zero_grad()
        self.step += 1
        return found if result else found | {"skipped": True}

    def _scaled(self, factor: float) -> float | Tensor:
        scaler = self.scaler
        return scaler.scale(torch.tensor(factor, device=self.device)) if scaler.is_enabled() else factor

    def _endless(self) -> Iterator[Microbatch[Any]]:
        were_none = False
        while True:
            are_none = True
            for micro in accumulate(self.data, self.config.accumulate):
                are_none = False
                yield micro
            # What is left of one epoch may be nothing; two in a row are no data.
            if were_none and are_none:
                raise ValueError("data: expected at least one batch in an epoch, got none")
            were_none = are_none

    def _local(self, x: Tensor) -> Tensor:
        # A target that is one for the whole item has no sequence to split.
        part = self.parts.local_batch(x) if x.dim() > 1 else self.parts.local_batch(x[:, None])[:, 0]
        return part.to(self.device, non_blocking=True)

    def _agreed(self, *wishes: float) -> list[int]:
        """For each of ``wishes`` the largest of all ranks, so that all stop and save after the same step."""
        if not self.is_spread:
            return [int(wish) for wish in wishes]
        shared = torch.tensor([int(wish) for wish in wishes], device=self.device)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return shared.tolist()

    def _validate(self) -> None:
        if self.validation is not None:
            self.validation_loss = self.validate()
            self._note({"event": "validation", "step": self.step, "loss": self.validation_loss})

    def _note(self, event: dict[str, Any]) -> None:
        self.recent = [*self.recent[-19:], event]
        self.note(event)

    def _prepare(self, stage: nn.Module) -> None:
        policy, least = self.config.checkpoint_policy, self.config.offload_bytes
        if policy != "none" or least is not None:
            offload = None if least is None else offload_activations(min_bytes=least)
            checkpoint_blocks(stage, policy, offload=offload)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.amp)
        if dtype is not None:
            run_under_autocast(stage, AutocastPolicy(dtype=dtype, device=self.device))

    def _adamw(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=self.config.lr, fused=True)
