"""What the demo hands to `dsaccel.train`: model, data, loss and optimizer."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from dsaccel.demo.data import Batches, Corpus, Windows, even_windows
from dsaccel.demo.options import DemoError, Options
from dsaccel.train import Progress, RunMismatchError, TrainConfig, Trainer

FINAL_LR = 0.1
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
VALIDATION_WINDOWS = 24
VALIDATIONS = 10
SECONDS_BETWEEN_CHECKPOINTS = 10.0
DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence in nats, shape ``[B]``."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def loss_of(model: nn.Module, windows: Tensor, amp: str = "off") -> Tensor:
    """The mean cross-entropy of every byte given those before it, in nats."""
    with torch.autocast("cpu", DTYPES[amp], enabled=amp != "off"):
        logits = model(windows[:, :-1])
    return loss_fn(logits, windows[:, 1:]).mean()


def make_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW; the gains of the norms are not decayed."""
    matrices = [p for p in parameters if p.dim() > 1]
    gains = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, amp: str = "off") -> Tensor:
    """One step of training as `dsaccel.train` does it, and no more; returns the loss before it."""
    loss = loss_of(model, windows, amp)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def make_trainer(options: Options, corpus: Corpus, progress: Progress | None = None) -> Trainer:
    """The training of ``options``, not begun yet.

    With the sampler ``"shuffle"`` the text is cut anew in each epoch (`Batches`); the others need windows that stay the
    same (`Windows`), of which those are hard that a compressor can make little of.
    """
    torch.manual_seed(options.seed)
    held_out = even_windows(corpus.validation, options.length, VALIDATION_WINDOWS)
    rows = options.plan.dp * options.plan.shard
    held_out = held_out[: len(held_out) // rows * rows]
    if not len(held_out):
        raise DemoError(f"the held-out text has less than {rows} windows; lower --length, or dp and shard of --plan")
    data: Any
    difficulty = None
    if options.sampler == "shuffle":
        data = Batches(corpus.train, options.length, options.batch, options.seed)
    else:
        data = Windows(corpus.train, options.length)
    if options.sampler == "curriculum":
        difficulty = [float(len(zlib.compress(bytes(inputs.tolist())))) for inputs, _ in data]
    config = TrainConfig(
        steps=options.steps,
        lr=options.lr,
        schedule=options.schedule,
        batch=options.batch,
        accumulate=options.accumulate,
        max_grad_norm=MAX_GRAD_NORM,
        amp=options.amp,
        checkpoint_policy=options.checkpoint_policy,
        plan=options.plan,
        sampler=options.sampler,
        seed=options.seed,
        validate_every=max(1, options.steps // VALIDATIONS),
        save_seconds=SECONDS_BETWEEN_CHECKPOINTS,
        minutes=options.minutes,
    )
    return Trainer(
        config,
        model=options.model(),
        loss_fn=loss_fn,
        data=data,
        folder=options.out,
        optimizer=lambda parameters: make_optimizer(parameters, options.lr),
        validation=[(windows[:, :-1], windows[:, 1:]) for windows in held_out.split(options.batch)],
        difficulty=difficulty,
        identity=options.of_the_model() | {"text": corpus.digest},
        progress=progress,
    )


def go_to_checkpoint(trainer: Trainer, options: Options) -> bool:
    """Resumes where the last run stopped, or, with ``options.fresh``, forgets it; says whether there is a checkpoint.

    Raises:
        DemoError: the checkpoint is of a run with other options.
    """
    if options.fresh:
        if trainer.parts.is_main:
            trainer.folder.clear()
        if trainer.is_spread:
            distributed.barrier()
    try:
        return trainer.resume()
    except RunMismatchError as error:
        raise DemoError(f"{error}; use --fresh to start over, or --out") from error
