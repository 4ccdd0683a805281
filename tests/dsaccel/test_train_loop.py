"""dsaccel.train in one process: the steps are those of a loop by hand, and each option does what it says."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from train_runs import ITEMS, events, loss_fn, losses, make_data, make_model, make_trainer, weights

from dsaccel.checkpoint import BlockPolicy
from dsaccel.data import ResumableLoader, ShuffledSampler
from dsaccel.parallel import ParallelPlan
from dsaccel.train import Progress, TrainConfig, Trainer, status_line

pytestmark = pytest.mark.usefixtures("one_thread")


def batches_by_hand(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    loader = ResumableLoader(make_data(), 4, sampler=ShuffledSampler(ITEMS, seed=seed), drop_last=True)
    batches: list[tuple[Tensor, Tensor]] = []
    while len(batches) < count:
        batches += list(loader)
    return batches[:count]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_are_those_of_a_loop_by_hand(clip: float | None, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_grad_norm=clip)
    trainer.run()
    model, expected, norms = make_model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches_by_hand(6)):
        # One step of warmup (5 % of 6, at least 1), then half a cosine from step 1 on, down to a tenth.
        optimizer.param_groups[0]["lr"] = 1e-2 * (0.55 + 0.45 * math.cos(math.pi * max(step - 1, 0) / 5))
        loss = loss_fn(model(x), y).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    for mine, wanted in zip(weights(trainer), model.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    logged = [event.get("grad_norm") for event in events(tmp_path) if event["event"] == "train"]
    assert logged == ([None] * 6 if clip is None else pytest.approx(norms, rel=1e-4))
    assert max(norms) > 0.5


class OneBatchAnEpoch:
    """Microbatches of one number each, an epoch long, which a run may resume anywhere."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.position = values, 0

    def __iter__(self) -> Any:
        while self.position < len(self.values):
            self.position += 1
            yield torch.tensor([[self.values[self.position - 1]]]), torch.zeros(1, 1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_seven_microbatches_by_four_are_two_steps_and_the_second_is_divided_by_three(tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    trainer = Trainer(
        TrainConfig(steps=2, accumulate=4),
        model=model,
        loss_fn=lambda outputs, targets: outputs.mean(),
        data=OneBatchAnEpoch(values),
        folder=tmp_path,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    trainer.run()
    # The gradient of each is its value.
    assert model.weight.item() == pytest.approx(-(1 + 2 + 3 + 4) / 4 - (50 + 60 + 70) / 3)
    assert [event["samples"] for event in events(tmp_path)] == [4, 3]


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
def test_checkpointing_changes_no_bit(policy: str, tmp_path: Path) -> None:
    plain, recomputing = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b", checkpoint_policy=policy)
    plain.run()
    recomputing.run()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert all(map(torch.equal, weights(plain), weights(recomputing)))
    assert any("forward" in vars(module) for module in recomputing.parts.modules[0].modules())


@pytest.mark.parametrize(("amp", "rounding"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_half_precision_follows_single(amp: str, rounding: float, tmp_path: Path) -> None:
    make_trainer(tmp_path / "single").run()
    half = make_trainer(tmp_path / "half", amp=amp)
    half.run()
    single, rounded = torch.tensor(losses(tmp_path / "single")), torch.tensor(losses(tmp_path / "half"))
    # Losses of 2.4 from logits below 1 that are rounded once in each of a dozen layers.
    assert 0 < (single - rounded).abs().max() < 12 * rounding
    assert half.parts.modules[0].embed.weight.dtype == torch.float32


def test_a_skipped_step_halves_the_scale_and_leaves_rate_and_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, amp="fp16", steps=4)
    plain = trainer.loss._loss_fn
    trainer.loss._loss_fn = lambda logits, y: plain(logits, y) * (math.inf if trainer.step == 1 else 1)
    states = [weights(trainer)]
    for _ in range(4):
        trainer.note(trainer.advance())
        states.append(weights(trainer))
    found = events(tmp_path)
    assert [event.get("skipped", False) for event in found] == [False, True, False, False]
    assert [event["loss_scale"] for event in found] == [8192, 8192, 4096, 4096]
    assert found[1]["lr"] == found[2]["lr"] > found[3]["lr"]
    assert all(map(torch.equal, states[1], states[2]))
    assert not torch.equal(states[2][0], states[3][0])


def test_dynamic_sampler_learns_the_loss_of_each_item(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, sampler="dynamic", batch=9, steps=2, lr=1e-12)
    trainer.run()
    history = trainer.data.sampler.history
    trainer.data.sampler.set_epoch(1)
    with torch.no_grad():
        x, y = make_data().tensors
        expected = loss_fn(make_model()(x), y)
    seen = ~history.losses.isnan()
    # With replacement some come twice, and others not at all.
    assert 5 < seen.sum() < ITEMS
    torch.testing.assert_close(history.losses[seen].double(), expected[seen].double(), rtol=1e-5, atol=0)


def test_validation_losses_do_not_reach_the_sampler(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, sampler="dynamic", steps=2)
    trainer.validate()
    assert trainer.loss._values == []


def test_curriculum_begins_with_easy_items(tmp_path: Path) -> None:
    # 10 epochs of 18 items, of which 3 are easy: 0.3, 0.53 and 0.77 of the items, in batches of 1.
    trainer = make_trainer(tmp_path, sampler="curriculum", batch=1, steps=6 + 10 + 14 + 7 * 18)
    assert trainer.data.sampler.epochs == 10
    ids = [int(batch[0]) for batch in trainer.data]
    assert sorted(ids) == list(range(6))
    assert sorted(int(batch[0]) for batch in trainer.data) == list(range(10))


def test_validation_counts_each_item_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    x, y = (part[:7] for part in make_data().tensors)
    trainer.validation = [(x[:4], y[:4]), (x[4:], y[4:])]
    with torch.no_grad():
        expected = loss_fn(make_model()(x), y).mean().item()
    assert trainer.validate() == pytest.approx(expected, rel=1e-6)


def test_validation_comes_first_last_and_as_often_as_asked(tmp_path: Path) -> None:
    make_trainer(tmp_path, validate_every=4).run()
    assert [event["step"] for event in events(tmp_path) if event["event"] == "validation"] == [0, 4, 6]


def test_schedule_may_be_a_function(tmp_path: Path) -> None:
    make_trainer(tmp_path, schedule=lambda step: 0.5**step).run()
    rates = [event["lr"] for event in events(tmp_path) if event["event"] == "train"]
    assert rates == pytest.approx([1e-2 * 0.5**step for step in range(6)])


def test_progress_and_status(tmp_path: Path) -> None:
    stream = io.StringIO()
    trainer = make_trainer(tmp_path)
    trainer._progress = Progress(stream)
    trainer.run()
    last = stream.getvalue().splitlines()[-1]
    assert last == status_line(trainer)
    assert last.startswith("step 6/6   loss ")
    assert "validation loss" in last
    assert "0 s left" in last


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps: expected at least 1, got 0"),
        ({"steps": 1.5}, TypeError, "steps: expected an integer"),
        ({"lr": 0}, ValueError, "lr: expected a positive number, got 0"),
        ({"lr": "fast"}, TypeError, "lr: expected a number"),
        ({"batch": 0}, ValueError, "batch: expected at least 1"),
        ({"accumulate": 0}, ValueError, "accumulate: expected at least 1"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm: expected a positive number"),
        ({"amp": "fp8"}, ValueError, "amp: expected one of off, bf16, fp16, got fp8"),
        ({"schedule": "cosine"}, ValueError, "schedule: expected one of constant, warmup_cosine, warm_restarts"),
        ({"sampler": "random"}, ValueError, "sampler: expected one of shuffle, dynamic, curriculum"),
        ({"checkpoint_policy": "half"}, ValueError, "^checkpoint_policy: expected 'none', 'full'"),
        ({"offload_bytes": -1}, ValueError, "offload_bytes: expected at least 0"),
        ({"plan": 4}, TypeError, "plan: expected a ParallelPlan or its text"),
        ({"save_seconds": -1}, ValueError, "save_seconds: expected a number not below 0"),
        ({"minutes": math.nan}, ValueError, "minutes: expected a positive number"),
    ],
)
def test_wrong_options(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainConfig(**{"steps": 5, **changes})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data())


@pytest.mark.parametrize(
    ("options", "data", "difficulty", "error", "message"),
    [
        ({}, Stream(), None, TypeError, "data: expected a dataset with len and items, or batches with state_dict"),
        ({}, DataLoader(make_data()), None, TypeError, "data: expected .*ResumableLoader"),
        ({"batch": 19}, make_data(), None, ValueError, "data: expected at least batch = 19 items, got 18"),
        ({"sampler": "dynamic"}, OneBatchAnEpoch([1.0]), None, ValueError, "sampler: expected 'shuffle'"),
        ({"sampler": "curriculum"}, make_data(), None, ValueError, "difficulty: expected one number for each item"),
        ({"sampler": "curriculum"}, make_data(), [1.0], ValueError, "difficulty: expected one number for each of 18"),
        ({}, make_data(), [1.0] * 18, ValueError, "difficulty: expected None with sampler='shuffle'"),
        ({"plan": "dp=2", "batch": 3}, make_data(), None, ValueError, "batch: expected a multiple of 2 for plan dp=2"),
        ({"plan": "pp=2,dp=2", "batch": 6}, make_data(), None, ValueError, "batch: expected a multiple of 4 for plan"),
        ({"plan": "dp=2", "batch": 2}, make_data(), None, (RuntimeError, ValueError), "torch.distributed|process"),
    ],
)
def test_wrong_data(
    options: dict[str, Any], data: Any, difficulty: Any, error: Any, message: str, tmp_path: Path
) -> None:
    config = TrainConfig(**{"steps": 2, **options})
    with pytest.raises(error, match=message):
        Trainer(config, model=make_model(), loss_fn=loss_fn, data=data, difficulty=difficulty, folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "model: expected a module"),
        ({"loss_fn": None}, "loss_fn: expected a function"),
        ({"optimizer": 3}, "optimizer: expected a function"),
        ({"identity": [1]}, "identity: expected a dictionary or None"),
        ({"validation": iter([])}, "validation: expected an iterable that can be gone through again"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {"model": make_model(), "loss_fn": loss_fn, "data": make_data(), "folder": tmp_path}
    with pytest.raises(TypeError, match=message):
        Trainer(TrainConfig(steps=2), **{**arguments, **changes})
    with pytest.raises(ValueError, match="model: expected a module with parameters, got Identity"):
        Trainer(TrainConfig(steps=2), **{**arguments, "model": nn.Identity()})


def test_empty_data_and_wrong_losses_are_said(tmp_path: Path) -> None:
    def trainer(data: Any, loss: Any, **options: Any) -> Trainer:
        config = TrainConfig(steps=2, **options)
        return Trainer(config, model=nn.Linear(1, 1), loss_fn=loss, data=data, folder=tmp_path)

    with pytest.raises(ValueError, match="data: expected at least one batch in an epoch, got none"):
        trainer(OneBatchAnEpoch([]), lambda outputs, targets: outputs.mean()).advance()
    with pytest.raises(ValueError, match=r"loss_fn: expected losses of shape \[\] or \[B\], got \[1, 1\]"):
        trainer(OneBatchAnEpoch([1.0]), lambda outputs, targets: outputs).advance()
    pairs = TensorDataset(torch.randn(4, 1), torch.randn(4, 1))
    with pytest.raises(ValueError, match=r"loss_fn: expected losses of shape \[1\], got \[\]"):
        trainer(pairs, lambda outputs, targets: outputs.mean(), sampler="dynamic").advance()
    with pytest.raises(ValueError, match="validation: expected at least one batch, got none"):
        trainer(pairs, lambda outputs, targets: outputs.mean()).validate()


def test_plan_and_policy_may_be_text() -> None:
    assert TrainConfig(steps=1, plan="dp=2,tp=2").plan == ParallelPlan(dp=2, tp=2)
    assert str(BlockPolicy.parse(TrainConfig(steps=1, checkpoint_policy="every:2").checkpoint_policy)) == "every:2"
