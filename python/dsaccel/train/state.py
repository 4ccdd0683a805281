"""What a checkpoint holds, and how a run goes on from one."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dsaccel.parallel import load_state, save_state
from dsaccel.train.folder import replacing

if TYPE_CHECKING:
    from dsaccel.train.trainer import Trainer


class RunMismatchError(ValueError):
    """The checkpoint in the folder is of a run with other options, or of another model or other data."""


def save(trainer: Trainer) -> None:
    """Writes a checkpoint, which any plan can load; all ranks call it."""
    extra = _extra(trainer)
    trainer.folder.save(
        trainer.step,
        lambda path: save_state(path, trainer.parts, trainer.optimizer, extra),
        is_main=trainer.parts.is_main,
    )


def load(trainer: Trainer) -> bool:
    """Puts the trainer where the last checkpoint is; without one, starts the files of a run.

    Returns:
        Whether there is one.

    Raises:
        RunMismatchError: it is of another run.
    """
    folder, path = trainer.folder, trainer.folder.checkpoint
    if path is None:
        if trainer.parts.is_main:
            # What is left of a run that died before its first checkpoint.
            folder.log.unlink(missing_ok=True)
            with replacing(folder.options) as file:
                file.write(json.dumps(trainer.identity, indent=2).encode() + b"\n")
        return False
    _check_identity(trainer)
    _take(trainer, load_state(path, trainer.parts, trainer.optimizer))
    if trainer.parts.is_main:
        folder.cut(trainer.step)
        events = folder.events()
        trainer.recent = events[-20:]
        trainer.validation_loss = next((e["loss"] for e in reversed(events) if e["event"] == "validation"), None)
    return True


def _extra(trainer: Trainer) -> dict[str, Any]:
    return {
        "step": trainer.step,
        "seconds": trainer.seconds,
        "data": trainer.data.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "rng": _of_all_ranks(trainer, _random_state(trainer.device)),
    }


def _take(trainer: Trainer, extra: dict[str, Any]) -> None:
    trainer.step, trainer.seconds = extra["step"], extra["seconds"]
    trainer.data.load_state_dict(extra["data"])
    trainer.scheduler.load_state_dict(extra["scheduler"])
    for group, rate in zip(trainer.optimizer.param_groups, trainer.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    trainer.scaler.load_state_dict(extra["scaler"])
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if trainer.is_spread else (0, 1)
    if len(extra["rng"]) == world:
        _set_random_state(trainer.device, extra["rng"][rank])
    else:
        # Other ranks draw other numbers in any case: these are new ones, and the same in each such resumption.
        trainer.seed_random_numbers(after=trainer.step)


def _check_identity(trainer: Trainer) -> None:
    options = trainer.folder.options
    saved = json.loads(options.read_bytes()) if options.exists() else {}
    names = dict.fromkeys([*trainer.identity, *saved])
    other = [f"{name}={saved.get(name)}" for name in names if saved.get(name) != trainer.identity.get(name)]
    if other:
        raise RunMismatchError(f"the checkpoint is of a run with {', '.join(other)}")


def _of_all_ranks(trainer: Trainer, value: Any) -> list[Any]:
    if not trainer.is_spread:
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _random_state(device: torch.device) -> dict[str, Any]:
    # Python's and numpy's are not the loop's own: a dataset draws from them.
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_state(device: torch.device, states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(states["numpy"]))
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)
