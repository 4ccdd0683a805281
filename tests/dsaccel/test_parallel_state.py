"""A checkpoint written under one plan goes on under another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from parallel_models import gathered, language_model, loss_fn
from ranks import Ranks
from torch import Tensor, nn

from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel import ParallelModel, ParallelPlan, load_state, parallelize, save_state
from dskernels import use_backend


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    gains = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": gains, "weight_decay": 0.0}], lr=1e-2)


def steps(parts: ParallelModel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    with use_backend("reference"):
        for x in tokens:
            parts.forward_backward(parts.local_batch(x[:, :-1]), parts.local_batch(x[:, 1:]))
            parts.clip_grad_norm_(0.2)
            optimizer.step()
            optimizer.zero_grad()


def batches() -> Tensor:
    torch.manual_seed(5)
    return torch.randint(0, 32, (4, 4, 25))


def write(rank: int, spec: str, path: str) -> None:
    parts = parallelize(language_model(), ParallelPlan.parse(spec), loss_fn=loss_fn)
    optimizer = parts.optimizer(adamw)
    steps(parts, optimizer, batches()[:2])
    for group in optimizer.param_groups:
        group["lr"] = 5e-3
    save_state(path, parts, optimizer, {"step": 2, "rank": rank, "rng": torch.get_rng_state()})


def go_on(rank: int, spec: str, path: str, wanted: dict[str, Tensor]) -> None:
    # Weights of another seed, and an optimizer that has not stepped.
    parts = parallelize(language_model(seed=7), ParallelPlan.parse(spec), loss_fn=loss_fn)
    optimizer = parts.optimizer(adamw)
    extra = load_state(path, parts, optimizer)
    assert (extra["step"], extra["rank"]) == (2, 0)
    assert extra["rng"].dtype == torch.uint8
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3}
    steps(parts, optimizer, batches()[2:])
    # A pipeline's norm is rounded to float32, which shows where AdamW's moments are as small as its eps.
    for name, parameter in gathered(parts).items():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-6, atol=1e-8)


def uninterrupted() -> dict[str, Tensor]:
    parts = parallelize(language_model(), ParallelPlan(), loss_fn=loss_fn)
    optimizer = parts.optimizer(adamw)
    steps(parts, optimizer, batches()[:2])
    for group in optimizer.param_groups:
        group["lr"] = 5e-3
    steps(parts, optimizer, batches()[2:])
    return gathered(parts)


READERS = {
    "dp=1": "shard=2 tp=2 pp=2 shard=2,zero=1",
    "dp=2": "dp=1",
    "shard=2,zero=1": "dp=1 shard=2 dp=2,shard=2,zero=1",
    "shard=2": "dp=1 shard=4 tp=2 shard=2,zero=1",
    "dp=2,shard=2": "cp=2",
    "tp=2": "dp=1 pp=2 shard=2",
    "shard=2,tp=2": "dp=1 shard=2 dp=2,tp=2",
    "pp=2": "dp=1 tp=2 pp=4 shard=2,pp=2",
    "pp=2,tp=2": "dp=1 shard=2,tp=2",
    "pp=2,schedule=interleaved": "pp=2 shard=2,zero=1",
}


@pytest.mark.parametrize("spec", READERS)
def test_goes_on_under_another_plan(ranks: Ranks, tmp_path: Path, spec: str) -> None:
    path = str(tmp_path / "state")
    ranks.run(write, ParallelPlan.parse(spec).world_size, spec=spec, path=path)
    assert [each.name for each in tmp_path.iterdir()] == ["state"]
    wanted = uninterrupted()
    for reader in READERS[spec].split():
        if reader == "dp=1":
            # Without torch.distributed.
            go_on(0, reader, path, wanted)
        else:
            ranks.run(go_on, ParallelPlan.parse(reader).world_size, spec=reader, path=path, wanted=wanted)


def test_only_the_model(tmp_path: Path) -> None:
    path = tmp_path / "state"
    parts = parallelize(language_model(), ParallelPlan(), loss_fn=loss_fn)
    save_state(path, parts)
    other = parallelize(language_model(seed=7), ParallelPlan(), loss_fn=loss_fn)
    assert load_state(path, other) is None
    for (name, mine), (_, right) in zip(other.named_parameters(), parts.named_parameters(), strict=True):
        assert torch.equal(mine, right), name
    with pytest.raises(ValueError, match="optimizer: expected None for a checkpoint without an optimizer's state"):
        load_state(path, other, other.optimizer(adamw))


def test_other_state_than_moments(tmp_path: Path) -> None:
    """Persistent buffers, an optimizer that has not stepped yet, one with a state of other shapes, frozen weights."""

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)

    def build() -> ParallelModel:
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        model[2].bias.requires_grad_(False)
        return parallelize(model, ParallelPlan(), loss_fn=nn.functional.mse_loss)

    parts, other = build(), build()
    optimizer, fresh = parts.optimizer(factory), other.optimizer(factory)
    save_state(tmp_path / "state", parts, optimizer, [1])
    assert load_state(tmp_path / "state", other, fresh) == [1]
    assert not fresh.state
    batch = [torch.randn(4, 3), torch.randn(4, 2)]
    parts.forward_backward(*batch)
    optimizer.step()
    save_state(tmp_path / "state", parts, optimizer)
    load_state(tmp_path / "state", other, fresh)
    for each, its in ((parts, optimizer), (other, fresh)):
        its.zero_grad()
        each.forward_backward(*batch)
        its.step()
    for name, value in parts.stages[0].state_dict().items():
        assert torch.equal(other.stages[0].state_dict()[name], value), name


def test_a_checkpoint_is_always_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    parts = parallelize(language_model(), ParallelPlan(), loss_fn=loss_fn)
    with pytest.raises(FileNotFoundError, match="path: expected a checkpoint of save_state"):
        load_state(path, parts)
    save_state(path, parts, extra="first")
    # Killed between the two renames of the next one.
    path.rename(tmp_path / "state.old")
    assert load_state(path, parts) == "first"
    # Killed while it was written.
    (tmp_path / "state.part").mkdir()
    (tmp_path / "state.part" / "__0_0.distcp").write_bytes(b"half")
    save_state(path, parts, extra="second")
    assert load_state(path, parts) == "second"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_another_model(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, parallelize(language_model(layers=2), ParallelPlan(), loss_fn=loss_fn))
    with pytest.raises(
        ValueError, match=r"path: expected a checkpoint with blocks\.2\.norm1\.weight of shape \[16\], got None"
    ):
        load_state(path, parallelize(language_model(layers=3), ParallelPlan(), loss_fn=loss_fn))
    wide = SlidingWindowLM(32, 24, 2, 2, window=5, max_positions=64, hidden_dim=24).double()
    with pytest.raises(
        ValueError, match=r"path: expected a checkpoint with embed\.weight of shape \[32, 24\], got \[32, 16\]"
    ):
        load_state(path, parallelize(wide, ParallelPlan(), loss_fn=loss_fn))


class Remembers(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    parts = parallelize(Remembers(2, 2), ParallelPlan(), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"parts: expected .* tensors alone, got _extra_state \(dict\)"):
        save_state(tmp_path / "state", parts)


def test_death_between_two_moves_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parallelize(language_model(), ParallelPlan(), loss_fn=loss_fn)
    path = tmp_path / "state"
    save_state(path, parts, extra=1)
    # Twice a process dies when the checkpoint was moved away, and the new one not yet into its place.
    replace = os.replace
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda a, b: replace(a, b) if str(b).endswith(".old") else 1 / 0)
            with pytest.raises(ZeroDivisionError):
                save_state(path, parts, extra=2)
        assert load_state(path, parts) == 1
    save_state(path, parts, extra=3)
    assert load_state(path, parts) == 3
    assert [found.name for found in tmp_path.iterdir()] == ["state"]
