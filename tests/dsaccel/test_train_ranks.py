"""dsaccel.train under a plan: the losses of one process, resumed under other plans, stopped on all ranks at once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import distributed
from train_runs import events, losses, make_trainer

from dsaccel.train import Interrupted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo"),
]

PLANS = ["dp=2", "shard=2", "shard=2,zero=1", "tp=2", "cp=2", "pp=2"]
SUMS = {"rtol": 1e-5, "atol": 1e-6}  # float32, whose sums go in other orders


def train(rank: int, folder: str, **options: Any) -> tuple[int, bool]:
    trainer = make_trainer(Path(folder), **options)
    done = trainer.run()
    return trainer.step, done


def stop_on_the_second_rank(rank: int, folder: str, **options: Any) -> tuple[int, int]:
    trainer = make_trainer(Path(folder), **options)
    advance = trainer.advance

    def advance_and_interrupt() -> dict[str, Any]:
        event = advance()
        if rank == 1 and trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return event

    trainer.advance = advance_and_interrupt  # type: ignore[method-assign]
    try:
        trainer.run()
    except Interrupted as stop:
        return trainer.step, stop.exit_code
    raise AssertionError("not stopped")


def histories(rank: int, folder: str, **options: Any) -> torch.Tensor:
    trainer = make_trainer(Path(folder), sampler="dynamic", steps=3, **options)
    trainer.run()
    trainer.data.sampler.set_epoch(1)
    return trainer.data.sampler.history.losses


def check_equal(folder: Path, whole: Path) -> None:
    torch.testing.assert_close(torch.tensor(losses(folder)), torch.tensor(losses(whole)), **SUMS)
    one, other = (
        [event["loss"] for event in events(path) if event["event"] == "validation"] for path in (folder, whole)
    )
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), **SUMS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    path = tmp_path_factory.mktemp("whole")
    make_trainer(path, accumulate=2).run()
    return path


@pytest.mark.parametrize("plan", PLANS)
def test_losses_are_those_of_one_process(plan: str, whole: Path, ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(train, 2, folder=str(tmp_path), plan=plan, accumulate=2)
    assert results == [(6, True), (6, True)]
    check_equal(tmp_path, whole)


OPTIONS = [{"amp": "bf16"}, {"amp": "fp16"}, {"checkpoint_policy": "selective"}, {"offload_bytes": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "tp=2"])
def test_options_go_with_a_plan(plan: str, options: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    make_trainer(tmp_path / "whole", **options).run()
    ranks.run(train, 2, folder=str(tmp_path / "spread"), plan=plan, **options)
    one, other = (torch.tensor(losses(tmp_path / name)) for name in ("spread", "whole"))
    # Half precision rounds products of half a batch as it does those of a whole one, but their sums in float32.
    rounding = {"bf16": 2**-8, "fp16": 2**-11}.get(options.get("amp", ""), 1e-6)
    torch.testing.assert_close(one, other, rtol=rounding, atol=0)


@pytest.mark.parametrize(
    ("first", "then"),
    [("dp=2", "tp=2"), ("tp=2", "pp=2"), ("pp=2", "shard=2"), ("shard=2,zero=1", None), (None, "cp=2")],
)
def test_a_run_goes_on_under_another_plan(
    first: str | None, then: str | None, whole: Path, ranks: Ranks, tmp_path: Path
) -> None:
    for plan, options in ((first, {"minutes": 1e-9}), (then, {})):
        arguments = {"accumulate": 2, **options}
        if plan is None:
            make_trainer(tmp_path, **arguments).run()
        else:
            ranks.run(train, 2, folder=str(tmp_path), plan=plan, **arguments)
    assert len(losses(tmp_path)) == 6
    check_equal(tmp_path, whole)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(whole: Path, ranks: Ranks, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "plan": "dp=2", "accumulate": 2}
    assert ranks.run(stop_on_the_second_rank, 2, **options) == [(2, 128 + signal.SIGTERM)] * 2
    assert ranks.run(train, 2, **options) == [(6, True)] * 2
    check_equal(tmp_path, whole)


@pytest.mark.parametrize("plan", ["dp=2", "cp=2", "pp=2", "tp=2"])
def test_all_ranks_know_the_losses_of_all_items(plan: str, ranks: Ranks, tmp_path: Path) -> None:
    expected = histories(0, str(tmp_path / "whole"))
    assert not expected.isnan().all()
    for found in ranks.run(histories, 2, folder=str(tmp_path / "spread"), plan=plan):
        torch.testing.assert_close(found, expected, equal_nan=True, **SUMS)


def test_dropout_differs_between_data_ranks_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(train, 2, folder=str(tmp_path / "once"), plan="dp=2", dropout=True)
    for _ in range(5):
        ranks.run(train, 2, folder=str(tmp_path / "pieces"), plan="dp=2", dropout=True, minutes=1e-9)
    ranks.run(train, 2, folder=str(tmp_path / "pieces"), plan="dp=2", dropout=True)
    assert events(tmp_path / "pieces") == events(tmp_path / "once")
    make_trainer(tmp_path / "alone", dropout=True).run()
    assert losses(tmp_path / "alone") != pytest.approx(losses(tmp_path / "once"), rel=1e-3)
