"""What can be set of a training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dsaccel.checkpoint import BlockPolicy
from dsaccel.optim import WarmupCosine, warm_restarts_for
from dsaccel.parallel import ParallelPlan
from dskernels.checks import is_integer, is_number, wrong_type, wrong_value

CHOICES = {
    "schedule": ("constant", "warmup_cosine", "warm_restarts"),
    "amp": ("off", "bf16", "fp16"),
    "sampler": ("shuffle", "dynamic", "curriculum"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of `Trainer`; those that decide the result must be the same where a run resumes.

    Args:
        steps: of the optimizer, in all.
        lr: learning rate of the default optimizer, positive. Default: 1e-3.
        schedule: of the rates: ``"constant"``; ``"warmup_cosine"``, `dsaccel.optim.WarmupCosine`; ``"warm_restarts"``,
            `dsaccel.optim.warm_restarts_for`, three cycles; or a function of the step, from 0 on, that gives the factor
            of each group's rate. A step that the loss scaler skips does not count. Default: ``"constant"``.
        batch: items of a microbatch of a dataset, on all ranks together. Default: 1.
        accumulate: microbatches of a step, at least 1. What is left at the end of an epoch is a step of its own,
            divided by its own number: `dsaccel.amp.accumulate`. Default: 1.
        max_grad_norm: largest norm of the gradients of the whole model that is left as it is. Default: no clipping.
        amp: ``"off"``; ``"bf16"`` or ``"fp16"``: the model runs under autocast, the loss does not; ``"fp16"`` scales
            the loss by `dsaccel.amp.LossScaler`. Default: ``"off"``.
        checkpoint_policy: which activations are computed again in backward, as in
            `dsaccel.checkpoint.checkpoint_blocks`; does not decide the result, but of a
            BatchNorm in a block, which updates its statistics twice. Default: ``"none"``, all are kept.
        offload_bytes: tensors from this size on that a block keeps for backward wait in CPU memory, as in
            `dsaccel.checkpoint.offload_activations`; does not decide the result. Default: none do.
        plan: how the model is spread, as in `dsaccel.parallel.ParallelPlan`, or its text, as ``"dp=2,tp=2"``. May
            change from one resumption to the next. Default: one process.
        sampler: order of a dataset: ``"shuffle"``, `dsaccel.data.ShuffledSampler`; ``"dynamic"``, items of high loss
            more often, `dsaccel.data.DynamicSampler`; ``"curriculum"``, easy ones first,
            `dsaccel.data.CurriculumSampler` over as many epochs as the run has. Default: ``"shuffle"``.
        workers: processes that load a dataset's items. Default: 0, this one.
        seed: of the order of the data and of dropout, at least 0. Default: 0.
        validate_every: steps between validations; one comes before the first step and one after the last anyway.
            Default: no others.
        save_seconds: seconds between checkpoints, not negative; 0 saves after each step. One comes at the end and at an
            interruption anyway. Default: 600.
        minutes: after which `Trainer.run` stops and saves. Default: no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit.
    """

    steps: int
    lr: float = 1e-3
    schedule: str | Callable[[int], float] = "constant"
    batch: int = 1
    accumulate: int = 1
    max_grad_norm: float | None = None
    amp: str = "off"
    checkpoint_policy: str = "none"
    offload_bytes: int | None = None
    plan: ParallelPlan | str = dataclasses.field(default_factory=ParallelPlan)
    sampler: str = "shuffle"
    workers: int = 0
    seed: int = 0
    validate_every: int | None = None
    save_seconds: float = 600.0
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("batch", 1),
            ("accumulate", 1),
            ("workers", 0),
            ("seed", 0),
            ("validate_every", 1),
            ("offload_bytes", 0),
        ):
            _check_integer(name, getattr(self, name), least)
        for name in ("lr", "max_grad_norm", "minutes"):
            _check_number(name, getattr(self, name))
        _check_number("save_seconds", self.save_seconds, zero=True)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "schedule" and callable(value)):
                raise wrong_value(name, f"one of {', '.join(choices)}", value)
        check_policy(self.checkpoint_policy)
        if isinstance(self.plan, str):
            # Frozen: this is how a field of such a class gets its final value.
            object.__setattr__(self, "plan", ParallelPlan.parse(self.plan))
        elif not isinstance(self.plan, ParallelPlan):
            raise wrong_type("plan", "a ParallelPlan or its text", self.plan)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """The schedule of the rates of ``optimizer``, at the first step."""
        if self.schedule == "warmup_cosine":
            return WarmupCosine(optimizer, self.steps)
        if self.schedule == "warm_restarts":
            return warm_restarts_for(optimizer, self.steps)
        return LambdaLR(optimizer, self.schedule if callable(self.schedule) else lambda step: 1.0)

    def what_decides_the_result(self) -> dict[str, Any]:
        """The options that must not change between a run and its resumption, as plain values."""
        names = ("steps", "lr", "schedule", "batch", "accumulate", "max_grad_norm", "amp", "sampler", "seed")
        values = {name: getattr(self, name) for name in names}
        return values | {"schedule": "custom" if callable(self.schedule) else self.schedule}


def check_policy(policy: Any) -> None:
    """`BlockPolicy.parse`, whose errors name the option ``checkpoint_policy``."""
    try:
        BlockPolicy.parse(policy)
    except (TypeError, ValueError) as error:
        raise type(error)(f"checkpoint_{error}") from None


def _check_integer(name: str, value: Any, least: int) -> None:
    if value is None and name in ("validate_every", "offload_bytes"):
        return
    if not is_integer(value):
        raise wrong_type(name, "an integer", value)
    if value < least:
        raise wrong_value(name, f"at least {least}", value)


def _check_number(name: str, value: Any, zero: bool = False) -> None:
    if value is None and name in ("max_grad_norm", "minutes"):
        return
    if not is_number(value):
        raise wrong_type(name, "a number", value)
    if not (0 < value < math.inf or (zero and value == 0)):
        raise wrong_value(name, "a number not below 0" if zero else "a positive number", value)
