"""What can be set, from Python or from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel import ParallelPlan
from dsaccel.train.config import CHOICES, check_policy


class DemoError(Exception):
    """Something the user can set right; the command prints it without a traceback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; `parse` tells what each means.

    Raises:
        ValueError: a number is out of range.
    """

    out: Path = Path("runs/demo")
    fresh: bool = False
    steps: int = 500
    minutes: float | None = None
    seed: int = 0
    layers: int = 4
    dim: int = 128
    heads: int = 4
    window: int = 128
    length: int = 512
    batch: int = 4
    lr: float = 3e-3
    schedule: str = "warmup_cosine"
    accumulate: int = 1
    amp: str = "off"
    checkpoint_policy: str = "none"
    sampler: str = "shuffle"
    plan: ParallelPlan = dataclasses.field(default_factory=ParallelPlan)
    backend: str | None = None
    threads: int | None = None
    compare: bool = True
    compare_length: int = 2048

    def __post_init__(self) -> None:
        """Checks the ranges; what concerns the model alone, the model checks."""
        for name in ("steps", "length", "batch", "accumulate", "threads", "compare_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        check_policy(self.checkpoint_policy)
        for name, multiple in (("batch", self.plan.batch_multiple), ("length", self.plan.cp)):
            if getattr(self, name) % multiple:
                raise ValueError(
                    f"{name}: expected a multiple of {multiple} for plan {self.plan}, got {getattr(self, name)}"
                )
        for name in ("lr", "minutes"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a positive number, got {value}")

    def of_the_model(self) -> dict[str, Any]:
        """The options that the model and its data are made by; the others are those of `dsaccel.train.TrainConfig`."""
        return {name: getattr(self, name) for name in ("layers", "dim", "heads", "window", "length", "backend")}

    def model(self) -> SlidingWindowLM:
        """The model of the run, over bytes, with fresh weights."""
        positions = max(self.length, self.compare_length)
        return SlidingWindowLM(
            256, self.dim, self.layers, self.heads, window=self.window, max_positions=max(positions, 4096)
        )


# Seconds in all: for a first look, and for the tests. So small a model is slower on two threads than on one.
QUICK: dict[str, Any] = {
    "threads": 1,
    "steps": 30,
    "layers": 2,
    "dim": 32,
    "heads": 2,
    "window": 16,
    "length": 64,
    "compare_length": 256,
}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line; argparse reports what is wrong with it, and exits."""
    parser = argparse.ArgumentParser(
        prog="python -m dsaccel.demo",
        description="Trains a small sliding-window transformer on the texts of Python's own help, byte by byte; then "
        "compares speed and memory of the training step with other implementations of the attention. Interrupt it "
        "whenever you like: the same command goes on from where it was.",
        argument_default=argparse.SUPPRESS,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}

    def add(name: str, kind: Callable[[str], Any], text: str, choices: Sequence[str] | None = None) -> None:
        default = defaults[name.replace("-", "_")]
        text = text if default is None else f"{text} (default: {default})"
        metavar = None if choices else kind.__name__.upper()
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, choices=choices, help=text)

    add("out", Path, "folder for pictures, log and checkpoint")
    parser.add_argument("--fresh", action="store_true", help="start over, instead of going on from the checkpoint")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: seconds, to see that it runs")
    add("steps", int, "training steps")
    add("minutes", float, "stop after this much training; the same command goes on from there")
    add("seed", int, "of weights, batches and the sample")
    add("layers", int, "transformer blocks")
    add("dim", int, "components of a token")
    add("heads", int, "attention heads")
    add("window", int, "tokens that a layer sees, itself included")
    add("length", int, "tokens of a training sequence")
    add("batch", int, "sequences of a training step")
    add("lr", float, "highest learning rate")
    add("schedule", str, "of the learning rate", CHOICES["schedule"])
    add("accumulate", int, "batches of a step, whose gradients are added up")
    add("amp", str, "train under autocast to this precision", CHOICES["amp"])
    parser.add_argument("--bf16", dest="amp", action="store_const", const="bf16", help="the same as --amp bf16")
    add(
        "sampler",
        str,
        "order of the text: each piece once an epoch; hard ones more often; easy ones first",
        CHOICES["sampler"],
    )
    add("checkpoint-policy", str, "blocks computed again in backward: none, full, every:2, selective, ...")
    text = "processes, as dp=2,tp=2: starts them and trains in all (default: this one)"
    parser.add_argument("--plan", type=_plan, metavar="PLAN", help=text)
    add("backend", str, "of the attention in training (default: the first that serves)", ("cpu", "reference"))
    add("threads", int, "CPU threads (default: torch's choice)")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="leave the comparison out")
    add("compare-length", int, "tokens of a sequence in the comparison")
    given = vars(parser.parse_args(arguments))
    quick = QUICK if given.pop("quick", False) else {}
    try:
        return Options(**{**quick, **given})
    except ValueError as error:
        name, _, text = str(error).partition(": ")
        parser.error(f"--{name.replace('_', '-')}: {text}")


def _plan(text: str) -> ParallelPlan:
    try:
        return ParallelPlan.parse(text)
    except (TypeError, ValueError) as error:
        # Of a ValueError, argparse would not show the text.
        raise argparse.ArgumentTypeError(str(error)) from error
