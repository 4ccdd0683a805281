"""The demo trains, stops and resumes exactly, compares honestly, and says what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsaccel.demo.main
import dsaccel.demo.train
from dsaccel.demo import compare
from dsaccel.demo.data import Batches, even_windows, load_corpus, text_of
from dsaccel.demo.main import main, run
from dsaccel.demo.options import QUICK, DemoError, Options, parse
from dsaccel.demo.train import loss_of, make_trainer
from dsaccel.parallel import ParallelPlan
from dsaccel.train import Progress, Trainer

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = ("seconds",)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small are slower on more threads, and much slower where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(**{**QUICK, "out": tmp_path / "run", "steps": 12, "compare": False})


def silent() -> Progress:
    return Progress(io.StringIO())


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def weights(options: Options) -> dict[str, torch.Tensor]:
    """Of the model in the checkpoint."""
    trainer = make_trainer(options, load_corpus())
    assert trainer.resume()
    return dict(trainer.parts.modules[0].state_dict())


def assert_same_run(options: Options, other: Options) -> None:
    """Weights and log are equal bit for bit; only times may differ."""
    assert events(options.out) == events(other.out)
    one, two = weights(options), weights(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_corpus_is_split_once_and_for_all() -> None:
    corpus, again = load_corpus(), load_corpus()
    assert corpus.digest == again.digest
    assert torch.equal(corpus.validation, again.validation)
    assert len(corpus.train) > 200_000
    assert 0.08 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.12
    train, validation = (set(text_of(part).split("\n\n")) for part in (corpus.train, corpus.validation))
    assert not train & validation


def test_batches_give_every_window_once_an_epoch() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    batches = Batches(text, length=7, size=3, seed=0)
    for _ in range(3):
        rows = torch.cat([batches.next() for _ in range(4)])
        assert torch.equal(rows, rows[:, :1] + torch.arange(8))
        starts = sorted(rows[:, 0].tolist())
        assert starts == list(range(starts[0], starts[0] + 7 * 12, 7))
    resumed = Batches(text, length=7, size=3, seed=0)
    resumed.load_state_dict(batches.state_dict())
    assert torch.equal(resumed.next(), batches.next())
    other = Batches(text, length=7, size=3, seed=1)
    other.load_state_dict(batches.state_dict())
    assert not torch.equal(other.next(), batches.next())


def test_windows_of_validation_are_even_and_text_may_be_too_short() -> None:
    windows = even_windows(torch.arange(101, dtype=torch.uint8), length=10, count=4)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert windows.shape == (4, 11)
    with pytest.raises(DemoError, match="too short"):
        even_windows(torch.zeros(10, dtype=torch.uint8), length=10, count=1)


def test_command_runs_end_to_end_and_shows_its_results_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsaccel.demo", "--quick", "--out", str(tmp_path / "run")]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "\r" not in first.stdout
    assert "Perplexity per byte of held-out text" in first.stdout
    for name in ("loss.png", "comparison.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")
    log = events(tmp_path / "run")
    assert [e["step"] for e in log if e["event"] == "train"] == list(range(1, 31))
    losses = [e["loss"] for e in log if e["event"] == "validation"]
    assert losses[-1] < losses[0] - math.log(4)
    (comparison,) = (e for e in log if e["event"] == "comparison")
    assert compare.SDPA in [row["variant"] for row in comparison["rows"]]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in comparison["rows"])

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "This run is finished" in again.stdout
    assert "--fresh starts over" in again.stdout
    results = first.stdout[first.stdout.index("Trained 30 steps") :]
    assert all(line in again.stdout for line in results.splitlines() if not line.startswith("comparison:"))
    assert events(tmp_path / "run") == log


def test_run_in_pieces_equals_run_at_once(options: Options, tmp_path: Path) -> None:
    assert run(options, silent())
    pieces = dataclasses.replace(options, out=tmp_path / "pieces", minutes=1e-9)
    stops = 0
    while not run(pieces, silent()):
        stops += 1
    assert stops == options.steps - 1
    assert_same_run(options, pieces)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_after_the_step_and_keeps_it(
    number: signal.Signals, options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advance = Trainer.advance

    def advance_and_interrupt(trainer: Trainer) -> dict[str, Any]:
        event = advance(trainer)
        if trainer.step == 4:
            signal.raise_signal(number)
        return event

    monkeypatch.setattr(Trainer, "advance", advance_and_interrupt)
    handler = signal.getsignal(number)
    arguments = ["--quick", "--steps", "6", "--no-compare", "--out", str(options.out)]
    assert main(arguments) == 128 + number
    assert signal.getsignal(number) is handler
    assert "Interrupted. The same command goes on" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "Going on after step 4 of 6" in capsys.readouterr().out


def test_other_options_do_not_resume_and_fresh_starts_over(options: Options) -> None:
    run(options, silent())
    other = dataclasses.replace(options, window=20)
    with pytest.raises(DemoError, match=r"of a run with window=16; use --fresh to start over, or --out"):
        run(other, silent())
    kept = options.out / "notes.txt"
    kept.touch()
    assert run(dataclasses.replace(other, fresh=True), silent())
    assert kept.exists()
    assert json.loads((options.out / "run.json").read_text())["window"] == 20


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"backend": "reference"}, 1e-3),
        ({"amp": "bf16"}, 2e-2),
        ({"amp": "fp16"}, 2e-2),
        ({"checkpoint_policy": "selective"}, 1e-6),
    ],
    ids=str,
)
def test_other_ways_to_compute_learn_as_much(changes: dict[str, Any], tolerance: float, options: Options) -> None:
    losses = []
    for each in (options, dataclasses.replace(options, out=options.out / "other", **changes)):
        assert run(each, silent())
        losses.append([e["loss"] for e in events(each.out) if e["event"] == "validation"][-1])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.parametrize(
    "changes",
    [{"sampler": "dynamic"}, {"sampler": "curriculum"}, {"accumulate": 2}, {"schedule": "warm_restarts"}],
    ids=str,
)
def test_other_orders_and_rates_learn_too(changes: dict[str, Any], options: Options) -> None:
    assert run(dataclasses.replace(options, **changes), silent())
    first, *_, last = (e["loss"] for e in events(options.out) if e["event"] == "validation")
    assert last < first - 0.5


def test_a_plan_starts_its_processes_and_gives_the_same_losses(options: Options, tmp_path: Path) -> None:
    assert run(options, silent())
    arguments = ["--quick", "--steps", "12", "--no-compare", "--out", str(tmp_path / "spread"), "--plan", "dp=2"]
    command = [sys.executable, "-m", "dsaccel.demo", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Perplexity per byte of held-out text") == 1
    assert (tmp_path / "spread" / "loss.png").exists()
    one, two = (
        [e["loss"] for e in events(folder) if e["event"] != "sample"] for folder in (options.out, tmp_path / "spread")
    )
    # Sums of float32 in other orders, twelve steps on.
    assert two == pytest.approx(one, rel=1e-3)


def test_options_of_training_reach_the_trainer(options: Options) -> None:
    changes = {
        "amp": "bf16",
        "schedule": "constant",
        "accumulate": 3,
        "sampler": "dynamic",
        "checkpoint_policy": "full",
    }
    config = make_trainer(dataclasses.replace(options, **changes), load_corpus()).config
    assert {name: getattr(config, name) for name in changes} == changes
    parsed = parse(["--plan", "dp=2,tp=2", "--bf16", "--checkpoint-policy", "every:2"])
    assert (parsed.plan, parsed.amp, parsed.checkpoint_policy) == (ParallelPlan(dp=2, tp=2), "bf16", "every:2")


def test_loss_is_that_of_every_byte(options: Options) -> None:
    model, windows = options.model(), torch.randint(256, (3, 65))
    logits = model(windows[:, :-1])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    torch.testing.assert_close(loss_of(model, windows), expected)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.update("step 1")
    progress.update("too soon")
    progress.update("x" * 500, force=True)
    progress.say("done")
    first, second, rest = stream.getvalue().split("\r")
    assert first == ""
    assert second == "step 1\x1b[K"
    line, _, after = rest.partition("\n")
    assert set(line.removesuffix("\x1b[K")) == {"x"}
    assert len(line) < 500
    assert after == "done\n"


def test_progress_elsewhere_is_plain_lines_now_and_then() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interval=60)
    for step in range(5):
        progress.update(f"step {step}")
    progress.update("last", force=True)
    progress.say("done")
    assert stream.getvalue() == "step 0\nlast\ndone\n"


def test_missing_matplotlib_is_said_before_training(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main(["--quick", "--out", str(options.out)]) == 1
    assert "pip install 'dskernels[accel]'" in capsys.readouterr().err
    assert not options.out.exists()


def test_missing_help_texts_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DemoError, match="no help texts"):
        load_corpus()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps: expected a positive number, got 0"),
        (["--minutes", "nan"], "minutes: expected a positive number, got nan"),
        (["--backend", "gpu"], "invalid choice: 'gpu'"),
        (["--amp", "fp8"], "invalid choice: 'fp8'"),
        (["--plan", "dp=two"], "plan"),
        (["--plan", "dp=2", "--batch", "3"], "batch: expected a multiple of 2 for plan dp=2, got 3"),
        (["--plan", "cp=3"], "length: expected a multiple of 3"),
        (["--checkpoint-policy", "half"], "--checkpoint-policy: expected 'none'"),
        (["--compare-length", "0"], "--compare-length: expected a positive number, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_what_only_the_model_knows_is_said_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--heads", "3", "--out", str(tmp_path / "run")]) == 1
    assert "multiple of num_heads = 3" in capsys.readouterr().err


def test_help_tells_every_option_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(Options):
        flag = "--no-compare" if field.name == "compare" else f"--{field.name.replace('_', '-')}"
        assert flag in text
    assert f"training steps (default: {Options.steps})" in text
    assert parse(["--quick", "--dim", "64"]) == Options(**{**QUICK, "dim": 64})


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masked_attention_is_the_same_function(kv_heads: int) -> None:
    model = dsaccel.modules.SlidingWindowLM(50, 32, 2, 4, kv_heads, window=7)
    tokens = torch.randint(50, (2, 40))
    expected = model(tokens)
    expected.logsumexp(-1).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compare.with_masked_attention(model)
    assert isinstance(model.blocks[1].attn, compare.MaskedAttention)
    result = model(tokens)
    result.logsumexp(-1).sum().backward()
    torch.testing.assert_close(result, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], msg=name)


def test_comparison_of_different_things_is_refused() -> None:
    steps = {"a": compare.Step(1, 5.0, 2.0, 0), "b": compare.Step(1, 5.0, 2.1, 0)}
    with pytest.raises(DemoError, match=r"grad_norm is 2 with a but 2\.1 with b"):
        compare._check_agreement(steps, 1e-3)
    compare._check_agreement(steps, 0.1)
    with pytest.raises(DemoError, match="loss"):
        compare._check_agreement({"a": steps["a"], "b": compare.Step(1, float("nan"), 2.0, 0)}, 0.1)


def test_peak_memory_is_the_process_own() -> None:
    code = (
        "from dsaccel.demo.compare import peak_resident_bytes; import torch; a = peak_resident_bytes(); "
        "torch.ones(64 * 2**20, dtype=torch.uint8); print(a, peak_resident_bytes() - a)"
    )
    # A parent that is far larger, which Linux would let show in the child's ru_maxrss.
    held = torch.ones(2**28, dtype=torch.uint8)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    base, rise = map(int, output.split())
    assert base < compare.peak_resident_bytes() - len(held) // 2
    assert 60 * 2**20 < rise < 80 * 2**20


def test_optimizer_decays_matrices_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3))
    decayed, rest = dsaccel.demo.train.make_optimizer(list(model.parameters()), 1.0).param_groups
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in rest["params"]] == [1, 1]
    assert rest["weight_decay"] == 0
