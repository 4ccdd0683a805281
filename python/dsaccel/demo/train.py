"""Training that can be interrupted at any moment and resumes exactly."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.demo.data import Batches, Corpus, even_windows
from dsaccel.demo.options import DemoError, Options
from dsaccel.demo.progress import Progress

WARMUP = 0.05
FINAL_LR = 0.1
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
VALIDATION_WINDOWS = 24
VALIDATIONS = 10
SECONDS_BETWEEN_CHECKPOINTS = 10.0


def loss_of(model: nn.Module, windows: Tensor, bf16: bool = False) -> Tensor:
    """The mean cross-entropy of every byte given those before it, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW; the gains of the norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, bf16: bool = False) -> Tensor:
    """One step of training; returns the loss before it."""
    loss = loss_of(model, windows, bf16)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def learning_rate(step: int, steps: int, highest: float) -> float:
    """A linear rise over the first steps, then half a cosine down to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


class Training:
    """All that changes while training, in one place: `state_dict` has it all.

    Args:
        options: of the run.
        corpus: the text.

    Attributes:
        step: how many steps are done.
        seconds: how long they took, validations included, over all resumptions.
        events: what happened, in order, as in ``log.jsonl``.
    """

    def __init__(self, options: Options, corpus: Corpus) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.digest = corpus.digest
        self.model = options.model()
        self.optimizer = make_optimizer(self.model, options.lr)
        self.batches = Batches(corpus.train, options.length, options.batch, options.seed)
        self.held_out = even_windows(corpus.validation, options.length, VALIDATION_WINDOWS)
        self.step = 0
        self.seconds = 0.0
        self.events: list[dict[str, Any]] = []

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.options.steps

    def advance(self) -> float:
        """Does the next step and returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options.steps, self.options.lr)
        loss = train_step(self.model, self.optimizer, self.batches.next(), self.options.bf16)
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the held-out windows, the same every time."""
        parts = self.held_out.split(self.options.batch)
        losses = [loss_of(self.model, part, self.options.bf16).double() * len(part) for part in parts]
        return (torch.stack(losses).sum() / len(self.held_out)).item()

    def found(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [e for e in self.events if e["event"] == event]

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the training depends on."""
        return {
            "options": self.options.what_decides_the_result(),
            "digest": self.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "events": self.events,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was called.

        Raises:
            DemoError: the state belongs to a run with other options or another text.
        """
        options = self.options.what_decides_the_result()
        other = [
            f"{name}={state['options'].get(name)}" for name in options if state["options"].get(name) != options[name]
        ]
        if state["digest"] != self.digest:
            other.append("the help texts of another Python")
        if other:
            raise DemoError(f"the checkpoint is of a run with {', '.join(other)}; use --fresh to start over, or --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["rng"])
        self.step, self.seconds, self.events = state["step"], state["seconds"], state["events"]


class RunFolder:
    """The files of a run: ``checkpoint.pt``, which holds everything, and ``log.jsonl``, its readable part.

    Args:
        path: the folder; it is made when first written to.
    """

    NAMES = ("checkpoint.pt", "log.jsonl", "loss.png", "comparison.png")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint, self.log, self.loss_picture, self.comparison_picture = (path / name for name in self.NAMES)

    def clear(self) -> None:
        """Removes these files, and no others."""
        for name in self.NAMES:
            (self.path / name).unlink(missing_ok=True)

    def save(self, training: Training) -> None:
        """Writes the checkpoint; whoever is interrupted here has the one before."""
        with _replacing(self.checkpoint) as file:
            torch.save(training.state_dict(), file)

    def load(self, training: Training) -> bool:
        """Puts ``training`` where the checkpoint is, if there is one, and cuts the log to it."""
        if not self.checkpoint.exists():
            return False
        training.load_state_dict(torch.load(self.checkpoint, weights_only=True))
        with _replacing(self.log) as file:
            file.writelines(_line(event) for event in training.events)
        return True

    def append(self, training: Training, event: dict[str, Any]) -> None:
        """Notes an event."""
        training.events.append(event)
        self.path.mkdir(parents=True, exist_ok=True)
        # Without a checkpoint, a log that is there is the rest of a run that was killed before its first one.
        with self.log.open("ab" if len(training.events) > 1 else "wb") as file:
            file.write(_line(event))


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    # The new file takes the old one's place in one move, when it is safely on disk.
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current step; the second acts as usual."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruption:
        # Python hands signals to the main thread alone.
        numbers = self.SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: object) -> None:
        self.requested = True
        self.__exit__()


def train(training: Training, folder: RunFolder, progress: Progress) -> bool:
    """Trains to the end, and returns True; or until ``options.minutes`` are over, and returns False.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM came. As in the other cases, the checkpoint has the last step.
    """
    options, every = training.options, max(1, training.options.steps // VALIDATIONS)
    if not training.events:
        _validate(training, folder)
    start = saved = time.monotonic()
    with Interruption() as interruption:
        while not training.finished:
            begin = time.monotonic()
            event = {"event": "train", "step": training.step + 1, "loss": training.advance()}
            rate = options.batch * options.length / (time.monotonic() - begin)
            folder.append(training, event | {"tokens_per_second": rate})
            if training.step % every == 0 or training.finished:
                _validate(training, folder)
            now = time.monotonic()
            training.seconds += now - begin
            progress.update(_status(training), force=training.finished)
            stop = interruption.requested or (options.minutes is not None and now - start >= 60 * options.minutes)
            if stop or training.finished or now - saved >= SECONDS_BETWEEN_CHECKPOINTS:
                folder.save(training)
                saved = now
            if interruption.requested:
                raise KeyboardInterrupt
            if stop:
                break
    return training.finished


def _validate(training: Training, folder: RunFolder) -> None:
    loss = training.validate()
    folder.append(training, {"event": "validation", "step": training.step, "loss": loss, "perplexity": math.exp(loss)})


def _status(training: Training) -> str:
    steps = training.options.steps
    # Averages over the last steps: single batches differ too much to be followed by eye.
    recent = [e for e in training.events[-20:] if e["event"] == "train"]
    loss = sum(e["loss"] for e in recent) / len(recent)
    rate = len(recent) / sum(1 / e["tokens_per_second"] for e in recent)
    left = training.seconds / training.step * (steps - training.step)
    perplexity = training.found("validation")[-1]["perplexity"]
    return (
        f"step {training.step:>{len(str(steps))}}/{steps}   loss {loss:.2f}   validation perplexity {perplexity:.2f}   "
        f"{rate / 1000:.1f}k tokens/s   {left:.0f} s left"
    )
