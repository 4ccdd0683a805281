"""The run from beginning to end."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

import torch

from dsaccel.demo.compare import compare, table
from dsaccel.demo.data import load_corpus, text_of
from dsaccel.demo.options import DemoError, Options, parse
from dsaccel.demo.plot import plot_comparison, plot_loss, require_matplotlib
from dsaccel.demo.progress import Progress
from dsaccel.demo.train import RunFolder, Training, train
from dskernels import explain, use_backend

PROMPT = 'The "with" statement'
SAMPLE_BYTES = 400
TEMPERATURE = 0.7

# What a shell reports for a command that Ctrl-C ended; `make` stops at it.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m dsaccel.demo``; returns its exit status."""
    options = parse(arguments)
    progress = Progress()
    try:
        run(options, progress)
    except DemoError as error:
        print(f"dsaccel.demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.say("Interrupted. The same command goes on from here.")
        return INTERRUPTED
    return 0


def run(options: Options, progress: Progress) -> bool:
    """Trains, samples, compares and draws, or what of it the last run left to do.

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
        try:
            training = Training(options, load_corpus())
            _describe(training, progress)
        except ValueError as error:
            raise DemoError(str(error)) from error
        folder = RunFolder(options.out)
        if options.fresh:
            folder.clear()
        elif folder.load(training):
            _tell_of_the_checkpoint(training, folder, progress)
        if not train(training, folder, progress):
            progress.say(f"Stopped after step {training.step} of {options.steps}; the same command goes on from here.")
            return False
        plot_loss(training.found("train"), training.found("validation"), folder.loss_picture)
        _show_result(training, folder, progress)
    if options.compare:
        _show_comparison(training, folder, progress)
    progress.say(f"\nIn {folder.path}: {', '.join(name for name in folder.NAMES if (folder.path / name).exists())}")
    return True


def _describe(training: Training, progress: Progress) -> None:
    options = training.options
    q = torch.zeros(1, options.heads, options.length, options.dim // options.heads)
    choice = explain("window_attention", q, q, q, window=(options.window - 1, 0))
    if choice.chosen is None:
        raise DemoError(f"the attention cannot run as asked for\n{choice}")
    parameters = sum(p.numel() for p in training.model.parameters())
    progress.say(
        f"A transformer of {options.layers} layers and {parameters / 1e6:.2f}M parameters, each layer seeing "
        f"{options.window} bytes,\nlearns {options.length} bytes at a time, attention on backend "
        f"'{choice.chosen}', {torch.get_num_threads()} threads."
    )


def _tell_of_the_checkpoint(training: Training, folder: RunFolder, progress: Progress) -> None:
    if training.finished:
        progress.say(
            f"This run is finished (step {training.step}, in {folder.path}); --fresh starts over. Its results:"
        )
    else:
        progress.say(f"Going on after step {training.step} of {training.options.steps} (from {folder.checkpoint}).")


def _show_result(training: Training, folder: RunFolder, progress: Progress) -> None:
    if not training.found("sample"):
        progress.update("writing a sample", force=True)
        prompt = torch.tensor([list(PROMPT.encode())])
        generator = torch.Generator().manual_seed(training.options.seed)
        sample = training.model.generate(prompt, SAMPLE_BYTES, temperature=TEMPERATURE, generator=generator)
        folder.append(training, {"event": "sample", "text": text_of(sample[0])})
        folder.save(training)
    first, last = training.found("validation")[0], training.found("validation")[-1]
    progress.say(
        f"\nTrained {training.step} steps in {training.seconds:.0f} s. Perplexity per byte of held-out text: "
        f"{first['perplexity']:.1f} before, {last['perplexity']:.2f} after.\nIt writes:\n"
    )
    progress.say(textwrap.indent(training.found("sample")[-1]["text"], "  | ", lambda line: True))


def _show_comparison(training: Training, folder: RunFolder, progress: Progress) -> None:
    length, window = training.options.compare_length, training.options.window
    found = [e for e in training.found("comparison") if e["length"] == length]
    if not found:
        rows = compare(training.options, progress)
        found = [{"event": "comparison", "length": length, "rows": rows}]
        folder.append(training, found[0])
        folder.save(training)
    rows = found[-1]["rows"]
    plot_comparison(rows, length, window, folder.comparison_picture)
    progress.say(
        f"\nThe same training step on {length:,} tokens, window {window:,}, in turns, medians:\n\n{table(rows)}"
    )
    progress.say("\n  Peak memory: by how much one step raises the resident memory of a process of its own.")
