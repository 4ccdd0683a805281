"""Trains a small Swin Transformer to read handwritten digits, and times its attention against the usual code.

``python -m dsaccel.examples.swin`` needs no network: the digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsaccel.demo.options import DemoError
from dsaccel.demo.plot import require_matplotlib
from dsaccel.examples.command import parse_options
from dsaccel.examples.measure import machine
from dsaccel.examples.report import Row, markdown_table, publish, write
from dsaccel.examples.swin_digits import Digits, confusion, load_digits, log_probabilities, make_model, train
from dsaccel.examples.swin_picture import plot_confusion
from dsaccel.examples.swin_timing import backend, time_block, time_model
from dsaccel.train import Progress

# What --quick sets: seconds in all, to see that it runs. So small a model is slower on two threads than on one.
QUICK: dict[str, Any] = {"epochs": 1, "rounds": 1, "threads": 1}
COLUMNS = {
    "what": ("What", ""),
    "fused_ms": ("`swin_attention`, ms", ".2f"),
    "eager_ms": ("usual code, ms", ".2f"),
    "faster": ("Times as fast", ".2f"),
}
# What --doc writes beside the page, in a folder of this name, and the section of the page itself.
DOC_SECTION = "swin"
PICTURE = "confusion.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; `parse` tells what each means."""

    out: Path = Path("runs/swin")
    epochs: int = 40
    seed: int = 0
    rounds: int = 25
    threads: int | None = None
    doc: Path | None = None


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Trains, reads the validation digits, times, and writes the results.

    Returns:
        What ``results.json`` has.

    Raises:
        DemoError: scikit-learn or matplotlib is not installed.
    """
    require_matplotlib()
    train_digits, validation = load_digits()
    torch.manual_seed(options.seed)
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    progress.say(
        f"A Swin Transformer of {parameters / 1e6:.2f}M parameters learns to read {len(train_digits.labels)} digits, "
        f"threads: {torch.get_num_threads()}."
    )
    history = train(model, train_digits, validation, epochs=options.epochs, seed=options.seed, say=progress.say)
    found = read_out(model, validation, options.out / PICTURE)
    progress.update("timing, in turns", force=True)
    result = {
        "machine": machine(),
        "epochs": options.epochs,
        "seed": options.seed,
        "parameters": parameters,
        "train_images": len(train_digits.labels),
        "validation_images": len(validation.labels),
        "seconds": history[-1]["seconds"],
        **found,
        "backend": backend(),
        "rounds": options.rounds,
        "timings": [*time_model(model, train_digits, options.rounds), *time_block(options.rounds)],
        "history": history,
    }
    write(options.out, result, report_of(result))
    return result


def read_out(model: nn.Module, digits: Digits, picture: Path) -> dict[str, Any]:
    """What a trained model takes ``digits`` for, also as a picture.

    Returns:
        ``right`` (how many), ``accuracy``, and ``confusion``, a list of rows, one for each class.
    """
    log_p = log_probabilities(model, digits.images)
    counts = confusion(log_p.argmax(1), digits.labels)
    right, count = int(counts.trace()), len(digits.labels)
    picture.parent.mkdir(parents=True, exist_ok=True)
    title = (
        f"Handwritten digits that the model has not learned from: {right} of {count} read right ({right / count:.1%})"
    )
    plot_confusion(log_p, digits, title, picture)
    return {"right": right, "accuracy": right / count, "confusion": counts.tolist()}


def report_of(result: Row) -> str:
    """The results in Markdown: a sentence on the training, and a table of times."""
    wrong = result["validation_images"] - result["right"]
    found = result["machine"]
    return (
        f"{result['epochs']} epochs over {result['train_images']} digits took {result['seconds']:.0f} s. Of the "
        f"{result['validation_images']} others the model of {result['parameters'] / 1e6:.2f}M parameters reads "
        f"{result['right']} right and {wrong} wrong: an accuracy of **{result['accuracy']:.1%}**.\n\n"
        f"{markdown_table(COLUMNS, result['timings'])}\n\n"
        f"Medians of {result['rounds']} rounds in turns; the last column is the median of the ratios within rounds. "
        f"The op ran on backend '{result['backend']}'. "
        f"{found['cpu']}, threads: {found['threads']}, CPU tier {found['cpu_tier']}, torch {found['torch']}."
    )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m dsaccel.examples.swin", description=__doc__)
    numbers = {
        "epochs": ("passes over the digits", 1),
        "seed": ("of weights and batches", 0),
        "rounds": ("in which the two attentions are timed", 1),
    }
    return parse_options(parser, Options, numbers, arguments, quick=QUICK, section=DOC_SECTION)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``python -m dsaccel.examples.swin``; returns its exit status."""
    options, progress = parse(arguments), Progress()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        result = run(options, progress)
        if options.doc is not None:
            files = {"digits.json": options.out / "results.json", PICTURE: options.out / PICTURE}
            publish(options.doc, DOC_SECTION, report_of(result), files)
    except DemoError as error:
        print(f"dsaccel.examples.swin: {error}", file=sys.stderr)
        return 1
    progress.say(f"\n{report_of(result)}\n\nIn {options.out}: results.json, results.md, {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
