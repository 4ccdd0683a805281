"""A run that is interrupted, killed or continued elsewhere gives what it would have given."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from train_runs import events, losses, make_trainer, weights

from dsaccel.train import Interrupted, RunFolder, RunMismatchError, TrainConfig, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    "fp16": {"amp": "fp16"},
    "dynamic": {"sampler": "dynamic"},
    "curriculum": {"sampler": "curriculum", "accumulate": 2},
    "accumulated": {"accumulate": 3, "schedule": "warm_restarts", "dropout": True},
    "workers": {"workers": 1},
}


def assert_same(one: Trainer, other: Trainer) -> None:
    for mine, wanted in zip(weights(one), weights(other), strict=True):
        assert torch.equal(mine, wanted)
    assert events(one.folder.path) == events(other.folder.path)


@pytest.mark.parametrize("kind", KINDS)
def test_run_in_pieces_equals_run_at_once(kind: str, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", **KINDS[kind])
    assert whole.run()
    for step in range(1, 7):
        # A trainer of its own each time, as a new process would have.
        torch.manual_seed(99)
        piece = make_trainer(tmp_path / "pieces", **KINDS[kind], minutes=1e-9)
        assert piece.run() == (step == 6)
        assert piece.step == step
    assert_same(piece, whole)


MOMENTS = (
    ("in a step", 1),
    ("in a step", 4),
    ("while the checkpoint is written", 3),
    ("before the checkpoint is in place", 3),
    ("before the last one is removed", 3),
)


@pytest.mark.parametrize(("moment", "step"), MOMENTS, ids=[f"{moment} {step}" for moment, step in MOMENTS])
def test_killed_run_resumes_to_the_same_losses(moment: str, step: int, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", dropout=True)
    whole.run()
    script = Path(__file__).parents[1] / "shared" / "train_runs.py"
    killed = subprocess.run([sys.executable, str(script), str(tmp_path / "killed"), moment, str(step)], timeout=300)
    assert killed.returncode == -signal.SIGKILL
    with (tmp_path / "killed" / "log.jsonl").open("a") as log:
        log.write('{"event": "tra')
    again = make_trainer(tmp_path / "killed", dropout=True)
    assert again.resume() == (step > 1)
    assert step - 2 <= again.step <= step
    assert again.run()
    assert_same(again, whole)
    assert sorted(path.name for path in again.folder.path.iterdir()) == ["checkpoint-6", "log.jsonl", "run.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_after_the_step_and_keeps_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(tmp_path / "whole", dropout=True)
    whole.run()
    stopped = make_trainer(tmp_path / "stopped", dropout=True)
    advance, handler = stopped.advance, signal.getsignal(number)

    def advance_and_interrupt() -> dict[str, Any]:
        event = advance()
        if stopped.step == 4:
            signal.raise_signal(number)
        return event

    monkeypatch.setattr(stopped, "advance", advance_and_interrupt)
    with pytest.raises(Interrupted, match=f"stopped by {number.name}") as stop:
        stopped.run()
    assert stop.value.exit_code == 128 + number
    assert signal.getsignal(number) is handler
    again = make_trainer(tmp_path / "stopped", dropout=True)
    assert again.resume()
    assert again.step == 4
    again.run()
    assert_same(again, whole)


class Noisy(Dataset[Any]):
    """Items that change at each look, by random numbers of ``draw``."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), index / 12) + self.draw(), torch.tensor(index % 2)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 - the global one is what is tested


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_dataset_draws_on_where_it_was(kind: str, tmp_path: Path) -> None:
    draw = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": numpy.random.rand}[kind]

    def trainer(name: str, **options: Any) -> Trainer:
        torch.manual_seed(3)
        # Batch normalisation has buffers; targets are one number an item.
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        config = TrainConfig(steps=4, batch=4, **options)
        return Trainer(config, model=model, loss_fn=F.cross_entropy, data=Noisy(draw), folder=tmp_path / name)

    whole = trainer("whole")
    _seed(1)
    whole.run()
    for step in range(4):
        _seed(99 if step else 1)
        piece = trainer("pieces", minutes=1e-9)
        piece.run()
    assert events(piece.folder.path) == events(whole.folder.path)
    mine, wanted = (t.parts.modules[0].state_dict() for t in (piece, whole))
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_log_is_cut_to_the_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, minutes=1e-9)
    trainer.run()
    kept = events(tmp_path)
    trainer.note({"event": "train", "step": 2, "loss": 1.0})
    assert len(trainer.folder.events("train")) == 2
    again = make_trainer(tmp_path)
    assert again.resume()
    assert events(tmp_path) == kept


def test_log_of_a_run_that_died_before_its_first_checkpoint_is_not_continued(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.note({"event": "train", "step": 1, "loss": 1.0})
    assert not make_trainer(tmp_path).resume()
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"lr": 0.5}, "lr=0.01"), ({"sampler": "dynamic"}, "sampler=shuffle"), ({"seed": 1, "batch": 2}, "seed=0")],
)
def test_other_options_do_not_resume(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_trainer(tmp_path, minutes=1e-9).run()
    with pytest.raises(RunMismatchError, match=f"the checkpoint is of a run with .*{message}"):
        make_trainer(tmp_path, **changes).run()


def test_what_does_not_decide_the_result_may_change(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.run()
    make_trainer(tmp_path / "pieces", minutes=1e-9).run()
    again = make_trainer(tmp_path / "pieces", checkpoint_policy="full", offload_bytes=0, save_seconds=0)
    assert again.run()
    assert_same(again, whole)


def test_finished_run_does_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path).run()
    before = losses(tmp_path)
    again = make_trainer(tmp_path)
    assert again.run()
    assert again.finished
    assert losses(tmp_path) == before


def test_checkpoint_moved_aside_for_another_of_its_step_is_found(tmp_path: Path) -> None:
    # `save_state` dies between its two moves, where one step is saved twice.
    trainer = make_trainer(tmp_path, minutes=1e-9)
    trainer.run()
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-1.old")
    again = make_trainer(tmp_path)
    assert again.resume()
    assert again.step == 1
    again.run()
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint-6"]


def test_checkpoint_is_removed_beside_a_torn_one_of_its_step(tmp_path: Path) -> None:
    for ending in ("", ".part", ".old"):
        (tmp_path / f"checkpoint-2{ending}").mkdir()
    RunFolder(tmp_path).save(3, lambda path: path.mkdir(), is_main=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_clear_leaves_what_is_not_of_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run()
    (tmp_path / "checkpoint-notes").mkdir()
    (tmp_path / "notes.txt").touch()
    trainer.folder.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-notes", "notes.txt"]
