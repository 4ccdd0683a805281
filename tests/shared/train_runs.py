"""A tiny language model and its runs, which the tests of dsaccel.train share; a command that dies when told to."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dsaccel.modules import SlidingWindowLM
from dsaccel.train import TrainConfig, Trainer

VOCABULARY, LENGTH, ITEMS = 12, 8, 18
TIMINGS = ("seconds", "lr")


class Dropping(nn.Module):
    """A model with dropout, so that random numbers decide the result."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SlidingWindowLM(VOCABULARY, 8, 2, 2, window=4, max_positions=LENGTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.model(tokens))


def make_model() -> SlidingWindowLM:
    torch.manual_seed(3)
    return SlidingWindowLM(VOCABULARY, 8, 2, 2, window=4, max_positions=LENGTH)


def make_data() -> TensorDataset:
    tokens = torch.randint(VOCABULARY, (ITEMS, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of each item, shape ``[B]``."""
    return F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none").mean(1)


def make_trainer(folder: Path, *, dropout: bool = False, **options: Any) -> Trainer:
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"steps": 6, "lr": 1e-2, "batch": 4, "max_grad_norm": 0.5, "schedule": "warmup_cosine"}
    difficulty = torch.arange(ITEMS) if options.get("sampler") == "curriculum" else None
    return Trainer(
        TrainConfig(**{**defaults, **options}),
        model=Dropping() if dropout else make_model(),
        loss_fn=loss_fn,
        data=make_data(),
        folder=folder,
        difficulty=difficulty,
        validation=[tuple(x[:4] for x in make_data().tensors)],
    )


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder) if event["event"] == "train"]


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in trainer.parts.named_parameters()]


def die_at(moment: str, step: int) -> None:
    """Makes this process end as by ``kill -9`` at a moment of ``step``."""
    from torch.distributed.checkpoint import FileSystemWriter

    from dsaccel.parallel import state
    from dsaccel.train import RunFolder

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def at_step(function: Any, before: bool, counts: list[int]) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counts[0] += 1
            if before and counts[0] == step:
                dies()
            result = function(*args, **kwargs)
            if counts[0] == step:
                dies()
            return result

        return wrapped

    if moment == "in a step":
        Trainer._update = at_step(Trainer._update, False, [0])
    elif moment == "while the checkpoint is written":
        FileSystemWriter.finish = at_step(FileSystemWriter.finish, True, [0])
    elif moment == "before the checkpoint is in place":
        state.save = at_step(state.save, False, [0])
    elif moment == "before the last one is removed":
        RunFolder._remove_checkpoints = at_step(RunFolder._remove_checkpoints, True, [0])
    else:
        raise ValueError(moment)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, moment, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_at(moment, step)
    make_trainer(folder, dropout=True, save_seconds=0).run()
