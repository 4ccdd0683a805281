"""The run from beginning to end."""

from __future__ import annotations

import dataclasses
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import cast

import torch
from torch import distributed

from dsaccel.demo.compare import compare, table
from dsaccel.demo.data import load_corpus, text_of
from dsaccel.demo.launch import exit_code, is_main, process_group, start_processes
from dsaccel.demo.options import DemoError, Options, parse
from dsaccel.demo.plot import plot_comparison, plot_loss, require_matplotlib
from dsaccel.demo.train import go_to_checkpoint, make_trainer
from dsaccel.modules import SlidingWindowLM
from dsaccel.parallel import ParallelPlan
from dsaccel.train import Progress, Trainer
from dskernels import explain, use_backend

PROMPT = 'The "with" statement'
SAMPLE_BYTES = 400
TEMPERATURE = 0.7

LOSS_PICTURE, COMPARISON_PICTURE = "loss.png", "comparison.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m dsaccel.demo``; returns its exit status."""
    options, progress = parse(arguments), Progress()
    try:
        if options.plan.world_size > 1 and not distributed.is_torchelastic_launched():
            require_matplotlib()
            start_processes(options.plan.world_size, sys.argv[1:] if arguments is None else arguments)
        with process_group():
            run(options, progress)
    except DemoError as error:
        print(f"dsaccel.demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interruption:
        if is_main():
            progress.say("Interrupted. The same command goes on from here.")
        return exit_code(interruption)
    return 0


def run(options: Options, progress: Progress) -> bool:
    """Trains, samples, compares and draws, or what of it the last run left to do.

    Under a plan each process of a group calls it. After the training the first one goes on alone, with the whole model.

    Args:
        options: of the run.
        progress: where to tell about it.

    Returns:
        Whether the run came to its end; False if ``options.minutes`` are over.

    Raises:
        DemoError: something the user can set right.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; what is done is kept.
    """
    require_matplotlib()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with use_backend(options.backend):
        trainer = _trained(options, progress)
        if not trainer.finished:
            if is_main():
                progress.say(
                    f"Stopped after step {trainer.step} of {options.steps}; the same command goes on from here."
                )
            return False
        if trainer.is_spread:
            distributed.destroy_process_group()
            if not is_main():
                return True
            alone = dataclasses.replace(options, plan=ParallelPlan(), fresh=False)
            trainer = make_trainer(alone, load_corpus(), progress)
            trainer.resume()
        folder = trainer.folder
        plot_loss(folder.events("train"), folder.events("validation"), folder.path / LOSS_PICTURE)
        _show_result(trainer, options, progress)
    if options.compare:
        _show_comparison(trainer, options, progress)
    names = (folder.log.name, LOSS_PICTURE, COMPARISON_PICTURE)
    progress.say(f"\nIn {folder.path}: {', '.join(name for name in names if (folder.path / name).exists())}")
    return True


def _trained(options: Options, progress: Progress) -> Trainer:
    try:
        trainer = make_trainer(options, load_corpus(), progress)
        if is_main():
            _describe(trainer, options, progress)
    except ValueError as error:
        raise DemoError(str(error)) from error
    if options.fresh and is_main():
        for name in (LOSS_PICTURE, COMPARISON_PICTURE):
            (options.out / name).unlink(missing_ok=True)
    if go_to_checkpoint(trainer, options) and is_main():
        _tell_of_the_checkpoint(trainer, progress)
    trainer.run()
    return trainer


def _describe(trainer: Trainer, options: Options, progress: Progress) -> None:
    q = torch.zeros(1, options.heads, options.length, options.dim // options.heads)
    choice = explain("window_attention", q, q, q, window=(options.window - 1, 0))
    if choice.chosen is None:
        raise DemoError(f"the attention cannot run as asked for\n{choice}")
    parameters = sum(p.numel() for p in options.model().parameters())
    progress.say(
        f"A transformer of {options.layers} layers and {parameters / 1e6:.2f}M parameters, each layer seeing "
        f"{options.window} bytes,\nlearns {options.length} bytes at a time, attention on backend "
        f"'{choice.chosen}', {torch.get_num_threads()} threads."
    )


def _tell_of_the_checkpoint(trainer: Trainer, progress: Progress) -> None:
    folder = trainer.folder
    if trainer.finished:
        progress.say(f"This run is finished (step {trainer.step}, in {folder.path}); --fresh starts over. Its results:")
    else:
        progress.say(f"Going on after step {trainer.step} of {trainer.config.steps} (from {folder.checkpoint}).")


def _show_result(trainer: Trainer, options: Options, progress: Progress) -> None:
    folder = trainer.folder
    if not folder.events("sample"):
        progress.update("writing a sample", force=True)
        prompt = torch.tensor([list(PROMPT.encode())])
        generator = torch.Generator().manual_seed(options.seed)
        model = cast(SlidingWindowLM, trainer.parts.modules[0])
        sample = model.generate(prompt, SAMPLE_BYTES, temperature=TEMPERATURE, generator=generator)
        folder.append({"event": "sample", "step": trainer.step, "text": text_of(sample[0])})
    first, *_, last = (math.exp(event["loss"]) for event in folder.events("validation"))
    progress.say(
        f"\nTrained {trainer.step} steps in {trainer.seconds:.0f} s. Perplexity per byte of held-out text: "
        f"{first:.1f} before, {last:.2f} after.\nIt writes:\n"
    )
    progress.say(textwrap.indent(folder.events("sample")[-1]["text"], "  | ", lambda line: True))


def _show_comparison(trainer: Trainer, options: Options, progress: Progress) -> None:
    folder, length, window = trainer.folder, options.compare_length, options.window
    found = [e for e in folder.events("comparison") if e["length"] == length]
    if not found:
        rows = compare(options, progress)
        found = [{"event": "comparison", "step": trainer.step, "length": length, "rows": rows}]
        folder.append(found[0])
    rows = found[-1]["rows"]
    plot_comparison(rows, length, window, folder.path / COMPARISON_PICTURE)
    progress.say(
        f"\nThe same training step on {length:,} tokens, window {window:,}, in turns, medians:\n\n{table(rows)}"
    )
    progress.say("\n  Peak memory: by how much one step raises the resident memory of a process of its own.")
